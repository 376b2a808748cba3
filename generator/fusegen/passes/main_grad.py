"""Gradients of weights go to buffers of the caller's, as Megatron's ``main_grad``.

They are fp32, or of the weights' own type.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.kernel import GemmKind
from ..ir.naming import main_grad
from ..ir.step import Operand, Step
from ..options.main_grad import MainGrad
from ..steps import is_gemm
from .draft import Draft, NotPossible


def keep_in_main_grad(draft: Draft, choice: MainGrad) -> Draft:
    """Let every GEMM that gives a weight's gradient write into, or add to, the caller's buffer.

    Raises:
        NotPossible: no GEMM gives one.
    """
    written = {
        step.out
        for step in draft.backward
        if is_gemm(step) and GemmKind(step.kind) is GemmKind.WGRAD
    }
    kept = {name: leaf for leaf, name in draft.gradients if name in written}
    if not kept:
        raise NotPossible("no GEMM gives the gradient of a weight")
    dtype = DType.IO if choice.narrow else DType.FLOAT32
    buffers = [Buffer(main_grad(leaf), dtype, draft.buffers[leaf].shape) for leaf in kept.values()]

    def redirected(step: Step) -> Step:
        if step.out not in kept:
            return step
        buffer = main_grad(kept[step.out])
        operand = (Operand("accumulate", buffer),) if choice.adds else ()
        return replace(
            step,
            inputs=(*step.inputs, *operand),
            outputs=(Operand("out", buffer),),
            mutates=(buffer,),
        )

    return replace(
        draft.with_buffers({buffer.name: buffer for buffer in buffers}),
        backward=tuple(redirected(step) for step in draft.backward),
        gradients=tuple(
            (leaf, main_grad(leaf) if name in kept else name) for leaf, name in draft.gradients
        ),
        main_grads=tuple((leaf, main_grad(leaf)) for leaf in kept.values()),
    )
