"""Plans with collectives that no option asks for, made by hand in the text of plans and drafts."""

from __future__ import annotations

import re
from collections.abc import Callable

from plans import SPECS

from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.text import parse, text
from fusegen.passes.draft import Draft
from fusegen.passes.pipeline import PASSES, context_of, run_passes
from fusegen.passes.seal import seal
from fusegen.passes.verify import verify_pass

CELL = "grouped_mlp__bf16__one_backward_call"
DELAYED = "linear__bf16__delayed_wgrad"
_GROUP = 'group=ranks:"ranks that share their activations" attributes=(op:max)'
_COLLECTIVES = f"""  collectives=(
    {{all_reduce direction=forward operands=(h) results=(h_max) future=sent_h {_GROUP}}}
    {{all_reduce direction=forward operands=(a) results=(a_max) future=sent_a {_GROUP}}})
  gradients="""
_BUFFERS = """    h_max:{h_max dtype=io shape=[T, 2 * F]}
    a_max:{a_max dtype=io shape=[T, F]}
    sent_h:{sent_h dtype=io shape=[T, 2 * F]}
    sent_a:{sent_a dtype=io shape=[T, F]}
    dy:{dy"""
_EDITS = (
    ("  gradients=", _COLLECTIVES),
    ("    dy:{dy", _BUFFERS),
    ("inputs=(x:h scales", "inputs=(x:h_max scales"),
    ("x:h scales:probs)\n      outputs=(dx", "x:h_max scales:probs)\n      outputs=(dx"),
    ("buffer=h ", "buffer=h_max "),
    ("{h when", "{h_max when"),
    ("inputs=(a:a ", "inputs=(a:a_max "),
    ("inputs=(a:dy b:a ", "inputs=(a:dy b:a_max "),
    ("{a when", "{a_max when"),
)


def edited(before: str, *edits: tuple[str, str]) -> str:
    """A text with replacements that all apply."""
    for old, new in edits:
        assert old in before, old
        before = before.replace(old, new)
    return before


def _changed(cell: str, arch: str, after: str, change: Callable[[str], str]) -> ModulePlan:
    """The plan of a cell whose draft is changed after a pass, in its text."""
    context = context_of(SPECS, Cell.parse(cell), arch)
    seen: dict[str, Draft] = {}
    run_passes(context, lambda done, _, draft: seen.update({done.name: draft}))
    draft = parse(change(text(seen[after])), Draft)
    names = [each.name for each in PASSES]
    for each in PASSES[names.index(after) + 1 :]:
        if each.applies(context):
            before, draft = draft, each.run(draft, context)
            verify_pass(each, before, draft)
    return seal(draft, context)


def exchanged(arch: str = "cpu") -> ModulePlan:
    """An expert MLP whose ranks share h and a: op, collective, op, collective, op."""

    def change(draft: str) -> str:
        program, exact = draft.split("  exact=(")
        math, saved = exact.split("  saved=(")
        program, saved = edited(f"{program}SPLIT{saved}", *_EDITS).split("SPLIT")
        return f"{program}  exact=({math}  saved=({saved}"

    return _changed(CELL, arch, "saved", change)


def delayed(arch: str = "cpu") -> ModulePlan:
    """A linear layer whose ranks share the gradient of the weight once it is computed."""
    group = 'group=peers:"ranks that share gradients" attributes=(op:max)'
    sent = f"all_reduce direction=wgrad operands=(own) results=(dweight) future=sent {group}"
    buffers = "".join(f"    {n}:{{{n} dtype=io shape=[N, K]}}\n" for n in ("own", "sent"))
    return _changed(
        DELAYED,
        arch,
        "delay_wgrad",
        lambda draft: edited(
            draft,
            ("(out:dweight)", "(out:own)"),
            (
                "  gradients=",
                f"  collectives=({{{sent}}})\n  gradients=",
            ),
            ("    dweight:{", f"{buffers}    dweight:{{"),
        ),
    )


def overlapped(arch: str = "cpu") -> ModulePlan:
    """The same, where the activation is of the rank's own h and runs while h is shared."""
    before, wait, after = re.split(r"(      wait:\{sent_h[^}]*\}\n)", text(exchanged(arch)))
    op, rest = after.split("      start:{all_reduce operands=(a)")
    own = op.replace("h_max", "h")
    return parse(f"{before}{own}{wait}      start:{{all_reduce operands=(a){rest}")
