"""Shapes of mixture-of-experts layers, and ragged group sizes for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import common


@dataclass(frozen=True)
class Grouped:
    """One grouped GEMM: experts, routed tokens in all, in_features, out_features."""

    name: str
    groups: int
    tokens: int
    k: int
    n: int


@dataclass(frozen=True)
class Expert:
    """One expert MLP: experts, routed tokens, hidden and intermediate size, experts of a token."""

    name: str
    groups: int
    tokens: int
    hidden: int
    intermediate: int
    top_k: int

    def gemms(self) -> tuple[Grouped, Grouped]:
        """fc1, which makes gate and up at once, and fc2."""
        up = Grouped(
            f"{self.name}_up", self.groups, self.tokens, self.hidden, 2 * self.intermediate
        )
        down = Grouped(
            f"{self.name}_down", self.groups, self.tokens, self.intermediate, self.hidden
        )
        return up, down


EXPERTS = (
    Expert("mixtral", 8, 32768, 4096, 14336, 2),
    Expert("dsv3", 32, 65536, 7168, 2048, 8),
    Expert("qwen3", 128, 65536, 2048, 768, 8),
)
"""Looked at most closely: few large experts, and ranks' shares of many."""
MORE_EXPERTS = (
    Expert("qwen2moe", 60, 32768, 2048, 1408, 4),
    Expert("dsv2", 160, 49152, 5120, 1536, 6),
    Expert("gptoss", 32, 32768, 2880, 2880, 4),
    Expert("dsv3_all", 256, 65536, 7168, 2048, 8),
)
SMALL = Expert("small", 5, 320, 64, 32, 2)
GROUPED = tuple(gemm for expert in EXPERTS for gemm in expert.gemms())
MORE_GROUPED = tuple(gemm for expert in MORE_EXPERTS for gemm in expert.gemms())


Draw = Callable[[int, int, Any], Any]
"""(groups, tokens, generator) -> the share of each group, float64 [groups], summing to anything."""


def _dirichlet(groups: int, tokens: int, generator: Any) -> Any:
    import torch

    shape = torch.full((groups,), 8.0, dtype=torch.float64)
    return torch._standard_gamma(shape, generator=generator)


def _uniform(groups: int, tokens: int, generator: Any) -> Any:
    import torch

    return torch.ones(groups, dtype=torch.float64)


def _zipf(groups: int, tokens: int, generator: Any) -> Any:
    """Shares fall with rank ** 1.1, in any order; a tenth of the groups, at least one, is empty."""
    import torch

    shares = torch.arange(1, groups + 1, dtype=torch.float64) ** -1.1
    shares[groups - math.ceil(groups / 10) :] = 0
    return shares[torch.randperm(groups, generator=generator)]


def _hot(groups: int, tokens: int, generator: Any) -> Any:
    """One group has half the tokens, the others share the rest alike."""
    import torch

    shares = torch.ones(groups, dtype=torch.float64)
    hot = int(torch.randint(groups, (), generator=generator))
    shares[hot] = max(groups - 1, 1)
    return shares


DRAWS: Mapping[str, Draw] = {
    "dirichlet": _dirichlet,
    "uniform": _uniform,
    "zipf": _zipf,
    "hot": _hot,
}
"""Of group sizes: Dirichlet(8), whose sizes vary by a third; all alike; and what routers that are
not balanced give: Zipf with empty groups, and one group with half of all tokens."""
DRAW = "dirichlet"


def drawn(name: str, draw: str) -> str:
    """The name of a shape under a draw; the usual one is not named."""
    return name if draw == DRAW else f"{name} {draw}"


def splits(groups: int, tokens: int, draw: str = DRAW, seed: int = 1) -> Any:
    """Group sizes of a draw, not rounded to anything, int64 [groups]; they fill all tokens.

    What rounding down leaves goes to the largest group.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    shares = DRAWS[draw](groups, tokens, generator)
    sizes = (shares / shares.sum() * tokens).floor().long()
    sizes[int(sizes.argmax())] += tokens - int(sizes.sum())
    return sizes.to(common.DEVICE)


def rounded(sizes: Any, multiple: int) -> Any:
    """Sizes of groups that end at multiples, near to where they ended; the last takes the rest."""
    ends = sizes.cumsum(0)
    total = int(ends[-1])
    near = ((ends + multiple // 2) // multiple * multiple).clamp(max=total // multiple * multiple)
    near[-1] = total
    return near.diff(prepend=near.new_zeros(1))
