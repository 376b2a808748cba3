"""One tensor for the second-level amaxes that the forward leaves for the backward.

Each copy of a format with two levels of scales has the amax of its tensor or of each group, a few
bytes.  As tensors of their own they would be results of the forward and arguments of the backward,
each of which costs the host an allocation or a check in every call.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.buffers import Buffer, JoinedTensor
from ..ir.dtypes import DType
from ..ir.shapes import Const, Expr, Shape
from .draft import Draft


def join_amaxes(draft: Draft) -> Draft:
    """Put amaxes that are saved into one tensor for each number of groups.

    It is there if any of them is; nothing writes or reads the row of one that is not.  A forward
    that collectives cut stays as it is: no op of it makes a tensor of which another makes a part.
    """
    if draft.collectives:
        return draft
    amaxes = {copy.amax for step in draft.forward for copy in step.copies}
    made = {name for step in draft.forward for name in step.writes}
    by_extent: dict[Expr, list[str]] = {}
    for name in (result.buffer for result in draft.saved):
        if name in amaxes and name in made and draft.tensor_with(name) == name:
            (extent,) = draft.buffers[name].shape.dims
            by_extent.setdefault(extent, []).append(name)
    several = {extent: names for extent, names in by_extent.items() if len(names) > 1}
    buffers: dict[str, Buffer] = {}
    tensors: list[JoinedTensor] = []
    for number, (extent, names) in enumerate(several.items(), 1):
        buffer = "saved_amaxes" if number == 1 else f"saved_amaxes_{number}"
        buffers[buffer] = Buffer(buffer, DType.FLOAT32, Shape(None, (Const(len(names)), extent)))
        tensors.append(JoinedTensor(buffer, tuple(names)))
    return replace(draft.with_buffers(buffers), joined=(*draft.joined, *tensors))
