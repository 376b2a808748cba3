"""GEMMs, grouped and dense: fprop, dgrad and wgrad, others on the same operands."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import pairs
import peers
import shapes
import torch
from common import OURS, Case, Row
from torch import Tensor

DENSE = 8192
ROUNDED = 128  # tokens, to which others pad groups
DENSE_SIZES = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (16384, 4096, 14336),
    (8192, 7168, 2048),
    (2048, 8192, 1024),
)

Run = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, weight, dy) -> the result


@dataclass(frozen=True)
class Gemm:
    """One kind of GEMM on one shape; groups = 0 and no sizes are dense.

    Attributes:
        rounded: ours where groups end at multiples of ROUNDED, which is what ragged ones cost.
        weight_bytes: read and written for each element of the weight, or of its gradient.
    """

    kind: str
    name: str
    groups: int
    tokens: int
    n: int
    k: int
    ours: Run
    torch: Run
    sizes: Tensor | None = None
    rounded: Run | None = None
    weight_bytes: int = 2

    @property
    def case(self) -> str:
        return f"{self.name} {self.kind}"

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        shape = (self.groups, self.n, self.k) if self.groups else (self.n, self.k)
        weight = common.normal(*shape, scale=self.k**-0.5)
        return common.normal(self.tokens, self.k), weight, common.normal(self.tokens, self.n)

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.n * self.k

    @property
    def bytes(self) -> int:
        """Operands read once, the result written once: the same three tensors for every kind."""
        weights = max(self.groups, 1) * self.n * self.k
        return 2 * self.tokens * (self.n + self.k) + self.weight_bytes * weights


def grouped_gemms(package: Any, shape: shapes.Grouped, draw: str = shapes.DRAW) -> Iterator[Gemm]:
    """The three GEMMs of one grouped linear; rounded groups of the usual draw alone."""
    usual = draw == shapes.DRAW
    sizes = shapes.splits(shape.groups, shape.tokens, draw)
    ends = sizes.cumsum(0).to(torch.int32)
    theirs: dict[str, Run] = {
        "fprop": lambda x, w, dy: torch._grouped_mm(x, w.transpose(-2, -1), offs=ends),
        "dgrad": lambda x, w, dy: torch._grouped_mm(dy, w, offs=ends),
        "wgrad": lambda x, w, dy: torch._grouped_mm(dy.t(), x, offs=ends),
    }
    ours = _grouped_runs(package, sizes)
    rounded = _grouped_runs(package, shapes.rounded(sizes, ROUNDED)) if usual else {}
    for kind, run in theirs.items():
        yield Gemm(
            *(kind, shapes.drawn(shape.name, draw), shape.groups, shape.tokens, shape.n, shape.k),
            *(ours[kind], run),
            sizes=sizes,
            rounded=rounded.get(kind),
        )


def _grouped_runs(package: Any, sizes: Tensor) -> dict[str, Run]:
    forward = common.op(package, "grouped_linear__bf16_forward")
    backward = common.op(package, "grouped_linear__bf16_backward")
    return {
        "fprop": lambda x, w, dy: forward(x, w, sizes, None),
        "dgrad": lambda x, w, dy: backward(dy, x, sizes, w, True, False, False)[0],
        "wgrad": lambda x, w, dy: backward(dy, x, sizes, w, False, True, False)[1],
    }


def added_gemm(package: Any, shape: shapes.Grouped) -> Gemm:
    """A weight's gradient, added to fp32; torch's is added after it is made.

    Both buffers grow with every call, from zero.
    """
    sizes = shapes.splits(shape.groups, shape.tokens)
    ends = sizes.cumsum(0).to(torch.int32)
    backward = common.op(package, "grouped_linear__bf16__add_to_main_grad_backward")
    ours, theirs = (
        torch.zeros(shape.groups, shape.n, shape.k, device=common.DEVICE) for _ in range(2)
    )

    def add(x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
        backward(dy, x, sizes, None, ours, False, True, False)
        return ours

    def add_after(x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
        return theirs.add_(torch._grouped_mm(dy.t(), x, offs=ends))

    return Gemm(
        *("wgrad, added", shape.name, shape.groups, shape.tokens, shape.n, shape.k, add, add_after),
        sizes=sizes,
        weight_bytes=8,
    )


def dense_gemms(package: Any, tokens: int, n: int, k: int) -> Iterator[Gemm]:
    """The three GEMMs of one linear."""
    forward = common.op(package, "linear__bf16_forward")
    backward = common.op(package, "linear__bf16_backward")
    runs: dict[str, tuple[Run, Run]] = {
        "fprop": (
            lambda x, w, dy: forward(x, w, None),
            lambda x, w, dy: torch.nn.functional.linear(x, w),
        ),
        "dgrad": (
            lambda x, w, dy: backward(dy, x, w, True, False, False)[0],
            lambda x, w, dy: dy @ w,
        ),
        "wgrad": (
            lambda x, w, dy: backward(dy, x, w, False, True, False)[1],
            lambda x, w, dy: dy.t() @ x,
        ),
    }
    for kind, (ours, theirs) in runs.items():
        yield Gemm(kind, f"{tokens}x{n}x{k}", 0, tokens, n, k, ours, theirs)


def measure(gemm: Gemm, copy_rate: float, others: Mapping[str, peers.Peer]) -> list[Row]:
    """Check the GEMM, then time it, those of others, and the dense 8192^3 one in turns."""
    sets = [gemm.operands() for _ in range(min(4, common.operand_sets(gemm.bytes)))]
    expected = gemm.torch(*sets[0])
    common.require_close(gemm.case, gemm.ours(*sets[0]), expected)
    a, b = common.normal(DENSE, DENSE), common.normal(DENSE, DENSE)
    contenders: dict[str, common.Contender] = {
        OURS: lambda index: gemm.ours(*sets[index % len(sets)]),
        "torch": lambda index: gemm.torch(*sets[index % len(sets)]),
    }
    if gemm.rounded is not None:
        rounded = gemm.rounded
        contenders[f"{OURS} rounded groups"] = lambda index: rounded(*sets[index % len(sets)])
    if gemm.sizes is not None:
        found = peers.calls(others, gemm.kind, gemm.sizes, sets, expected)
        contenders |= {name: partial(_turn, runs) for name, runs in found.items()}
    samples = common.compare({**contenders, "dense": lambda index: a @ b.t()})
    dense = samples.pop("dense")
    return [_row(gemm, name, times, dense, copy_rate) for name, times in samples.items()]


def _turn(runs: Sequence[peers.Call], index: int) -> Any:
    return runs[index % len(runs)]()


def _row(
    gemm: Gemm, name: str, times: Sequence[float], dense: Sequence[float], copy_rate: float
) -> Row:
    """A row, held against the dense GEMMs of the same rounds."""
    milliseconds, over = statistics.median(times), pairs.ratio(times, dense)
    dense_rate = 2 * DENSE**3 / statistics.median(dense) * 1e3
    return common.row(
        gemm.case,
        name,
        "ms",
        times,
        floor=1e3 * max(gemm.flops / dense_rate, gemm.bytes / copy_rate),
        rate=gemm.flops / milliseconds / 1e9,
        rate_unit="TFLOP/s",
        fraction=gemm.flops / (2 * DENSE**3) / over.median,
        extra={"dense_tflops": dense_rate / 1e12},
        paired={"dense": over},
    )


def _cases(gemms: Iterator[Gemm], others: Mapping[str, peers.Peer] | None = None) -> Iterator[Case]:
    copy_rate = common.copy_rate()
    for gemm in gemms:
        yield Case(gemm.case, partial(measure, gemm, copy_rate, others or {}))
        torch.cuda.empty_cache()


def grouped(*, quick: bool = False) -> Iterator[Case]:
    """Grouped GEMMs, group sizes unrounded.

    Both GEMMs of three models under the usual draw, others' beside them; both of more models,
    and fc1's of the three under other draws, beside torch's.
    """
    package = common.bundle()
    firsts: Sequence[shapes.Expert] = [shapes.SMALL] if quick else shapes.EXPERTS
    usual = [(each, shapes.DRAW) for expert in firsts for each in expert.gemms()]
    more = [] if quick else [(each, shapes.DRAW) for each in shapes.MORE_GROUPED]
    draws = [draw for draw in shapes.DRAWS if draw != shapes.DRAW]
    more += [(expert.gemms()[0], draw) for expert in firsts for draw in draws]
    looked_at = (p for each in usual for p in grouped_gemms(package, *each))
    yield from _cases(looked_at, peers.installed())
    yield from _cases(p for each in more for p in grouped_gemms(package, *each))


def dense(*, quick: bool = False) -> Iterator[Case]:
    """Dense GEMMs against torch's."""
    package, sizes = common.bundle(), [(128, 128, 256)] if quick else DENSE_SIZES
    return _cases(p for each in sizes for p in dense_gemms(package, *each))


def main_grad(*, quick: bool = False) -> Iterator[Case]:
    """Weights' gradients at the shapes of three models, added to fp32 buffers."""
    package, of = common.bundle(), shapes.SMALL.gemms() if quick else shapes.GROUPED
    return _cases((added_gemm(package, shape) for shape in of), peers.installed())
