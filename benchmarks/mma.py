"""bf16 grouped GEMMs by mma.sync as sm_90 code, beside Triton's by the same instruction.

What ships for sm_80 is compiled for the GPU at hand, so its design is measured and no translation
of its PTX. Ours is the point that the rules of specs/archs/sm_80.yaml choose; further points stand
under their own names. Rates count useful operations, 2 T N K.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import pairs
import shapes
import torch
from common import OURS, Case, Row
from floors import plan_of
from kernels import build
from kernels.fp8_kernels import GemmArguments, Stream
from torch import Tensor

from fusegen import api
from fusegen.ir.kernel import GemmKind
from fusegen.ir.kernel_set import KernelSet
from fusegen.tuning.cases import Case as Sizes

ARCH = "sm_80"
CELL = "grouped_linear__bf16"
PEER = "Triton mma.sync"
POINTS = (
    "mma_128x128x32_2x2_4_2",
    "mma_128x256x32_2x4_4_1",
    "mma_256x128x32_4x2_4_1",
    "mma_128x128x64_2x2_2_2",
)
QUICK_SHAPES = ("qwen3_up",)
KINDS = tuple(GemmKind)


class Kernel:
    """The three GEMMs of one point."""

    def __init__(self, point: str) -> None:
        """Load its library, which must be built."""
        self._point = point
        self._library = ctypes.CDLL(str(build.mma_library(point)))
        self._processors = torch.cuda.get_device_properties(0).multi_processor_count

    def __call__(
        self, kind: GemmKind, sizes: Tensor, x: Tensor, weight: Tensor, dy: Tensor
    ) -> Tensor:
        """The GEMM of groups of these sizes, int64 [E] on the device.

        Raises:
            RuntimeError: the launch failed; names the point and the call.
        """
        groups, n, k = weight.shape
        a, b, shape = {
            GemmKind.FPROP: (x, weight, (len(x), n)),
            GemmKind.DGRAD: (dy, weight, (len(x), k)),
            GemmKind.WGRAD: (dy, x, (groups, n, k)),
        }[kind]
        d = torch.empty(shape, device=x.device, dtype=x.dtype)
        arguments = GemmArguments(
            *(a.data_ptr(), b.data_ptr(), None, d.data_ptr(), sizes.data_ptr()),
            *(len(x), groups, n, k, self._processors, None),
        )
        stream = Stream(torch.cuda.current_stream().cuda_stream, False)
        call = ctypes.c_char_p()
        launch = getattr(self._library, f"launch_{kind.value}")
        code = launch(ctypes.byref(arguments), ctypes.byref(stream), ctypes.byref(call))
        if code != 0:
            raise RuntimeError(f"{self._point}: error {code} of {call.value!r}")
        return d


@dataclass(frozen=True)
class Work:
    """One kind of GEMM on one shape.

    Attributes:
        kind: of the GEMM.
        shape: of the GEMM.
        chosen: the point that ships for it.
        kernels: by point.
    """

    kind: GemmKind
    shape: shapes.Grouped
    chosen: str
    kernels: Mapping[str, Kernel]

    @property
    def case(self) -> str:
        """What its rows are of."""
        return f"{self.shape.name} {self.kind.value}"

    def measure(self) -> list[Row]:
        """Check, then time everybody in turns.

        Raises:
            SystemExit: a GEMM is wrong.
        """
        import triton_mma

        shape = self.shape
        sizes = shapes.splits(shape.groups, shape.tokens)
        weight = common.normal(shape.groups, shape.n, shape.k, scale=shape.k**-0.5)
        x, dy = common.normal(shape.tokens, shape.k), common.normal(shape.tokens, shape.n)
        operands = (x, weight, dy)
        config, peer = triton_mma.fastest(self.kind.value, sizes, shape.n, shape.k, operands)
        runs: dict[str, Any] = {
            (OURS if point == self.chosen else f"tile {point}"): partial(kernel, self.kind, sizes)
            for point, kernel in self.kernels.items()
        }
        runs[PEER] = peer
        expected = _expected(self.kind, sizes, *operands)
        for name, run in runs.items():
            common.require_close(f"{self.case} {name}", run(*operands), expected)
        del expected
        samples = common.compare({name: _contender(run, operands) for name, run in runs.items()})
        print(f"{self.case:24} ours {self.chosen}, {PEER} {config}", flush=True)
        return [self._row(name, times, samples[PEER]) for name, times in samples.items()]

    def _row(self, name: str, times: common.Samples, peer: common.Samples) -> Row:
        operations = 2 * self.shape.tokens * self.shape.n * self.shape.k
        rate = operations / statistics.median(times) / 1e9
        over = {} if name == PEER else {PEER: pairs.ratio(times, peer)}
        return common.row(self.case, name, "ms", times, rate=rate, rate_unit="TFLOP/s", paired=over)


def _contender(run: Any, operands: tuple[Tensor, Tensor, Tensor]) -> common.Contender:
    return lambda _: run(*operands)


def _expected(kind: GemmKind, sizes: Tensor, x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
    ends = sizes.cumsum(0).to(torch.int32)
    if kind is GemmKind.FPROP:
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    if kind is GemmKind.DGRAD:
        return torch._grouped_mm(dy, weight, offs=ends)
    return torch._grouped_mm(dy.t(), x, offs=ends)


def _sets() -> dict[GemmKind, KernelSet]:
    sets = plan_of(CELL, ARCH).kernel_sets
    return {each.kind: each for each in sets if each.kind is not None}


def _choice(kernels: KernelSet, kind: GemmKind, shape: shapes.Grouped) -> str:
    sizes = Sizes(shape.groups, shape.tokens, shape.n, shape.k).sizes(kind)
    return kernels.point(sizes)


def _built(points: list[str]) -> dict[str, Kernel]:
    limits = api.load_specs().archs[ARCH].limits
    with concurrent.futures.ThreadPoolExecutor(len(points)) as pool:
        for report in pool.map(lambda point: build.build_mma(point, limits), points):
            print(report, flush=True)
    return {point: Kernel(point) for point in points}


def mma(*, quick: bool = False) -> Iterator[Case]:
    """Time what ships and further points on the grouped shapes; quick: on one of them.

    Raises:
        SystemExit: there is no GPU of compute capability 9.0.
    """
    if common.DEVICE == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("mma: a GPU of compute capability 9.0 is needed")
    torch.manual_seed(1)
    sets = _sets()
    wanted = [each for each in shapes.GROUPED if not quick or each.name in QUICK_SHAPES]
    choices = {(each, kind): _choice(sets[kind], kind, each) for each in wanted for kind in KINDS}
    kernels = _built(sorted({*choices.values(), *POINTS}))
    for (shape, kind), chosen in choices.items():
        work = Work(kind, shape, chosen, kernels)
        yield Case(work.case, work.measure)
        torch.cuda.empty_cache()
