"""docs/performance.md and its figures: what they say of records, ours and made-up ones."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fusegen.build import gpu
from fusegen.commands import bench

OURS, BASELINE = "fusegen", "torch compiled"
ENVIRONMENT = {
    "date": "2026-01-02T03:04:05Z",
    "commit": "0000000",
    "device": "NVIDIA H200",
    "torch": "2.11.0+cu130",
}
SPEEDS = {
    BASELINE: 1.0,
    "torch eager": 0.8,
    OURS: 1.25,
    "fusegen fp8_delayed": 2.0,
    "fusegen fp8_delayed recompute_activations": 1.9,
    "fusegen mxfp8": 0.9,
    "TransformerEngine": 0.05,
    "TransformerEngine fp8_delayed": 2.5,
    "torchao fp8_rowwise": 1.1,
}


@pytest.fixture(autouse=True)
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "visible_capability", lambda: None)


@pytest.fixture
def benchmarks() -> bench.Benchmarks:
    return bench.find()


def row(case: str, who: str, time: float, **more: Any) -> dict[str, Any]:
    empty = {"floor": None, "rate": None, "rate_unit": "", "fraction": None, "extra": {}}
    times = {"median": time, "low": time, "high": time, "samples": [time]}
    return {"case": case, "contender": who, "unit": "ms", **times, **empty, **more}


def result(name: str, *rows: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "environment": ENVIRONMENT, "rows": list(rows)}


def mlps(**more: Any) -> dict[str, Any]:
    """Two models, and one of them under another draw."""
    cases = ("mixtral", "qwen3", "mixtral zipf")
    rows = (row(case, who, 10 / speed, **more) for case in cases for who, speed in SPEEDS.items())
    return result("mlp", *rows)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        (OURS, (OURS, "bf16", ())),
        ("fusegen fp8_block", (OURS, "fp8_block", ())),
        ("fusegen bf16 recompute_activations", (OURS, "bf16", ("recompute_activations",))),
        ("fusegen rounded groups", (OURS, "bf16", ("rounded", "groups"))),
        (BASELINE, (BASELINE, "bf16", ())),
        ("TransformerEngine fp8_delayed", ("TransformerEngine", "fp8_delayed", ())),
    ],
)
def test_names_of_contenders(benchmarks: bench.Benchmarks, name: str, read: Any) -> None:
    who = benchmarks.module("labels").Contender.parse(name)
    assert (who.library, who.recipe, who.choices) == read
    assert who.ours == (read[0] == OURS)


@pytest.mark.parametrize(
    ("case", "read"),
    [
        ("mixtral_up fprop", ("Mixtral 8x7B", "fc1, forward")),
        ("dsv3_all_down wgrad", ("DeepSeek-V3, all experts", "fc2, gradient of W")),
        ("dsv3_up zipf dgrad", ("DeepSeek-V3, 32 experts", "fc1, zipf, gradient of x")),
        ("qwen3_down wgrad, added", ("Qwen3-30B-A3B", "fc2, gradient of W, added")),
        ("new_model_up fprop", ("new model", "fc1, forward")),
        ("8192x4096x2048 fprop", ("8192x4096x2048", "forward")),
    ],
)
def test_names_of_gemms(benchmarks: bench.Benchmarks, case: str, read: Any) -> None:
    assert benchmarks.module("labels").gemm(case) == read


def test_the_headline_shows_everybody_by_recipe_and_model(benchmarks: bench.Benchmarks) -> None:
    figure = benchmarks.module("plots").of(mlps())
    assert [panel.title for panel in figure.panels] == ["Mixtral 8x7B", "Qwen3-30B-A3B"]
    assert {group: [label for _, label in rows] for group, rows in figure.groups.items()} == {
        "bf16": [OURS, BASELINE, "torch eager", "TransformerEngine"],
        "FP8, delayed scaling": [OURS, "TransformerEngine"],
        "FP8, a scale per row": ["torchao"],
        "MXFP8, emulated": [OURS],
    }
    bars = figure.panels[0].bars
    assert {name: round(bar.value, 3) for name, bar in bars.items()} == {
        name: speed for name, speed in SPEEDS.items() if "recompute" not in name
    }
    assert {name for name, bar in bars.items() if bar.strong} == {
        OURS,
        "TransformerEngine fp8_delayed",
    }, "who is fastest of several under a recipe, whoever it is"


def test_the_opening_counts_what_is_faster_and_what_is_not(benchmarks: bench.Benchmarks) -> None:
    summary = benchmarks.module("summary")
    page = summary.page([mlps()], {"mlp": Path("somewhere/performance.png")})
    picture, text = page.split("\n\n")[1:3]
    assert picture == "![The expert MLP, forward and backward](performance.png)"
    assert text == (
        "On one NVIDIA H200, a forward and backward of fusegen's expert MLP is 2.00 times "
        "(FP8, delayed scaling) and 1.25 times (bf16) as fast as PyTorch's grouped GEMMs under "
        "`torch.compile` in bf16. In 4 of 6 comparisons with another library under the same "
        "recipe it is faster, whatever end of the ratio's interval is taken; the best of those, "
        "TransformerEngine (FP8, delayed scaling, Mixtral 8x7B), takes 0.80 times as long."
    )
    assert "| `mixtral` | Mixtral 8x7B | 8 | 32768 | 4096 x 14336 |" in page
    assert page.count("](performance.png)") == 1
    assert page.index("| `mixtral`") < page.index("## The expert MLP")


def test_rows_of_the_same_rounds_are_compared_round_by_round(benchmarks: bench.Benchmarks) -> None:
    over = benchmarks.module("plots").over
    ours = {"contender": OURS, "median": 2.0, "samples": [2.0, 4.0, 2.0, 4.0, 2.0, 2.0, 2.0]}
    theirs = {"contender": "x", "median": 3.0, "samples": [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]}
    ratio = over(theirs, ours)
    assert ratio.value == 1.5 and ratio.low == 0.75, "a median alone would say faster"
    assert over({**theirs, "samples": []}, ours).low is None


def test_intervals_of_paired_rounds_are_shown(benchmarks: bench.Benchmarks) -> None:
    paired = {
        BASELINE: {"median": 0.5, "low": 0.4, "high": 0.625},
        OURS: {"median": 0.75, "low": 0.7, "high": 0.8},
    }
    found = mlps(paired=paired, times_ours=0.75)
    bar = benchmarks.module("plots").of(found).panels[0].bars["fusegen fp8_delayed"]
    assert (bar.value, bar.low, bar.high) == (2.0, 1.6, 2.5)
    assert "| 0.75 (0.70 to 0.80) |" in benchmarks.module("summary").page([found], {})
    few = {BASELINE: {"median": 0.5, "low": None, "high": None}}
    bar = benchmarks.module("plots").of(mlps(paired=few)).panels[0].bars[OURS]
    assert (bar.value, bar.low, bar.high) == (2.0, None, None)


def test_gemms_show_each_other_contender_on_both_sides_of_1(
    benchmarks: bench.Benchmarks,
) -> None:
    plots, figures = benchmarks.module("plots"), benchmarks.module("figures")
    times = {OURS: 2.0, "torch": 3.0, "DeepGEMM": 1.5, "fusegen rounded groups": 1.9}
    rows = [row("mixtral_up fprop", who, time) for who, time in times.items()]
    alone = row("mixtral_up wgrad", OURS, 1.0)
    figure = plots.of(result("grouped", *rows, alone))
    assert {panel.title: panel.bars for panel in figure.panels} == {
        "torch": {"mixtral_up fprop": figures.Bar(1.5, colour=figures.OURS)},
        "DeepGEMM": {"mixtral_up fprop": figures.Bar(0.75, colour=figures.THEIRS)},
    }
    assert figure.groups == {"Mixtral 8x7B": [("mixtral_up fprop", "fc1, forward")]}
    scaled = [
        row(f"qwen3_up fprop {mode}", who, 1.0)
        for mode in ("row split", "block split")
        for who in (OURS, "torch", "pingpong_128x128x128_2x1")
    ]
    figure = plots.of(result("kernels_gemm_fp8_bench", *scaled))
    assert [panel.title for panel in figure.panels] == [
        "torch\na scale per row, split accumulation",
        "torch\nscales per block, split accumulation",
    ], "tiles of ours are no contenders"
    assert figure.groups == {"Qwen3-30B-A3B": [("qwen3_up fprop", "fc1, forward")]}


def test_host_times_are_grouped_by_module_and_number_of_experts(
    benchmarks: bench.Benchmarks,
) -> None:
    rows = [
        row(f"forward: {name}", name[0], 1.0, extra={"times_nn_linear": times})
        for name, times in (
            ("nn.Linear", 1.0),
            ("GroupedLinear fp8_block, 8 experts", 1.5),
            ("GroupedLinear, 8 experts", 0.5),
            ("te.GroupedLinear, 8 experts", 9.0),
        )
    ]
    figure = benchmarks.module("plots").of(result("host", *rows))
    assert {group: [label for _, label in rows] for group, rows in figure.groups.items()} == {
        "GroupedLinear, 8 experts": ["bf16", "FP8, scales per block"],
        "TransformerEngine GroupedLinear, 8 experts": ["bf16"],
    }
    assert [bar.value for bar in figure.panels[0].bars.values()] == [1.5, 0.5, 9.0]


def test_a_result_without_rivals_has_no_figure(benchmarks: bench.Benchmarks) -> None:
    of = benchmarks.module("plots").of
    assert of(result("grouped", row("mixtral_up fprop", OURS, 1.0))) is None
    assert of(result("mlp", row("mixtral", OURS, 1.0))) is None
    assert of(result("pointwise", row("silu forward", OURS, 1.0))) is None
    page = benchmarks.module("summary").page([result("mlp", row("mixtral", OURS, 1.0))], {})
    assert "![" not in page and "| mixtral | fusegen |" in page


def test_a_bar_that_squashes_the_rest_ends_at_the_edge(benchmarks: bench.Benchmarks) -> None:
    figures = benchmarks.module("figures")

    def figure(*values: float, log: bool = True) -> Any:
        bars = {str(place): figures.Bar(value) for place, value in enumerate(values)}
        groups = {"all": [(key, key) for key in bars]}
        return figures.Figure("t", "n", "a", groups, [figures.Panel("p", bars)], log=log)

    low, high = figures._limits(figure(0.01, 100))
    assert 0.2 < low < figures.FARTHEST[0] and figures.FARTHEST[1] < high < 6
    low, high = figures._limits(figure(0.99, 1.01))
    assert low < 0.8 and high > 1.25, "nor does a narrow one make much of little"
    assert "ends beyond the axis" in figures._axis(figure(0.01, 1))
    assert figures._axis(figure(0.5, 1)) == "a, log"
    assert figures._axis(figure(0.01, 100, log=False)) == "a"


@pytest.mark.slow
def test_every_record_has_a_figure_that_can_be_drawn_twice(
    benchmarks: bench.Benchmarks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is committed: the same bytes, no name of ours that a reader does not know."""
    summary, plots = benchmarks.module("summary"), benchmarks.module("plots")
    results = summary.newest()
    drawn = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        monkeypatch.setattr(summary, "PAGE", folder / "performance.md")
        drawn.append(summary.draw(results))
    assert {*plots.FIGURES} == {*drawn[0]}
    for name, path in drawn[0].items():
        assert path.read_bytes() == drawn[1][name].read_bytes() != b""
    for each in results:
        figure = plots.of(each) if each["name"] in drawn[0] else None
        assert figure is None or not re.search(r"_|\bfp8\b", _said(figure)), _said(figure)


def _said(figure: Any) -> str:
    """All words of a figure."""
    rows = [label for rows in figure.groups.values() for _, label in rows]
    titles = [panel.title for panel in figure.panels]
    return "\n".join([figure.title, figure.note, figure.axis, *figure.groups, *rows, *titles])


def test_the_page_on_record_is_what_the_records_give(benchmarks: bench.Benchmarks) -> None:
    """Numbers in sentences come from records, as the tables do."""
    summary = benchmarks.module("summary")
    results = summary.newest()
    page = summary.page(results, dict.fromkeys(benchmarks.module("plots").FIGURES, Path("x.png")))
    (mlp,) = (each for each in results if each["name"] == "mlp")
    changed = copy.deepcopy(mlp)
    faster: list[Mapping[str, Any]] = changed["rows"]
    for each in faster:
        if each["contender"] == "fusegen fp8_delayed":
            each["samples"] = [time / 10 for time in each["samples"]]  # type: ignore[index]
            each.pop("paired", None)  # type: ignore[attr-defined]
    other = summary.page([changed if each is mlp else each for each in results], {})
    (opening,) = (text for text in page.split("\n\n") if text.startswith("On one"))
    assert opening in page and opening not in other


def test_revisions_are_a_line_per_cell_and_part(benchmarks: bench.Benchmarks) -> None:
    """Each has what the ratio is over all shapes, and failures are not lost."""
    cell, other = "grouped_mlp bf16", "revision 0000000"
    rows = [row(f"{cell}, {shape} step", OURS, 1.0) for shape in ("mixtral", "qwen3")]
    rows += [
        row(f"{cell}, mixtral step", other, 1.0, times_ours=1.0),
        row(f"{cell}, qwen3 step", other, 1.2, times_ours=1.2),
        {"case": f"{cell}, dsv3 step", "contender": "all", "error": "result 3 has other bits"},
    ]
    table = benchmarks.module("summary").ratios(result("revisions", *rows))
    assert table.splitlines()[2:] == [
        "| grouped_mlp bf16 | step | 2 | 1.100 | 1.000 | 1.200 |",
        "| grouped_mlp bf16, dsv3 step |  | failed: result 3 has other bits |  |  |  |",
    ]


def test_revisions_with_other_bits_are_not_timed(benchmarks: bench.Benchmarks) -> None:
    """Not-a-numbers are compared as bits, too, and so are zeros of either sign."""
    require = benchmarks.module("revisions")._require_equal
    nan, zero = torch.full((3,), torch.nan), torch.zeros(2, dtype=torch.bfloat16)
    require("case", [nan, zero], [nan.clone(), zero.clone()])
    with pytest.raises(SystemExit, match="case: result 1 has other bits"):
        require("case", [nan, zero], [nan, -zero])
    with pytest.raises(SystemExit, match="case: 1 results, of the earlier revision 2"):
        require("case", [nan, zero], [nan])


def test_revisions_want_an_earlier_bundle(
    benchmarks: bench.Benchmarks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unnamed, they are no part of all benchmarks."""
    monkeypatch.setattr(benchmarks.module("common"), "DEVICE", "cpu")
    monkeypatch.setattr(benchmarks.module("revisions"), "BEFORE", tmp_path)
    with pytest.raises(SystemExit, match="make before REVISION"):
        list(benchmarks.module("revisions").revisions())
    monkeypatch.setattr(bench, "_lacking", lambda: None)
    assert "revisions" in benchmarks.names and "revisions" not in benchmarks.chosen(())
