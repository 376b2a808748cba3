"""Rows of experts: where each choice of a token lies among them, and what moves there and back.

Of T tokens with K choices each there are R = T K slots, slot t K + k for choice k of token t, and
as many rows.  Two maps of 32-bit integers say which slot lies in which row: ``row_slot`` has the
slot of each row, ``slot_row`` the row of each slot, both -1 where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.shapes import Expr, Shape, parse_expr, product, substitute
from ..ir.step import Step
from ..ir.words import AttributeType
from .copies import Formats, Results, Stored
from .definition import AttributeDef, Reference, StepDef, Trait
from .launch import Field, Launch, Origin, sizes

_INDEX = (DType.INT32,)
_COUNT = (DType.INT64,)
# Names of rules: "TK" are the T K rows.
_TOKENS, _ROWS, _SLOTS = "T H", "TK H", "T K"
_MAPS = {"row_slot": _INDEX, "slot_row": _INDEX}
_EVERY_SLOT = {"rows": "tokens * choices"}

CAPACITY = AttributeDef("capacity", AttributeType.INT)
HISTOGRAMS = "histograms"
"""Slot of the memory where blocks leave how often each expert is chosen in their part."""
_PARTS = "min(ceildiv(rows, 2048), 256)"
"""Parts of the slots, of one block each: as many as have 2048 slots, the chunk of a block; no more
than 256, as each adds up the counts of those before it."""

PLAN_LAUNCH = Launch(
    "RoutingPlanArguments",
    "routing/routing_plan.h",
    (
        Field("ids", Origin.OPERAND, "ids"),
        Field("counts", Origin.INTEGER_OPERAND, "counts"),
        Field("slot_row", Origin.RESULT, "out"),
        Field("row_slot", Origin.RESULT, "row_slot"),
        Field("split_sizes", Origin.INTEGER_RESULT, "split_sizes"),
        Field("histograms", Origin.RESULT, HISTOGRAMS),
        Field("parts", Origin.LENGTH, HISTOGRAMS),
        Field("capacity", Origin.ATTRIBUTE, CAPACITY.name),
        *sizes("tokens", "choices", "experts"),
    ),
    assigned=True,
)
GATHER_LAUNCH = Launch(
    "GatherRowsArguments",
    "routing/gather_rows.h",
    (
        Field("x", Origin.OPERAND, "a"),
        Field("row_slot", Origin.OPERAND, "row_slot"),
        Field("slot_row", Origin.OPERAND, "slot_row"),
        Field("y", Origin.RESULT, "out"),
        *sizes("tokens", "choices", "columns"),
    ),
    assigned=True,
)
COMBINE_LAUNCH = Launch(
    "CombineRowsArguments",
    "routing/combine_rows.h",
    (
        Field("y", Origin.OPERAND, "a"),
        Field("slot_row", Origin.OPERAND, "slot_row"),
        Field("add", Origin.OPERAND, "add", optional=True),
        Field("x", Origin.RESULT, "out"),
        *sizes("tokens", "choices", "columns"),
        Field("rows", Origin.ROWS, "a"),
    ),
    assigned=True,
)
TAKE_LAUNCH = Launch(
    "TakeArguments",
    "routing/take.h",
    (
        Field("from", Origin.FLOAT_OPERAND, "a"),
        Field("index", Origin.OPERAND, "index"),
        Field("out", Origin.FLOAT_RESULT, "out"),
        *sizes("elements", "sources"),
    ),
    assigned=True,
)


def _histograms(step: Step, buffers: Mapping[str, Buffer], formats: Formats) -> Results:
    """Counts of each part: ``[parts, E]``, nothing where one block counts all."""
    rows = {"rows": buffers[step.input("ids") or ""].shape.elements}
    experts = buffers[step.input("counts") or ""].shape.dims[0]
    parts = substitute(parse_expr(_PARTS), rows)
    return {HISTOGRAMS: Stored(DType.INT32, Shape(None, (parts, experts)))}


def _added(step: Step) -> Expr:
    """An addition for each element of each row."""
    extents = dict(step.sizes)
    return product((extents["tokens"], extents["choices"], extents["columns"]))


ROUTING_PLAN = StepDef(
    "routing_plan",
    operands=("ids", "counts"),
    results=("out", "row_slot", "split_sizes"),
    attributes=(CAPACITY,),
    shapes={
        None: {
            "ids": _SLOTS,
            "counts": "E",
            "out": _SLOTS,
            "row_slot": "TK",
            "split_sizes": "E",
        }
    },
    dtypes={
        "ids": _INDEX,
        "counts": _COUNT,
        "out": _INDEX,
        "row_slot": _INDEX,
        "split_sizes": _COUNT,
    },
    indices={"ids": "experts"},
    counted={"counts": "ids"},
    equal=_EVERY_SLOT,
    scratch=_histograms,
    reference=Reference("routing.plan", frozenset(("ids", "counts"))),
    sizes={"tokens": "T", "choices": "K", "rows": "TK", "experts": "E"},
    launch=lambda _: PLAN_LAUNCH,
)
"""The two maps, of which ``slot_row`` is the first result, and how many rows each expert has."""

GATHER_ROWS = StepDef(
    "gather_rows",
    operands=("a", "row_slot", "slot_row"),
    shapes={None: {"a": _TOKENS, "row_slot": "TK", "slot_row": _SLOTS, "out": _ROWS}},
    dtypes=_MAPS,
    indices={"slot_row": "rows"},
    inverse={"row_slot": "slot_row"},
    equal=_EVERY_SLOT,
    traits=frozenset((Trait.RECOMPUTED,)),
    linear=("a",),
    moves="a",
    reference=Reference("routing.gather_rows", frozenset(("a", "row_slot", "slot_row"))),
    sizes={"tokens": "T", "choices": "K", "rows": "TK", "columns": "H"},
    launch=lambda _: GATHER_LAUNCH,
)
"""The rows of tokens, one for each choice."""

COMBINE_ROWS = StepDef(
    "combine_rows",
    operands=("a", "slot_row"),
    optional=("add",),
    shapes={None: {"a": _ROWS, "slot_row": _SLOTS, "add": _TOKENS, "out": _TOKENS}},
    dtypes={"slot_row": _INDEX},
    indices={"slot_row": "rows"},
    equal=_EVERY_SLOT,
    linear=("a", "add"),
    moves="a",
    named="slot_row",
    reference=Reference("routing.combine_rows", frozenset(("a", "slot_row", "add"))),
    sizes={"tokens": "T", "choices": "K", "rows": "TK", "columns": "H"},
    flops=_added,
    launch=lambda _: COMBINE_LAUNCH,
)
"""Each token's rows, added up."""

TAKE = StepDef(
    "take",
    operands=("a", "index"),
    shapes={None: {"a": "S...", "index": "T...", "out": "T..."}},
    dtypes={"a": (DType.FLOAT32,), "index": _INDEX, "out": (DType.FLOAT32,)},
    linear=("a",),
    moves="a",
    reference=Reference("routing.take", frozenset(("a", "index"))),
    sizes={"elements": "T", "sources": "S"},
    launch=lambda _: TAKE_LAUNCH,
)
"""Numbers of slots or of rows at the places that one of the maps names, 0 where it names none."""
