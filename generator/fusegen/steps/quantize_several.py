"""Several tensors quantised by one launch of one kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir.buffers import Buffer
from ..ir.step import Step
from . import quantize
from .copies import Formats, Results
from .definition import StepDef, Trait
from .launch import Field, Launch, Origin
from .parts import numbered


def several(parts: Sequence[Step]) -> Step:
    """One step for several that quantise under the same flags, without its kernel."""
    return Step(
        primitive=QUANTIZE_SEVERAL.name,
        kind=None,
        item="",
        inputs=tuple(o for n, part in enumerate(parts, 1) for o in numbered(part.inputs, n)),
        outputs=tuple(o for n, part in enumerate(parts, 1) for o in numbered(part.outputs, n)),
        when=parts[0].when,
        output_when=tuple(result for part in parts for result in part.output_when),
        copies=tuple(copy for part in parts for copy in part.copies),
        mutates=tuple(name for part in parts for name in part.mutates),
        parts=tuple(parts),
    )


def _infer(step: Step, buffers: Mapping[str, Buffer], formats: Formats) -> Results:
    """Results of every part, in its own slots."""
    return {
        f"{slot}_{number}": stored
        for number, part in enumerate(step.parts, 1)
        for slot, stored in quantize.infer(part, buffers, formats).items()
    }


LAUNCH = Launch(
    "QuantizeSeveralArguments",
    "quantize/several.h",
    (Field("", Origin.EACH_PART),),
    assigned=True,
)

QUANTIZE_SEVERAL = StepDef(
    "quantize_several",
    parts=((quantize.QUANTIZE.name,),),
    infer=_infer,
    traits=frozenset((Trait.JOINS,)),
    launch=lambda _: LAUNCH,
)
