"""Twins of architectures that no GPU here runs: which script makes each.

A twin is the bundle of an architecture compiled for another GPU, with its matrix instructions in
software: loads, groups, barriers, stores and launches are its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import bundles
import mma_twins
from entries import LedgerError


def _tensor_cores(out: Path) -> None:
    script = bundles.ROOT / "tests" / "tensor_cores" / "generate.py"
    done = subprocess.run([sys.executable, str(script), str(out)], check=False)
    if done.returncode:
        raise LedgerError(f"{script}: failed with exit code {done.returncode}; it has said why")


MADE_BY: Mapping[str, Callable[[Path], object]] = {
    "sm_100a": _tensor_cores,
    "sm_120a": mma_twins.generate,
}
"""By architecture; each writes `bundles.TWINS` of it below a folder."""


def generate(archs: Iterable[str]) -> None:
    """Bring the twins of these architectures in `build/twin` up to the specs.

    Raises:
        LedgerError: somebody edited one, or it cannot be generated.
    """
    for arch in archs:
        MADE_BY[arch](bundles.BUILD / bundles.TWIN)
