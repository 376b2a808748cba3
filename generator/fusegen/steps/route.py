"""The choice of experts by a router's logits, its losses, and their gradient.

Of T tokens each chooses K of E experts.  What a kernel adds up over tokens it adds up by parts, of
one block each, whose sums a second kernel adds up in order: results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.shapes import Const, Expr, Shape, add, mul, product
from ..ir.step import LIKE, Step
from ..ir.words import AttributeType
from .copies import Formats, Results, Stored
from .definition import AttributeDef, Reference, StepDef, Trait
from .launch import Field, Launch, Origin, sizes

MOST_EXPERTS, MOST_CHOICES = 1024, 32
"""``kMostExperts`` and ``kMostChoices`` of router/route.h: a warp has an expert's choices in its
lanes, and up to 32 logits in each."""

SCORES = ("softmax", "sigmoid", "sqrt_softplus")
"""Enumerators of ``Score``."""

_SUMS, _CHOSEN = "sums", "chosen"
_PARTS = 132  # ``kRouteParts`` of router/route.h

_WIDE, _INDEX, _COUNT = (DType.FLOAT32,), (DType.INT32,), (DType.INT64,)
_SIZES = {"tokens": "T", "experts": "E", "choices": "K"}
_LOGITS, _SLOTS = "T E", "T K"

SCORE = AttributeDef("score", AttributeType.STRING, words=SCORES)
CHOICES = AttributeDef("top_k", AttributeType.INT, range=(1, MOST_CHOICES))
GROUPS = AttributeDef("groups", AttributeType.INT, range=(1, MOST_CHOICES))
KEPT_GROUPS = AttributeDef("kept_groups", AttributeType.INT, range=(1, MOST_CHOICES))
GROUP_TOP = AttributeDef("group_top", AttributeType.INT, range=(1, MOST_CHOICES))
NORMALIZED = AttributeDef("normalized", AttributeType.BOOL)
SCALE = AttributeDef("scale", AttributeType.FLOAT)
EPS = AttributeDef("eps", AttributeType.FLOAT)
LEAST_SUM = AttributeDef("least_sum", AttributeType.FLOAT)
AUX_COEFFICIENT = AttributeDef("aux_coefficient", AttributeType.FLOAT)
Z_COEFFICIENT = AttributeDef("z_coefficient", AttributeType.FLOAT)
SEQUENCES = AttributeDef("sequences", AttributeType.INT)

_OF_WEIGHTS = (
    SCORE,
    NORMALIZED,
    SCALE,
    EPS,
    LEAST_SUM,
    AUX_COEFFICIENT,
    Z_COEFFICIENT,
    SEQUENCES,
)
ATTRIBUTES = (*_OF_WEIGHTS, CHOICES, GROUPS, KEPT_GROUPS, GROUP_TOP)
_SCALARS = (
    Field(SCORE.name, Origin.WORD, "Score"),
    *(Field(each.name, Origin.ATTRIBUTE, each.name) for each in _OF_WEIGHTS[1:]),
)

LAUNCH = Launch(
    "RouteArguments",
    "router/route.h",
    (
        Field("logits", Origin.FLOAT_OPERAND, "a"),
        Field("choice_bias", Origin.FLOAT_OPERAND, "choice_bias", optional=True),
        Field("all_counts", Origin.INTEGER_OPERAND, "all_counts", optional=True),
        Field("probs", Origin.FLOAT_RESULT, "out"),
        Field("ids", Origin.RESULT, "ids"),
        Field("counts", Origin.INTEGER_RESULT, "counts"),
        Field("aux_loss", Origin.FLOAT_RESULT, "aux_loss"),
        Field("z_loss", Origin.FLOAT_RESULT, "z_loss"),
        Field("sums", Origin.FLOAT_RESULT, _SUMS),
        Field("chosen", Origin.RESULT, _CHOSEN),
        Field("parts", Origin.LENGTH, _SUMS),
        *_SCALARS,
        *(Field(e.name, Origin.ATTRIBUTE, e.name) for e in (GROUPS, KEPT_GROUPS, GROUP_TOP)),
        *sizes("tokens", "experts", "choices"),
    ),
    assigned=True,
)
GRAD_LAUNCH = Launch(
    "RouteGradArguments",
    "router/route.h",
    (
        Field("dprobs", Origin.FLOAT_OPERAND, "a"),
        Field("logits", Origin.FLOAT_OPERAND, "b"),
        Field("ids", Origin.OPERAND, "ids"),
        Field("counts", Origin.INTEGER_OPERAND, "counts"),
        Field("all_counts", Origin.INTEGER_OPERAND, "all_counts", optional=True),
        Field("daux_loss", Origin.FLOAT_OPERAND, "grad_aux", optional=True),
        Field("dz_loss", Origin.FLOAT_OPERAND, "grad_z", optional=True),
        Field("dlogits", Origin.RESULT, "out"),
        *_SCALARS,
        *sizes("tokens", "experts", "choices"),
    ),
    assigned=True,
)


def _scratch(step: Step, buffers: Mapping[str, Buffer], formats: Formats) -> Results:
    """Of each part the sum of each expert's scores and one of squares, and how often each was
    chosen: ``[parts, E + 1]`` and ``[parts, E]``.
    """
    experts = buffers[step.input("a") or ""].shape.flat[-1]
    return {
        _SUMS: Stored(DType.FLOAT32, Shape(None, (Const(_PARTS), add(experts, Const(1))))),
        _CHOSEN: Stored(DType.INT32, Shape(None, (Const(_PARTS), experts))),
    }


def _flops(step: Step) -> Expr:
    """Of a logit: largest, difference, exponential, sum, quotient, sum over tokens; and of each
    choice a comparison with each.
    """
    extents = dict(step.sizes)
    logits = product((extents["tokens"], extents["experts"]))
    return mul(logits, add(Const(6), extents["choices"]))


def _grad_flops(step: Step) -> Expr:
    """Of a logit: its score again, a product and a sum for the dot product, a difference, two
    products.
    """
    extents = dict(step.sizes)
    return product((Const(9), extents["tokens"], extents["experts"]))


ROUTE = StepDef(
    "route",
    operands=("a",),
    optional=("choice_bias", "all_counts"),
    results=("out", "aux_loss", "z_loss", "ids", "counts"),
    attributes=ATTRIBUTES,
    shapes={
        None: {
            "a": _LOGITS,
            "choice_bias": "E",
            "all_counts": "E",
            "out": _SLOTS,
            "aux_loss": "",
            "z_loss": "",
            "ids": _SLOTS,
            "counts": "E",
        }
    },
    dtypes={
        "a": _WIDE,
        "choice_bias": _WIDE,
        "all_counts": _COUNT,
        "out": _WIDE,
        "aux_loss": _WIDE,
        "z_loss": _WIDE,
        "ids": _INDEX,
        "counts": _COUNT,
    },
    divisible={"experts": GROUPS.name},
    least={"experts": "ceildiv(top_k * groups, min(kept_groups, groups))"},
    equal={"choices": CHOICES.name},
    scratch=_scratch,
    reference=Reference("router.forward", frozenset(("a", "choice_bias", "all_counts"))),
    sizes=_SIZES,
    flops=_flops,
    launch=lambda _: LAUNCH,
)

ROUTE_GRAD = StepDef(
    "route_grad",
    operands=("a", "b", "ids", "counts", LIKE),
    optional=("all_counts", "grad_aux", "grad_z"),
    attributes=_OF_WEIGHTS,
    shapes={
        None: {
            "a": _SLOTS,
            "b": _LOGITS,
            "ids": _SLOTS,
            "counts": "E",
            LIKE: "T H",
            "all_counts": "E",
            "grad_aux": "",
            "grad_z": "",
            "out": _LOGITS,
        }
    },
    dtypes={
        "a": _WIDE,
        "b": _WIDE,
        "ids": _INDEX,
        "counts": _COUNT,
        "all_counts": _COUNT,
        "grad_aux": _WIDE,
        "grad_z": _WIDE,
    },
    indices={"ids": "experts"},
    traits=frozenset((Trait.CANCELS,)),
    reference=Reference(
        "router.backward",
        frozenset(("a", "b", "ids", "counts", LIKE, "all_counts", "grad_aux", "grad_z")),
    ),
    sizes=_SIZES,
    flops=_grad_flops,
    launch=lambda _: GRAD_LAUNCH,
)
"""The gradient of the logits in the type of the tensor in the slot ``like``: what GEMMs read."""
