"""The passes: their order, what runs for which cell, and what an observer sees of them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from plans import SPECS

from fusegen import api, cli
from fusegen.ir.naming import Cell
from fusegen.ir.text import parse, text
from fusegen.passes import pipeline
from fusegen.passes.contract import Pass
from fusegen.passes.draft import EMPTY, Draft, Property
from fusegen.passes.pipeline import PASSES, context_of, resolve_module, run_passes
from fusegen.spec.offers import words_of
from fusegen.spec.usage import UsageError

ROOT = Path(__file__).parents[2]
NAMES = [each.name for each in PASSES]


def test_names_are_unique_and_every_property_has_one_giver() -> None:
    assert len(set(NAMES)) == len(NAMES)
    given = [each for one in PASSES for each in sorted(one.gives)]
    assert sorted(given) == sorted(Property)


def test_what_passes_need_is_given_by_earlier_ones_that_always_run() -> None:
    holds: frozenset[Property] = frozenset()
    for each in PASSES:
        assert each.needs <= holds, each.name
        assert not each.before & holds, each.name
        assert not (each.options and each.gives), "others could not rely on it"
        holds |= each.gives


def test_every_pass_of_an_option_is_offered_by_a_module() -> None:
    words = {word for m in SPECS.modules.values() for word in words_of(m, SPECS.ops)}
    for each in PASSES:
        assert {*each.options} <= words, each.name


@pytest.mark.parametrize("name", [each.name for each in PASSES if each.needs or each.before])
def test_a_pass_in_the_wrong_place_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """First of all it lacks what it needs; last of all it comes too late."""
    moved = next(each for each in PASSES if each.name == name)
    others = [each for each in PASSES if each is not moved]
    modules = ("grouped_mlp", "router", "moe_layer")
    offered = {name: words_of(SPECS.modules[name], SPECS.ops) for name in modules}
    cells = ((name, word) for name, own in offered.items() for word in moved.options if word in own)
    module, *words = next(cells, ("grouped_mlp",))
    cell = Cell(module, "fp8_delayed", tuple(words))
    context = context_of(SPECS, cell, "cpu", pipeline.UNCACHED)
    for order in [(moved, *others)] if moved.needs else []:
        monkeypatch.setattr(pipeline, "PASSES", order)
        with pytest.raises(AssertionError, match=f"{name} comes before what it needs"):
            run_passes(context)
    if moved.before and not moved.gives:
        monkeypatch.setattr(pipeline, "PASSES", (*others, moved))
        with pytest.raises(AssertionError, match=f"{name} comes too late"):
            run_passes(context)


def observed(cell: str, arch: str = "cpu") -> list[tuple[Pass, Draft, Draft]]:
    seen: list[tuple[Pass, Draft, Draft]] = []
    resolve_module(
        SPECS, Cell.parse(cell), arch, observe=lambda *each: seen.append((each[0], *each[1:]))
    )
    return seen


def test_an_observer_sees_every_pass_with_the_drafts_around_it() -> None:
    seen = observed("grouped_mlp__bf16__recompute_activations")
    ran = [done.name for done, _, _ in seen]
    assert ran == [n for n in NAMES if n in ran]
    assert {each.name for each in PASSES if not each.options} | {"recompute"} == {*ran}
    assert seen[0][1] is EMPTY
    for (_, _, after), (_, before, _) in pairwise(seen):
        assert after is before


def test_passes_leave_the_draft_before_them_alone() -> None:
    seen: list[tuple[Draft, str]] = []
    cell = Cell.parse("grouped_mlp__fp8_delayed__cached_weights")
    resolve_module(
        SPECS, cell, "sm_90a", observe=lambda _, before, after: seen.append((after, text(after)))
    )
    assert len(seen) > 10
    for draft, printed in seen:
        assert text(draft) == printed


def test_a_pass_adds_what_it_gives() -> None:
    for done, before, after in observed("linear__mxfp8"):
        assert after.holds == before.holds | done.gives


def test_steps_are_in_programs_once_these_are_there() -> None:
    draft = observed("grouped_mlp__fp8_block__delayed_wgrad")[-1][2]
    assert [each.name for each in draft.directions] == ["forward", "backward", "wgrad"]
    assert not (draft.forward or draft.backward or draft.refresh or draft.wgrad)


def test_an_option_runs_its_own_pass_alone() -> None:
    plain = {done.name for done, _, _ in observed("grouped_mlp__bf16")}
    for each in PASSES:
        if each.options == ("scaled_bias",):
            ran = {done.name for done, _, _ in observed("grouped_mlp__bf16__scaled_bias")}
            assert ran - plain == {each.name}


# ---- explain --after


def explain(*words: str) -> str:
    result = CliRunner().invoke(cli.program, ["explain", *words])
    return result.stdout if result.exit_code == 0 else result.stderr


def test_explain_prints_the_draft_after_a_pass() -> None:
    before = explain("linear", "fp8_block", "cpu", "--after", "exact")
    after = explain("linear", "fp8_block", "cpu", "--after", "quantize", "--verify")
    assert "{quantize " not in before[before.index("forward=") :]
    draft = parse(after, Draft)
    assert Property.QUANTIZED in draft.holds
    assert Property.FLAGGED not in draft.holds
    assert text(draft) == after


def test_explain_answers_in_json_too() -> None:
    found = json.loads(explain("linear", "bf16", "cpu", "--after", "saved", "--json"))
    assert found["after"] == "saved"
    assert Property.SAVED in parse("\n".join(found["text"]), Draft).holds


def test_explain_with_verify_says_the_same() -> None:
    words = ("silu", "bf16", "cpu")
    assert explain(*words, "--verify") == explain(*words)


@pytest.mark.parametrize(
    ("after", "option", "says"),
    [
        ("programz", (), "unknown pass 'programz'; did you mean 'programs'?"),
        ("xyz", (), f"unknown pass 'xyz'; known: {', '.join(sorted(NAMES))}"),
        ("interleave", (), "does not run for linear__bf16: no option of 'linear' chooses it"),
        ("main_grad", (), "does not run for linear__bf16: choose it with --option add_to_main_"),
        ("saved", ("cached_weights",), "cannot be made up to the pass 'saved': recipe 'bf16'"),
    ],
)
def test_a_pass_that_is_not_there_is_an_error(
    after: str, option: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UsageError) as error:
        api.draft_after(after, "linear", "bf16", "cpu", options=option)
    assert says in str(error.value)
