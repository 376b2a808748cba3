"""Which architecture serves a GPU, and which ones `all` stands for."""

from __future__ import annotations

from collections.abc import Iterable

from ..families.gpus import gpu_called
from .diagnostics import did_you_mean
from .load import SpecSet

CPU = "cpu"
"""The architecture of the reference."""

ALL = "all"
"""What stands for all architectures, where one is asked for: a bundle that chooses by device."""


def all_archs(specs: SpecSet) -> tuple[str, ...]:
    """The architectures of GPUs that `all` stands for, sorted.

    Those of parts (sm_90a_h20) are none: a capability does not tell them apart.
    """
    return tuple(sorted(a.name for a in specs.archs.values() if a.has_kernels and a.name == a.isa))


def arch_of(capability: tuple[int, int] | None, specs: SpecSet) -> str | None:
    """The architecture for a GPU: the latest that it runs, with the longest name (sm_90a, not
    sm_90) of several.

    Those of parts (sm_90a_h20) are none: a capability does not tell them apart.
    """
    if capability is None:
        return None
    fit = [arch for arch in specs.archs.values() if arch.name == arch.isa]
    fit = [arch for arch in fit if arch.runs_on(capability)]
    best = max(fit, key=lambda arch: (arch.capability or (0, 0), len(arch.name)), default=None)
    return best.name if best else None


def arch_called(word: str, specs: SpecSet) -> str | None:
    """The architecture for a GPU that people call by its name: sm_90a for `H100`.

    Where a part has an architecture of its own, it is that one (sm_90a_h20 for `h20`).
    """
    gpu = gpu_called(word)
    if gpu is None:
        return None
    parts = (arch.name for arch in specs.archs.values() if arch.runs_on(gpu.capability))
    own = next((name for name in parts if name.endswith(f"_{gpu.name}")), None)
    return own or arch_of(gpu.capability, specs)


def arch_meant(word: str, specs: SpecSet, choices: Iterable[str]) -> str:
    """The end of a message about an unknown architecture: that of the GPU of this name, too."""
    arch = arch_called(word, specs)
    return did_you_mean(word, choices) if arch is None else f"; did you mean {arch!r}?"
