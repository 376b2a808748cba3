"""The visible GPU and the architecture that serves it, without loading CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from ..spec.kinds import SpecKind
from ..spec.load import SpecSet
from ..spec.serving import arch_of
from ..spec.usage import UsageError, spec_named

NATIVE = "native"
"""What stands for the architecture of the visible GPU where an arch is asked for."""


def visible_capability(env: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Compute capability of the first GPU that a program of this user sees, or None.

    The driver's own tool is asked: loading CUDA would cost seconds and a context.
    """
    env = os.environ if env is None else env
    first = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if first in ("", "-1", "NoDevFiles"):
        return None
    program = shutil.which("nvidia-smi", path=env.get("PATH", ""))
    if program is None:
        return None
    # Parts of a GPU have names the tool does not take here; the whole GPU's answer serves.
    device = [f"--id={first}"] if first.isdigit() or first.startswith("GPU-") else []
    words = [program, "--query-gpu=compute_cap", "--format=csv,noheader", *device]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    major, dot, minor = done.stdout.split("\n")[0].strip().partition(".")
    if done.returncode or not (dot and major.isdigit() and minor.isdigit()):
        return None
    return int(major), int(minor)


def arch_named(name: str, specs: SpecSet) -> str:
    """The architecture of a name, which may be `native`.

    Raises:
        UsageError: an unknown name, or `native` without a GPU that some arch serves.
    """
    if name != NATIVE:
        return spec_named(specs, SpecKind.ARCHS, name, (NATIVE,))
    capability = visible_capability()
    found = arch_of(capability, specs)
    if found is None:
        why = (
            "there is no visible NVIDIA GPU"
            if capability is None
            else f"the GPU has capability {capability[0]}.{capability[1]}, which no arch runs on"
        )
        raise UsageError(f"--arch native: {why}; name one of: {', '.join(specs.archs)}")
    return found
