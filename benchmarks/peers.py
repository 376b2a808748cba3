"""Other libraries' grouped products in bf16, where they are installed.

Each makes, from operands as ours reads them, a call that computes the same product. What a library
wants laid out otherwise is laid out before the timing, and group sizes that it wants on the host
are read before: so its time is its product's alone. Checked against the sources of the versions
named. Left out: torchao's grouped product, which takes group sizes of multiples of 16 alone, and
DeepGEMM's weight gradient, which adds to an fp32 tensor.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Tensor]


def _same(out: Tensor) -> Tensor:
    return out


@dataclass(frozen=True)
class Made:
    """A call, and what becomes of its result to compare it, which is not timed."""

    run: Call
    read: Callable[[Tensor], Tensor] = _same


Make = Callable[[str, Tensor, Tensor, Tensor, Tensor], Made | None]
"""(fprop, dgrad or wgrad; group sizes; x; weight; dy) -> a call, None where it has no such one."""


def _quack(kind: str, sizes: Tensor, x: Tensor, weight: Tensor, dy: Tensor) -> Made:
    """quack-kernels 0.6.5; tunes itself at the first call."""
    gemm: Any = importlib.import_module("quack.gemm_interface").gemm
    begins = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
    runs: dict[str, Call] = {
        "fprop": lambda: gemm(x, weight.mT, cu_seqlens_m=begins),
        "dgrad": lambda: gemm(dy, weight, cu_seqlens_m=begins),
        "wgrad": lambda: gemm(dy.t(), x, cu_seqlens_k=begins),
    }
    return Made(runs[kind])


def _transformer_engine(kind: str, sizes: Tensor, x: Tensor, weight: Tensor, dy: Tensor) -> Made:
    """transformer-engine 2.20: the products of its GroupedLinear, one cuBLAS call per group."""
    gemm: Any = importlib.import_module(
        "transformer_engine.pytorch.cpp_extensions"
    ).general_grouped_gemm
    splits = sizes.tolist()
    weights, xs, dys = list(weight), list(torch.split(x, splits)), list(torch.split(dy, splits))
    none = [None] * len(splits)
    more: dict[str, Any] = {"m_splits": splits}

    def fprop() -> Tensor:
        out = torch.empty_like(dy)
        gemm(weights, xs, [out], none, x.dtype, single_output=True, **more)
        return out

    def dgrad() -> Tensor:
        out = torch.empty_like(x)
        gemm(
            *(weights, dys, [out], none, x.dtype),
            **{"layout": "NN", "single_output": True, "grad": True, **more},
        )
        return out

    def wgrad() -> Tensor:
        out = torch.empty_like(weight)
        gemm(xs, dys, list(out), none, x.dtype, layout="NT", grad=True, **more)
        return out

    return Made({"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}[kind])


def _deep_gemm(kind: str, sizes: Tensor, x: Tensor, weight: Tensor, dy: Tensor) -> Made | None:
    """deep_gemm 2.6.1; its groups begin at multiples of an alignment, so operands are padded."""
    if kind == "wgrad":
        return None
    deep_gemm: Any = importlib.import_module("deep_gemm")
    rows, layout = padded(sizes, int(deep_gemm.get_mk_alignment_for_contiguous_layout()))
    given = x if kind == "fprop" else dy
    a = given.new_zeros(len(layout), given.shape[1])
    a[rows] = given[: len(rows)]
    out = given.new_empty(len(layout), weight.shape[1 if kind == "fprop" else 2])
    multiply: Callable[..., None] = {
        "fprop": deep_gemm.m_grouped_bf16_gemm_nt_contiguous,
        "dgrad": deep_gemm.m_grouped_bf16_gemm_nn_contiguous,
    }[kind]

    def run() -> Tensor:
        multiply(a, weight, out, layout)
        return out

    return Made(run, lambda out: out[rows])


def padded(sizes: Tensor, alignment: int) -> tuple[Tensor, Tensor]:
    """Groups that begin at multiples of an alignment.

    Returns:
        The padded row of every token, and the group of every padded row, -1 for none (int32).
    """
    room = -(-sizes // alignment) * alignment
    begins = room.cumsum(0) - room
    groups = torch.arange(len(sizes), device=sizes.device)
    owner = groups.repeat_interleave(sizes)
    places = torch.arange(len(owner), device=sizes.device) - (sizes.cumsum(0) - sizes)[owner]
    rows = begins[owner] + places
    layout = torch.full((int(room.sum()),), -1, dtype=torch.int32, device=sizes.device)
    layout[rows] = owner.to(torch.int32)
    return rows, layout


@dataclass(frozen=True)
class Peer:
    """A library: what it is imported and installed as, and how its products are made."""

    module: str
    install: str
    make: Make


PEERS: Mapping[str, Peer] = {
    "QuACK": Peer("quack", "quack-kernels", _quack),
    "TransformerEngine": Peer(
        "transformer_engine.pytorch", "transformer-engine[pytorch]", _transformer_engine
    ),
    "DeepGEMM": Peer("deep_gemm", "git+https://github.com/deepseek-ai/DeepGEMM", _deep_gemm),
}


def installed(peers: Mapping[str, Peer] = PEERS) -> dict[str, Peer]:
    """Those that import; a line on stderr for each that does not."""
    found = {}
    for name, peer in peers.items():
        try:
            importlib.import_module(peer.module)
        except ImportError as error:
            missing = importlib.util.find_spec(peer.module.partition(".")[0]) is None
            why = f"not installed (pip install {peer.install})" if missing else f"import: {error}"
            _say(f"{name} is left out: {why}")
        else:
            found[name] = peer
    return found


def calls(
    peers: Mapping[str, Peer],
    kind: str,
    sizes: Tensor,
    operands: list[tuple[Tensor, Tensor, Tensor]],
    expected: Tensor,
    tolerance: float = 1e-2,
) -> dict[str, list[Call]]:
    """Each library's calls, one per set of operands; those whose first result is right.

    A line on stderr for each that fails or is wrong: a peer's fault ends no benchmark of ours.
    """
    found = {}
    for name, peer in peers.items():
        try:
            made = [peer.make(kind, sizes, *each) for each in operands]
            runs = [each for each in made if each is not None]
            if not runs:
                continue
            got = runs[0].read(runs[0].run())
            error = float((got.float() - expected.float()).norm() / expected.float().norm())
        except Exception as problem:
            _say(f"{name} is left out of {kind}: {type(problem).__name__}: {problem}")
            continue
        if error <= tolerance:
            found[name] = [each.run for each in runs]
        else:
            _say(f"{name} is left out of {kind}: it is off by {error:.2e}")
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr)
