"""What a release promises to keep, printed: API, op schemas and state dicts of a bundle, exit
codes, and keys of JSON answers.

Every page is lines of text: cells that have the same in common, then what they have, indented.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from click.testing import CliRunner
from torch import nn

from fusegen import cli
from fusegen.cli.exits import ExitCode

Facts = Mapping[str, tuple[str, ...]]
"""What is promised, by cell or by command."""

SILU = ("--arch", "cpu", "--module", "silu", "--recipe", "bf16")
COMMANDS = (
    ("list", "ops"),
    ("list", "modules"),
    ("list", "recipes"),
    ("list", "archs"),
    ("list", "targets"),
    ("list", "fusions"),
    ("list", "options"),
    ("list", "extensions"),
    ("plan", *SILU),
    ("explain", "silu", "bf16", "cpu"),
    ("explain", "silu", "bf16", "cpu", "--after", "math"),
    ("explain", "linear", "bf16", "sm_90a", "--sizes", "T=64,K=64,N=64"),
    ("validate",),
    ("schema", "recipe"),
    ("schema", "--specs", "mine"),
    ("new", "recipe", "toy", "--specs", "mine"),
    ("generate", *SILU, "--diff"),
    ("generate", *SILU),
    ("vendor", "experts", *SILU, "--namespace", "acme"),
    ("check",),
    ("status", "experts"),
    ("build", "generated/cpu"),
    ("eject", "generated/cpu", "silu"),
    ("plan", "--module", "nothing"),
    ("validate", "--specs", "nowhere"),
)
"""Commands with an answer, in an order in which each has what it needs."""


_DATA = ("counts", "schema", "plan")
"""Keys of objects whose own keys are names, a JSON Schema's, or those of fusegen's inside."""


def page(facts: Facts) -> str:
    """The facts as text, those that are the same once."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, lines in facts.items():
        names.setdefault(lines, []).append(name)
    blocks = ("\n".join((*same, *(f"  {line}" for line in lines))) for lines, same in names.items())
    return "\n".join(blocks) + "\n"


def facts(text: str) -> Facts:
    """Inverse of ``page``."""
    found: dict[str, tuple[str, ...]] = {}
    names: list[str] = []
    lines: list[str] = []
    for line in (*text.splitlines(), ""):
        if line.startswith("  "):
            lines.append(line[2:])
            continue
        if lines:
            found |= dict.fromkeys(names, tuple(lines))
            names, lines = [], []
        names.append(line)
    return found


# ---- bundles


def api(cells: Mapping[str, ModuleType]) -> Facts:
    """Constructors, methods, attributes and functions of the cells."""
    return {name: tuple(_api(module)) for name, module in cells.items()}


def _api(cell: ModuleType) -> Iterator[str]:
    for function in _public(cell, inspect.isfunction):
        yield f"{function.__name__}{inspect.signature(function)}"
    for each in _public(cell, inspect.isclass):
        if not issubclass(each, nn.Module):
            continue
        own_words = inspect.signature(each) if "__init__" in vars(each) else "()"
        yield f"{each.__name__}{own_words}"
        for name, method in sorted(vars(each).items()):
            method = getattr(method, "__func__", method)
            if inspect.isfunction(method) and not name.startswith("_"):
                yield f"{each.__name__}.{name}{inspect.signature(method)}"
        made = instance(each)
        tensors = (*made.state_dict(keep_vars=True), *dict(made.named_buffers()))
        own = {*vars(made)} - {*vars(nn.Module())}
        names = {*own, *tensors, *dict(made.named_children()), *dict(made.named_parameters())}
        yield from (f"{each.__name__}.{name}" for name in sorted(names) if name[0] != "_")


def schemas(cells: Mapping[str, ModuleType], namespace: str) -> Facts:
    """Names of the cells' ops but those of backwards, and what the op of a forward takes."""
    found = {name: tuple(_schemas(name, namespace)) for name in cells}
    return {name: lines for name, lines in found.items() if lines}


def _schemas(cell: str, namespace: str) -> Iterator[str]:
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        if not full.startswith(f"{namespace}::{cell}_") or full.startswith(
            f"{namespace}::{cell}__"
        ):
            continue
        # What a backward takes, and how many ops it is, is its own.
        if re.search(r"_backward(_\d+)?$", full):
            continue
        op = getattr(getattr(torch.ops, namespace), full.partition("::")[2]).default
        arguments = str(op._schema).partition(" -> ")[0].partition("(")[2]
        short = full.replace(cell, "<cell>")
        yield f"{short}({arguments}" if full.endswith("_forward") else short


def without_flags(found: Facts) -> Facts:
    """Schemas without the flags that ask a forward to save something: what it saves is its own."""
    return {
        name: tuple(re.sub(r",? ?bool need_\w+", "", line) for line in lines)
        for name, lines in found.items()
    }


def state_dicts(cells: Mapping[str, ModuleType]) -> Facts:
    """Keys, shapes and types of the state dicts of the cells, with sizes 16, 32, 48 and so on."""
    found = {}
    for name, cell in cells.items():
        for each in _public(cell, inspect.isclass):
            if issubclass(each, nn.Module):
                state = instance(each).state_dict()
                lines = [f"{key} {[*t.shape]} {t.dtype}" for key, t in state.items()]
                found[name] = (*lines, f"all keys: {', '.join(state) or 'none'}")
    return found


def instance(each: type[nn.Module]) -> nn.Module:
    """A module without memory, of the sizes 16, 32, 48 and so on, in the order of its keywords."""
    parameters = inspect.signature(each).parameters
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in named if p.default is p.empty]
    sizes: dict[str, Any] = {name: 16 * place for place, name in enumerate(needed, 1)}
    return each(**sizes, **({"device": "meta"} if "device" in parameters else {}))


def _public(cell: ModuleType, kind: Callable[[object], bool]) -> list[Any]:
    own = (each for name, each in sorted(vars(cell).items()) if not name.startswith("_"))
    return [each for each in own if kind(each) and each.__module__ == cell.__name__]


# ---- the command line


def exit_codes() -> Facts:
    """What runs end with."""
    return {code.name: (str(int(code)),) for code in ExitCode}


def json_keys(commands: Iterable[tuple[str, ...]] = COMMANDS) -> Facts:
    """Keys of the answers of commands, run in the working directory, and of the objects in them."""
    Path("mine").mkdir()
    found = {}
    for words in commands:
        done = CliRunner().invoke(cli.program, [*words, "--json"])
        found[" ".join(words)] = (f"exit {done.exit_code}", *_keys(json.loads(done.stdout)))
    return found


def _keys(answer: Mapping[str, Any]) -> Iterator[str]:
    for key, value in answer.items():
        yield key
        for each in value[:1] if isinstance(value, list) else (value,):
            if isinstance(each, dict) and key not in _DATA:
                yield from (f"{key}{'[]' * isinstance(value, list)}.{name}" for name in each)


# ---- what is kept


def lost(before: Facts, now: Facts) -> list[str]:
    """What was promised and is not kept: a line each."""
    told = []
    for name, lines in before.items():
        have = now.get(name, ())
        told += [
            f"{name}: {line}" for line in lines if not any(_keeps(line, each) for each in have)
        ]
    return told


def _keeps(before: str, now: str) -> bool:
    """Whether what was callable as a line says still is: what came on top comes last, optional, and
    parameters may take more types than they did.
    """
    name, _, rest = before.partition("(")
    if not rest or now.partition("(")[0] != name:
        return before == now
    (result, *old), (given, *new) = _parameters(rest), _parameters(now.partition("(")[2])
    kept = result == given and len(new) >= len(old) and all(map(_takes, old, new))
    return kept and all("=" in each or each == "*" for each in new[len(old) :])


def _takes(old: str, new: str) -> bool:
    """Whether a parameter takes all that one of the same name and default took."""
    before, now = (re.fullmatch(r"(\w+): '(.*)'( = .*)?", each) for each in (old, new))
    if not before or not now:
        return old == new
    alike = before[1] == now[1] and before[3] == now[3]
    return alike and {*before[2].split(" | ")} <= {*now[2].split(" | ")}


def _parameters(text: str) -> list[str]:
    """Parameters of a signature behind its opening bracket; the result counts as the first one."""
    inside, _, result = text.rpartition(")")
    found, depth = [""], 0
    for char in inside:
        depth += (char in "([") - (char in ")]")
        if char == "," and not depth:
            found.append("")
        else:
            found[-1] += char
    return [result.strip(), *(each.strip() for each in found)]
