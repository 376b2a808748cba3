"""Shapes of mixture-of-experts layers, and ragged group sizes for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import common


@dataclass(frozen=True)
class Grouped:
    """One grouped product: experts, routed tokens in all, in_features, out_features."""

    name: str
    groups: int
    tokens: int
    k: int
    n: int


@dataclass(frozen=True)
class Expert:
    """One expert MLP: experts, routed tokens, hidden and intermediate size."""

    name: str
    groups: int
    tokens: int
    hidden: int
    intermediate: int

    def products(self) -> tuple[Grouped, Grouped]:
        """fc1, which makes gate and up at once, and fc2."""
        up = Grouped(
            f"{self.name}_up", self.groups, self.tokens, self.hidden, 2 * self.intermediate
        )
        down = Grouped(
            f"{self.name}_down", self.groups, self.tokens, self.intermediate, self.hidden
        )
        return up, down


EXPERTS = (
    Expert("mixtral", 8, 32768, 4096, 14336),
    Expert("dsv3", 32, 65536, 7168, 2048),
    Expert("qwen3", 128, 65536, 2048, 768),
)
GROUPED = tuple(product for expert in EXPERTS for product in expert.products())


def splits(groups: int, tokens: int, seed: int = 1) -> Any:
    """Group sizes drawn from a Dirichlet(8), not rounded to anything; they fill all tokens."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    draws = torch._standard_gamma(
        torch.full((groups,), 8.0, dtype=torch.float64), generator=generator
    )
    sizes = (draws / draws.sum() * tokens).floor().long()
    sizes[int(sizes.argmax())] += tokens - int(sizes.sum())
    return sizes.to(common.DEVICE)


def rounded(sizes: Any, multiple: int) -> Any:
    """Sizes of groups that end at multiples, near to where they ended; the last takes the rest."""
    ends = sizes.cumsum(0)
    total = int(ends[-1])
    near = ((ends + multiple // 2) // multiple * multiple).clamp(max=total // multiple * multiple)
    near[-1] = total
    return near.diff(prepend=near.new_zeros(1))
