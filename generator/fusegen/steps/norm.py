"""Norms of rows, and their gradients: root mean square, layer norm, and length one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.shapes import Const, Expr, Shape, mul, product
from ..ir.step import Step
from ..ir.words import AttributeType
from .copies import Formats, Results, Stored
from .definition import AttributeDef, Reference, StepDef, Trait
from .launch import Field, Launch, Origin, sizes

PARTIALS = "partials"
"""Slot of what parts of the rows leave of the gradients of weight and bias: a sum of columns each,
which are added up in a fixed order."""

ADDED = "add"
"""Slot of what is added in the same pass, to the input or to its gradient; a sum is rounded, and
so is the gradient before it is added to."""

TOTAL = "total"
"""Slot of a sum that a norm is of."""

_PARTS = 132  # ``kNormParts`` of norm_grad.h
_SIZES = {"rows": "T", "columns": "D"}
_RMS, _LAYER, _L2 = "rms", "layer", "l2"
_FLOPS = {_RMS: 4, _LAYER: 8, _L2: 3}
_GRADIENT_FLOPS = {_RMS: 10, _LAYER: 13, _L2: 7}

EPS = AttributeDef("eps", AttributeType.FLOAT)
ZERO_CENTERED = AttributeDef("zero_centered_gamma", AttributeType.BOOL, kinds=(_RMS, _LAYER))

_ROWS = (
    *sizes("rows", "columns"),
    Field("eps", Origin.ATTRIBUTE, EPS.name),
    Field("zero_centered", Origin.ATTRIBUTE, ZERO_CENTERED.name),
    Field("kind", Origin.KIND, "NormKind"),
)

_FIELDS = (
    Field("x", Origin.OPERAND, "a"),
    Field("weight", Origin.OPERAND, "weight", optional=True),
    Field("bias", Origin.OPERAND, "bias", optional=True),
    Field("y", Origin.RESULT, "out"),
    Field("mean", Origin.FLOAT_RESULT, "mean"),
    Field("rstd", Origin.FLOAT_RESULT, "rstd"),
    *_ROWS,
)
LAUNCH = Launch("NormArguments", "norm/norm.h", _FIELDS, assigned=True)
ADD_LAUNCH = Launch(
    "AddNormArguments",
    "norm/add_norm.h",
    (
        *(replace(field, name=f"norm.{field.name}") for field in _FIELDS),
        Field("add", Origin.OPERAND, ADDED),
        Field("total", Origin.RESULT, TOTAL),
    ),
    assigned=True,
)
GRADIENT_LAUNCH = Launch(
    "NormGradArguments",
    "norm/norm_grad.h",
    (
        Field("x", Origin.OPERAND, "a"),
        Field("dy", Origin.OPERAND, "grad"),
        Field("weight", Origin.OPERAND, "weight", optional=True),
        Field("mean", Origin.FLOAT_OPERAND, "mean", optional=True),
        Field("rstd", Origin.FLOAT_OPERAND, "rstd"),
        Field("add", Origin.OPERAND, ADDED, optional=True),
        Field("dx", Origin.RESULT, "out"),
        Field("dweight", Origin.RESULT, "dweight"),
        Field("dbias", Origin.RESULT, "dbias"),
        Field("partials", Origin.FLOAT_RESULT, PARTIALS),
        Field("parts", Origin.LENGTH, PARTIALS),
        *(field for field in _ROWS if field.of != EPS.name),
    ),
    assigned=True,
)


def _flops(of: Mapping[str, int], step: Step) -> Expr:
    """Of statistics, of what follows from them and of what is added, for each element."""
    extents = dict(step.sizes)
    each = of[step.kind or ""] + (step.input(ADDED) is not None)
    return mul(Const(each), product((extents["rows"], extents["columns"])))


def _scratch(step: Step, buffers: Mapping[str, Buffer], formats: Formats) -> Results:
    """Partial sums of columns: ``[parts, sums, D]``, nothing where no sum is asked for."""
    sums = sum(operand.slot in NORM_GRAD.sums for operand in step.outputs)
    columns = buffers[step.input("a") or ""].shape.flat[-1]
    shape = Shape(None, (Const(_PARTS), Const(sums), columns))
    return {PARTIALS: Stored(DType.FLOAT32, shape)} if sums else {}


_X, _ROW, _COLUMNS = "T... D", "T...", "D"
_FORWARD = {"a": _X, "out": _X, "rstd": _ROW}
_BACKWARD = {"a": _X, "grad": _X, "rstd": _ROW, ADDED: _X, "out": _X}
_STATISTICS = {"mean": (DType.FLOAT32,), "rstd": (DType.FLOAT32,)}

NORM = StepDef(
    "norm",
    operands=("a",),
    optional=("weight", "bias"),
    results=("out", "mean", "rstd"),
    kinds=(_RMS, _LAYER, _L2),
    attributes=(EPS, ZERO_CENTERED),
    shapes={
        _RMS: {**_FORWARD, "weight": _COLUMNS},
        _LAYER: {**_FORWARD, "weight": _COLUMNS, "bias": _COLUMNS, "mean": _ROW},
        _L2: _FORWARD,
    },
    dtypes=_STATISTICS,
    independent=("T",),
    traits=frozenset((Trait.RECOMPUTED,)),
    reference=Reference("norms.norm", frozenset(("a", "weight", "bias"))),
    sizes=_SIZES,
    flops=lambda step: _flops(_FLOPS, step),
    launch=lambda _: LAUNCH,
)

_SUMMED = {ADDED: _X, TOTAL: _X}

ADD_NORM = StepDef(
    "add_norm",
    operands=("a", ADDED),
    optional=("weight", "bias"),
    results=("out", "mean", "rstd", TOTAL),
    kinds=(_RMS, _LAYER),
    attributes=NORM.attributes,
    shapes={kind: {**NORM.shapes[kind], **_SUMMED} for kind in (_RMS, _LAYER)},
    dtypes=_STATISTICS,
    independent=("T",),
    reference=Reference("norms.add_norm", frozenset(("a", ADDED, "weight", "bias"))),
    sizes=_SIZES,
    flops=lambda step: _flops(_FLOPS, step),
    launch=lambda _: ADD_LAUNCH,
)
"""The norm of a sum, and the sum."""

NORM_GRAD = StepDef(
    "norm_grad",
    operands=("a", "grad", "rstd"),
    optional=("weight", "mean", ADDED),
    needed={_LAYER: ("mean",)},
    results=("out", "dweight", "dbias"),
    kinds=(_RMS, _LAYER, _L2),
    attributes=(ZERO_CENTERED,),
    shapes={
        _RMS: {**_BACKWARD, "weight": _COLUMNS, "dweight": _COLUMNS},
        _LAYER: {
            **_BACKWARD,
            "mean": _ROW,
            "weight": _COLUMNS,
            "dweight": _COLUMNS,
            "dbias": _COLUMNS,
        },
        _L2: _BACKWARD,
    },
    dtypes=_STATISTICS,
    independent=("T",),
    sums=("dweight", "dbias"),
    scratch=_scratch,
    reference=Reference(
        "norms.norm_grad", frozenset(("a", "grad", "rstd", "mean", "weight", ADDED))
    ),
    sizes=_SIZES,
    flops=lambda step: _flops(_GRADIENT_FLOPS, step),
    launch=lambda _: GRADIENT_LAUNCH,
)
