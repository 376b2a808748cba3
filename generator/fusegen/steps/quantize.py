"""Quantised copies of a tensor."""

from __future__ import annotations

from ..ir.dtypes import DType
from .definition import Reference, StepDef, Trait
from .launch import Field, Launch, Source

SUMMED = "sum"
"""Slot of a sum over rows that a step which quantises them leaves, too."""

LAUNCH = Launch(
    "QuantizeStepArguments",
    "quantize_step.h",
    (Field("quantize.input", Source.OPERAND, "a"), Field("", Source.QUANTIZATION)),
    assigned=True,
)

QUANTIZE = StepDef(
    "quantize",
    operands=("a",),
    optional=("groups",),
    shapes={None: {"a": "T... K", "groups": "E", "out": "T... K"}},
    dtypes={"groups": (DType.INT64,)},
    traits=frozenset((Trait.QUANTIZES,)),
    reference=Reference(
        "quantized.quantize", frozenset(("a", "groups", "amax_history", "scale", "rng_state"))
    ),
    launch=lambda _: LAUNCH,
)
