"""What GPUs have, by compute capability: limits that configurations of kernels are held against.

From the CUDA C++ programming guide, "Technical specifications per compute capability", and of the
later ones `cuda_occupancy.h` of CUDA 13.
"""

from __future__ import annotations

from collections.abc import Mapping

SHARED_MEMORY = "shared_memory"
"""Bytes that one CTA may have."""
REGISTERS = "registers"
"""Of 32 bits, of an SM."""
SHARED_BYTES = "shared_bytes"
"""Constant of every configuration: bytes of shared memory that one CTA of it takes."""
RESERVED = 1024
"""Bytes of shared memory that the system takes for each CTA; an SM has them beside what its largest
CTA may have."""

_KIB_OF_A_CTA = {
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 8): 99,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
    (11, 0): 227,
    (12, 0): 99,
    (12, 1): 99,
}
CAPABILITIES = tuple(_KIB_OF_A_CTA)
"""Compute capabilities whose limits are known here."""


def hardware_limits(capability: tuple[int, int] | None) -> Mapping[str, int]:
    """Limits of GPUs of a compute capability, by name; empty where it is not known here."""
    if capability not in _KIB_OF_A_CTA:
        return {}
    return {SHARED_MEMORY: _KIB_OF_A_CTA[capability] * 1024, REGISTERS: 64 * 1024}
