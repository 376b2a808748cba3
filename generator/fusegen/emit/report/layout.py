"""Where the boxes and lines of a drawing lie, in pixels: nothing here knows what a plan is.

Boxes stand below one another in lanes, in the order in which they run, so only the lines between
them need a place to be found: each has a track in the gutter beside its lane, as values have
registers in a program without branches.  Lines of neighbouring lanes cross the gutter between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

LINE = 16
"""Height of a line of text; all heights are multiples of 4, and so is where lines of a lane end."""
GAP = 8
"""Height of a line without text, which parts a box."""
PADDING = 8
BETWEEN = 20
"""Between two boxes of a lane."""
TRACK = 7
"""Between two lines side by side."""
MARGIN = 14
"""Between a box and the first track beside it."""
HEAD = 28
"""Above the boxes of a lane, for its name."""
_SHIFT = 2
"""Boxes of the column between lanes stand that much lower, so that no two lines are one."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text in a box.

    Attributes:
        text: of it; empty for a gap.
        style: what it says: a class of the style sheet.
        port: the tensor whose lines end here; empty for none.
    """

    text: str
    style: str
    port: str = ""

    @property
    def height(self) -> int:
        """In pixels."""
        return LINE if self.text else GAP


PART = Line("", "gap")
"""What stands between two parts of a box."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a lane.

    Attributes:
        key: unique in its drawing.
        style: a class of the style sheet.
        lines: of text.
        framed: first and last line, counted from 0, that a frame is drawn around; gaps are around.
    """

    key: str
    style: str
    lines: tuple[Line, ...]
    framed: tuple[int, int] | None = None

    @property
    def height(self) -> int:
        """In pixels."""
        return 2 * PADDING + sum(line.height for line in self.lines)

    def offset(self, row: int) -> int:
        """How far below its top a line begins."""
        return PADDING + sum(line.height for line in self.lines[:row])

    def port(self, tensor: str) -> int:
        """How far below its top the lines of a tensor end."""
        row = next(i for i, line in enumerate(self.lines) if line.port == tensor)
        return self.offset(row) + LINE // 2


@dataclass(frozen=True, slots=True)
class Lane:
    """Boxes below one another.

    Attributes:
        name: above them.
        width: of every box.
        boxes: from the top.
    """

    name: str
    width: int
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Net:
    """A tensor on its way from the box that gives it to those that take it.

    Attributes:
        tensor: the port of every box.
        tail: box that gives it.
        heads: boxes that take it, none of which stands above the one before.
    """

    tensor: str
    tail: str
    heads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gutter:
    """Lines beside a lane, or between two.

    Attributes:
        nets: that run in it.
        leaving: index of the lane that they come from.
        entering: index of the lane that they lead to; the same where they return to it.
        left: where they return: whether the gutter lies on the left of its lane.
    """

    nets: tuple[Net, ...]
    leaving: int
    entering: int
    left: bool = False


@dataclass(frozen=True, slots=True)
class PlacedLine:
    """A line of text: where its base line begins."""

    x: int
    y: int
    style: str
    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """A rectangle."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A box, its text and the frame around some of it, if there is one."""

    key: str
    style: str
    frame: Frame
    lines: tuple[PlacedLine, ...]
    inner: Frame | None


@dataclass(frozen=True, slots=True)
class PlacedNet:
    """A line of a drawing.

    Attributes:
        tensor: that it stands for.
        style: a class of the style sheet.
        path: of the line, in the language of SVG.
        arrows: outlines of the arrow heads, one behind the other.
        ends: where it begins and where its heads are.
        track: horizontal place of its vertical part.
    """

    tensor: str
    style: str
    path: str
    arrows: str
    ends: tuple[tuple[int, int], ...]
    track: int


@dataclass(frozen=True, slots=True)
class Drawing:
    """A graph with a place for everything.

    Attributes:
        title: for people who do not see it, too.
        width, height: in pixels.
        names: of lanes.
        boxes: of all lanes.
        nets: between them.
    """

    title: str
    width: int
    height: int
    names: tuple[PlacedLine, ...]
    boxes: tuple[PlacedBox, ...]
    nets: tuple[PlacedNet, ...]


def draw(title: str, lanes: Sequence[Lane], gutters: Sequence[Gutter]) -> Drawing:
    """Give everything its place.

    Args:
        title: of the drawing.
        lanes: from left to right.  Every other one, from the second on, is a column between two:
            its boxes stand as near as they can to where their lines come from.
        gutters: of lines that return to their lane, or lead to the next one.
    """
    heights = _heights(lanes, gutters)
    tracks = [_tracks(each, heights) for each in gutters]
    lefts = _lefts(lanes, gutters, tracks)
    boxes = tuple(
        _placed(box, lane, left, top)
        for lane, left in zip(lanes, lefts, strict=True)
        for box in lane.boxes
        for top in (heights[box.key].top,)
    )
    nets = tuple(
        _net(net, gutter, number, lanes, lefts, heights)
        for gutter, numbers in zip(gutters, tracks, strict=True)
        for net, number in zip(gutter.nets, numbers, strict=True)
    )
    names = tuple(
        PlacedLine(left, LINE, "lane", lane.name)
        for lane, left in zip(lanes, lefts, strict=True)
        if lane.boxes
    )
    right = _right(lanes, lefts, gutters, tracks)
    bottom = max((box.frame.y + box.frame.height for box in boxes), default=HEAD)
    return Drawing(title, right + 1, bottom + PADDING, names, boxes, nets)


@dataclass(frozen=True, slots=True)
class _Height:
    """A box and its top."""

    top: int
    box: Box

    def at(self, tensor: str) -> int:
        """Where the lines of a tensor end."""
        return self.top + self.box.port(tensor)


def _heights(lanes: Sequence[Lane], gutters: Sequence[Gutter]) -> dict[str, _Height]:
    """Boxes of lanes one below the other; then those between, beside what they are given."""
    found: dict[str, _Height] = {}
    for lane in lanes[::2]:
        found |= _stacked(lane.boxes, HEAD, {})
    for lane in lanes[1::2]:
        tails = {head: n for gutter in gutters for n in gutter.nets for head in n.heads}
        wanted = {box.key: _beside(box, tails.get(box.key), found) for box in lane.boxes}
        ordered = sorted(lane.boxes, key=lambda box: wanted[box.key])
        found |= _stacked(ordered, HEAD + _SHIFT, wanted, LINE // 2)
    return found


def _beside(box: Box, net: Net | None, found: dict[str, _Height]) -> int:
    if net is None:
        return HEAD + _SHIFT
    return found[net.tail].at(net.tensor) - box.port(net.tensor) + _SHIFT


def _stacked(
    boxes: Iterable[Box], top: int, wanted: dict[str, int], between: int = BETWEEN
) -> Iterator[tuple[str, _Height]]:
    for box in boxes:
        top = max(top, wanted.get(box.key, top))
        yield box.key, _Height(top, box)
        top += box.height + between


def _tracks(gutter: Gutter, heights: dict[str, _Height]) -> list[int]:
    """The number of each line's track: short lines near the boxes, none on top of another."""
    spans = [_span(net, heights) for net in gutter.nets]
    order = sorted(range(len(spans)), key=lambda i: (spans[i][1] - spans[i][0], spans[i], i))
    taken: list[list[tuple[int, int]]] = []
    numbers = [0] * len(spans)
    for index in order:
        first, last = spans[index]
        free = (
            number
            for number, others in enumerate(taken)
            if all(last < start or end < first for start, end in others)
        )
        number = next(free, len(taken))
        if number == len(taken):
            taken.append([])
        taken[number].append((first, last))
        numbers[index] = number
    return numbers


def _span(net: Net, heights: dict[str, _Height]) -> tuple[int, int]:
    ends = [heights[key].at(net.tensor) for key in (net.tail, *net.heads)]
    return min(ends), max(ends)


def _room(numbers: Sequence[int]) -> int:
    return 2 * MARGIN + TRACK * max(numbers) if numbers else 0


def _lefts(
    lanes: Sequence[Lane], gutters: Sequence[Gutter], tracks: Sequence[Sequence[int]]
) -> list[int]:
    rooms = [_room(numbers) for numbers in tracks]
    x = max((room for g, room in zip(gutters, rooms, strict=True) if g.left), default=0)
    lefts = [x]
    for index, (lane, _) in enumerate(pairwise(lanes)):
        crossing = (
            room
            for gutter, room in zip(gutters, rooms, strict=True)
            if (gutter.leaving, gutter.entering) == (index, index + 1)
        )
        x += lane.width + max((room for room in crossing if room), default=0)
        lefts.append(x)
    return lefts


def _right(
    lanes: Sequence[Lane],
    lefts: Sequence[int],
    gutters: Sequence[Gutter],
    tracks: Sequence[Sequence[int]],
) -> int:
    beside = (
        _room(numbers)
        for gutter, numbers in zip(gutters, tracks, strict=True)
        if gutter.leaving == gutter.entering and not gutter.left
    )
    return lefts[-1] + lanes[-1].width + max(beside, default=0)


def _placed(box: Box, lane: Lane, left: int, top: int) -> PlacedBox:
    lines = tuple(
        PlacedLine(left + PADDING + 2, top + box.offset(row) + 12, line.style, line.text)
        for row, line in enumerate(box.lines)
        if line.text
    )
    inner = None
    if box.framed is not None:
        first, last = box.framed
        start, end = box.offset(first), box.offset(last) + LINE
        inner = Frame(left + 5, top + start - 2, lane.width - 10, end - start + 4)
    return PlacedBox(box.key, box.style, Frame(left, top, lane.width, box.height), lines, inner)


def _net(
    net: Net,
    gutter: Gutter,
    number: int,
    lanes: Sequence[Lane],
    lefts: Sequence[int],
    heights: dict[str, _Height],
) -> PlacedNet:
    from_right = not gutter.left
    start = lefts[gutter.leaving] + (lanes[gutter.leaving].width if from_right else 0)
    returns = gutter.leaving == gutter.entering
    end = start if returns else lefts[gutter.entering]
    away = MARGIN + TRACK * number
    track = start + (away if from_right else -away)
    top = heights[net.tail].at(net.tensor)
    places = [heights[key].at(net.tensor) for key in net.heads]
    far = [*dict.fromkeys(y for y in (min(places), max(places)) if y != top)]
    path = f"M{start} {top}H{track}" + "".join(f"V{y}" for y in far)
    path += "".join(f"M{track} {y}H{end}" for y in places)
    size = 4 if (end > track) else -4
    arrows = "".join(f"M{end} {y}l{-size} -3v6z" for y in places)
    style = "" if returns else "kept"
    return PlacedNet(
        net.tensor, style, path, arrows, ((start, top), *((end, y) for y in places)), track
    )
