"""Drawings of plans: nothing lies on anything else, and every line leads from a box to a box."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest
from plans import plan_of

from fusegen.emit.report.graph import drawings
from fusegen.emit.report.layout import Drawing, Frame, PlacedBox, PlacedNet
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan

CELLS = [
    ("sm_90a", "grouped_mlp__fp8_block"),
    ("sm_90a", "grouped_mlp__nvfp4"),
    ("sm_90a", "grouped_mlp__fp8_delayed__add_to_main_grad"),
    ("sm_90a", "grouped_mlp__bf16__recompute_activations"),
    ("sm_90a", "grouped_linear__fp8_block__cached_weights"),
    ("sm_90a", "grouped_linear__fp8_block__quantized_weights"),
    ("sm_90a", "grouped_linear__fp8_delayed__reduced_amax"),
    ("sm_90a", "grouped_linear__nvfp4__debug"),
    ("sm_90a", "grouped_linear__bf16__delayed_wgrad"),
    ("sm_90a", "linear_cross_entropy__bf16"),
    ("sm_90a", "norm_mlp_swiglu__fp8_block"),
    ("sm_90a", "norm_qkv__bf16"),
    ("sm_90a", "quantize__mxfp8"),
    ("cpu", "mlp__bf16"),
    ("cpu", "dropout__bf16"),
    ("cpu", "identity__bf16"),
]
PLANS = [pytest.param(*each, id=" on ".join(reversed(each))) for each in CELLS]
LETTER = 6.63
"""Pixels that a letter takes of the types which pages ask for, 11 high."""


def drawings_of(arch: str, cell: str) -> tuple[ModulePlan, list[Drawing]]:
    plan = plan_of(arch, Cell.parse(cell))
    return plan, [*drawings(plan, {})]


def meet(one: Frame, other: Frame) -> bool:
    across = one.x < other.x + other.width and other.x < one.x + one.width
    return across and one.y < other.y + other.height and other.y < one.y + one.height


def within(inner: Frame, outer: Frame) -> bool:
    right, bottom = inner.x + inner.width, inner.y + inner.height
    return (
        outer.x <= inner.x
        and outer.y <= inner.y
        and right <= outer.x + outer.width
        and bottom <= outer.y + outer.height
    )


def problems(drawing: Drawing) -> Iterator[str]:
    """What is wrong with where things lie."""
    whole = Frame(0, 0, drawing.width, drawing.height)
    for one, other in combinations(drawing.boxes, 2):
        if meet(one.frame, other.frame):
            yield f"{one.key} lies on {other.key}"
    for box in drawing.boxes:
        if not within(box.frame, whole):
            yield f"{box.key} is cut off"
        yield from texts_beside(box)
    for net in drawing.nets:
        if not 0 <= net.track <= drawing.width:
            yield f"{net.tensor} is cut off"
        yield from loose_ends(net, drawing)
    yield from shared_tracks(drawing)


def texts_beside(box: PlacedBox) -> Iterator[str]:
    for line in box.lines:
        place = Frame(line.x, line.y - 10, round(len(line.text) * LETTER), 12)
        if not within(place, box.frame):
            yield f"{box.key}: {line.text!r} is wider than its box"
    if box.inner and not within(box.inner, box.frame):
        yield f"{box.key}: its frame is larger than itself"


def loose_ends(net: PlacedNet, drawing: Drawing) -> Iterator[str]:
    """A line ends at the side of a box, beside a line of text that begins with its tensor."""
    for x, y in net.ends:
        at = [b for b in drawing.boxes if x in (b.frame.x, b.frame.x + b.frame.width)]
        lines = [line for b in at for line in b.lines if abs(line.y - 4 - y) < 3]
        if not any(line.text.split(",")[0] == net.tensor for line in lines):
            yield f"{net.tensor} ends beside no box that has it"


def shared_tracks(drawing: Drawing) -> Iterator[str]:
    """Vertical parts of lines on one track, and horizontal ones at one height, do not meet."""
    for one, other in combinations(drawing.nets, 2):
        ys = [sorted(y for _, y in net.ends) for net in (one, other)]
        if one.track == other.track and ys[0][0] <= ys[1][-1] and ys[1][0] <= ys[0][-1]:
            yield f"{one.tensor} runs on {other.tensor}"
        for x, y in one.ends:
            for other_x, other_y in other.ends:
                if y != other_y:
                    continue
                first, second = sorted((x, one.track)), sorted((other_x, other.track))
                if first[0] < second[1] and second[0] < first[1]:
                    yield f"{one.tensor} lies on {other.tensor} at {y}"


@pytest.mark.parametrize(("arch", "cell"), PLANS)
def test_nothing_lies_on_anything_else(arch: str, cell: str) -> None:
    plan, found = drawings_of(arch, cell)
    assert bool(found) != plan.is_identity
    for each in found:
        assert [*problems(each)] == [], each.title


def test_faults_of_a_drawing_are_noticed() -> None:
    _, (drawing, *_) = drawings_of("sm_90a", "grouped_mlp__fp8_block")
    boxes, nets = drawing.boxes, drawing.nets
    moved = replace(boxes[1], frame=replace(boxes[1].frame, y=boxes[1].frame.y - 30))
    on_another = replace(drawing, boxes=(boxes[0], moved, *boxes[2:]))
    assert any("lies on" in each for each in problems(on_another))
    assert any("ends beside" in each for each in problems(replace(drawing, boxes=boxes[1:])))
    long = replace(boxes[0].lines[0], text="x" * 60)
    wide = replace(boxes[0], lines=(long,))
    assert any("wider" in each for each in problems(replace(drawing, boxes=(wide, *boxes[1:]))))
    twice = replace(drawing, nets=(*nets, nets[0]))
    assert any("runs on" in each for each in problems(twice))
    assert any("cut off" in each for each in problems(replace(drawing, width=100)))


def expected_ends(plan: ModulePlan) -> set[tuple[str, str]]:
    """What a drawing of training has to have of steps: each with all that it reads and writes."""
    return {
        (f"{program.function} {index}", name)
        for direction in plan.directions
        for program in direction.programs
        for index, step in enumerate(program.steps, 1)
        for name in (*step.reads, *step.writes)
    }


@pytest.mark.parametrize(("arch", "cell"), PLANS)
def test_every_step_has_a_box_with_its_tensors_and_every_reader_a_line(
    arch: str, cell: str
) -> None:
    plan, found = drawings_of(arch, cell)
    boxes = {box.key: box for each in found for box in each.boxes if box.style == "step"}
    for key, name in expected_ends(plan):
        assert any(line.text.split(",")[0] == name for line in boxes[key].lines), (key, name)
    arrows = {(x, y) for each in found for net in each.nets for x, y in net.ends[1:]}
    for direction in plan.directions:
        for program in direction.programs:
            for index, step in enumerate(program.steps, 1):
                box = boxes[f"{program.function} {index}"]
                sides = (box.frame.x, box.frame.x + box.frame.width)
                ends = [y for x, y in arrows if x in sides]
                for name in step.reads:
                    rows = [line.y - 4 for line in box.lines if line.text.split(",")[0] == name]
                    assert any(abs(row - y) < 3 for row in rows for y in ends), (box.key, name)


def test_what_is_saved_stands_between_the_directions() -> None:
    plan, (drawing, *_) = drawings_of("sm_90a", "grouped_mlp__nvfp4")
    saved = [box for box in drawing.boxes if box.style == "saved"]
    tensors = ((result.buffer, plan.joined_tensor(result.buffer)) for result in plan.saved)
    names = [part for name, joined in tensors for part in (joined.parts if joined else (name,))]
    assert sorted(box.lines[0].text for box in saved) == sorted(names)
    lanes = {name.text: name.x for name in drawing.names}
    assert lanes["forward"] < lanes["saved for the backward"] < lanes["backward"]
    assert {box.frame.x for box in saved} == {lanes["saved for the backward"]}


def test_a_step_says_what_it_is_made_of_and_costs() -> None:
    _, (drawing, *_) = drawings_of("sm_90a", "grouped_mlp__fp8_block")
    (box,) = (b for b in drawing.boxes if b.key == "forward 4")
    texts = " ".join(line.text for line in box.lines)
    assert "4. pointwise_quantize" in texts and "27 T F flop" in texts
    assert "one step by activation_quantize 1. pointwise, act" in texts
    assert box.inner is not None
    costs = {("forward", 4): "1.36 GFLOP, 309 MB"}
    plan = plan_of("sm_90a", Cell.parse("grouped_mlp__fp8_block"))
    first, *_ = drawings(plan, costs)
    (box,) = (b for b in first.boxes if b.key == "forward 4")
    assert [line.text for line in box.lines if line.style == "cost"] == ["1.36 GFLOP, 309 MB"]


def test_drawings_are_the_same_every_time() -> None:
    plan = plan_of("sm_90a", Cell.parse("grouped_mlp__nvfp4"))
    assert [*drawings(plan, {})] == [*drawings(plan, {})]
