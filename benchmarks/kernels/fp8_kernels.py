"""FP8 kernels as Python calls: the built library, or its address arithmetic in float64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kernels.build import Format, Kind, Output, Scaling, Target
from kernels.fp8_operands import BLOCK, Operands, Problem, blocks, value

_Pointer, _Long = ctypes.c_void_p, ctypes.c_int64
DTYPES = {Output.BFLOAT16: torch.bfloat16, Output.FLOAT16: torch.float16}


class GemmArguments(ctypes.Structure):
    """That of gemm.h."""

    _fields_ = [
        ("a", _Pointer),
        ("b", _Pointer),
        ("bias", _Pointer),
        ("d", _Pointer),
        ("group_sizes", _Pointer),
        ("tokens", _Long),
        ("groups", _Long),
        ("n", _Long),
        ("k", _Long),
        ("sm_count", ctypes.c_int),
        ("row_scales", _Pointer),
    ]


class Stream(ctypes.Structure):
    """Stream of stream.h."""

    _fields_ = [("handle", _Pointer), ("after_kernel", ctypes.c_bool)]


class _Fp8Gemm(ctypes.Structure):
    """Fp8GemmArguments of gemm_fp8.h."""

    _fields_ = [
        ("gemm", GemmArguments),
        ("pitch_a", _Long),
        ("pitch_b", _Long),
        ("scale_a", _Pointer),
        ("scale_b", _Pointer),
        ("scale_a_per_group", ctypes.c_bool),
        ("scale_b_per_group", ctypes.c_bool),
    ]


Launch = Callable[..., int]
"""(Fp8GemmArguments*, Stream*, const char**) -> 0, or a CUDA error and the name of the call."""


class Gemm(Protocol):
    """What computes one GEMM into d.

    Args:
        splits: int64 [groups] on the device, None: dense.
        bias: [groups, columns], of fprop alone.
        early: whether it may start before the stream's previous kernel has ended.
    """

    def __call__(
        self,
        problem: Problem,
        operands: Operands,
        d: Tensor,
        splits: Tensor | None,
        *,
        bias: Tensor | None = None,
        early: bool = False,
    ) -> None: ...


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Kernel:
    """A built kernel on the current stream."""

    def __init__(self, target: Target, launch: Launch | None = None) -> None:
        """Load it.

        Args:
            target: the kernel.
            launch: what launches it, by default the function of the target's own library.

        Raises:
            FileNotFoundError: it was not built.
        """
        self._target = target
        if launch is None and not target.library.is_file():
            raise FileNotFoundError(f"{target.library} does not exist: run the step `build` first")
        self._launch = launch or ctypes.CDLL(str(target.library)).launch
        self._processors = torch.cuda.get_device_properties(0).multi_processor_count

    def __call__(
        self,
        problem: Problem,
        operands: Operands,
        d: Tensor,
        splits: Tensor | None,
        *,
        bias: Tensor | None = None,
        early: bool = False,
    ) -> None:
        """See Gemm.

        Raises:
            RuntimeError: the launch failed; names the kernel and the call.
        """
        arguments = self._arguments(problem, operands, d, splits, bias)
        stream = Stream(torch.cuda.current_stream().cuda_stream, early)
        call = ctypes.c_char_p()
        code = self._launch(ctypes.byref(arguments), ctypes.byref(stream), ctypes.byref(call))
        if code != 0:
            raise RuntimeError(f"{self._target.name}: error {code} of {call.value!r}")

    def _arguments(
        self,
        problem: Problem,
        operands: Operands,
        d: Tensor,
        splits: Tensor | None,
        bias: Tensor | None,
    ) -> _Fp8Gemm:
        gemm = GemmArguments(
            _address(operands.a),
            _address(operands.b),
            _address(bias),
            _address(d),
            _address(splits),
            problem.tokens,
            len(problem.groups),
            problem.n,
            problem.k,
            self._processors,
        )
        return _Fp8Gemm(
            gemm,
            operands.pitch_a,
            operands.pitch_b,
            _address(operands.scale_a),
            _address(operands.scale_b),
            operands.per_group,
            operands.per_group,
        )


class Emulation:
    """A kernel's address arithmetic in float64, over what is stored alone.

    It shows on any machine that operands lie where gemm_fp8.h says; of the kernel it shows nothing.
    """

    def __init__(self, target: Target) -> None:
        self._target = target

    def __call__(
        self,
        problem: Problem,
        operands: Operands,
        d: Tensor,
        splits: Tensor | None,
        *,
        bias: Tensor | None = None,
        early: bool = False,
    ) -> None:
        """See Gemm."""
        d.zero_()
        for group, (begin, end) in enumerate(problem.groups):
            if end <= begin:
                continue
            result = self.of_group(problem, operands, group)
            if bias is not None:
                result += bias[group].double()
            own = d[group] if self._target.kind is Kind.WGRAD else d[begin:end]
            own.copy_(result)

    def of_group(self, problem: Problem, operands: Operands, group: int) -> Tensor:
        """One group's part of d, float64."""
        begin, end = problem.groups[group]
        if self._target.kind is Kind.WGRAD:
            rows, k = problem.n, 32 * blocks(end - begin, 32)
            start_a = start_b = (0, problem.padded(group))
        else:
            rows, k = end - begin, problem.contraction
            start_a, start_b = (begin, 0), (group * problem.columns, 0)
        total = torch.zeros(rows, problem.columns, dtype=torch.float64, device=problem.device)
        for first in range(0, k, BLOCK):
            width = min(BLOCK, k - first)
            place_a = start_a[0], start_a[1] + first
            place_b = start_b[0], start_b[1] + first
            formats = self._target.format_a, self._target.format_b
            a = _box(operands.a, operands.pitch_a, place_a, (rows, width), formats[0])
            b = _box(operands.b, operands.pitch_b, place_b, (problem.columns, width), formats[1])
            total += a @ b.t() * self._block_scale(problem, operands, group, first // BLOCK)
        return total * self._outer_scale(problem, operands, group)

    def _block_scale(
        self, problem: Problem, operands: Operands, group: int, block: int
    ) -> Tensor | float:
        """Of one step of 128 along the contraction."""
        if self._target.scaling is not Scaling.BLOCK:
            return 1.0
        a, b = operands.scale_a.flatten(), operands.scale_b.flatten()
        if self._target.kind is Kind.WGRAD:
            at = problem.first_block(group) + block
            of_rows = a[at * problem.n :][: problem.n].double()
            return of_rows[:, None] * b[at * problem.k :][: problem.k].double()
        begin, end = problem.groups[group]
        across, down = blocks(problem.k), blocks(problem.n)
        column = torch.arange(problem.columns, device=problem.device) // BLOCK
        forward = self._target.kind is Kind.FPROP
        within = column * across + block if forward else block * across + column
        of_columns = b[group * down * across + within].double()
        of_tokens = a[block * problem.padded_tokens + problem.padded(group) :][: end - begin]
        return of_tokens.double()[:, None] * of_columns

    def _outer_scale(self, problem: Problem, operands: Operands, group: int) -> Tensor | float:
        """Of the finished sum."""
        a, b = operands.scale_a.flatten(), operands.scale_b.flatten()
        if self._target.scaling is Scaling.TENSOR:
            at = group if operands.per_group else 0
            return a[at].double() * b[at].double()
        if self._target.scaling is Scaling.BLOCK:
            return 1.0
        begin, end = problem.groups[group]
        wgrad = self._target.kind is Kind.WGRAD
        of_rows = a[group * problem.n :][: problem.n] if wgrad else a[begin:end]
        of_columns = b[group * problem.columns :][: problem.columns]
        return of_rows.double()[:, None] * of_columns.double()


def _box(
    codes: Tensor, pitch: int, first: tuple[int, int], shape: tuple[int, int], fmt: Format
) -> Tensor:
    """float64 of a box of a buffer whose rows are `pitch` bytes apart."""
    rows = first[0] + torch.arange(shape[0], device=codes.device)
    columns = first[1] + torch.arange(shape[1], device=codes.device)
    return value(codes.flatten()[rows[:, None] * pitch + columns], fmt)
