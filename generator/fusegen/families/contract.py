"""What a compiled unit of a family has to be, so that no edit and no compiler makes it more in
silence.  ``build/contracts.py`` holds compiled units against it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ..ir.kernel_set import Variant

MOST_REGISTERS = 255
"""That one thread can have."""
CPU_SECONDS_OF_GEMM = 45
"""Of the compiler, at most, for a unit of a GEMM that TMA feeds."""
STATIC_SHARED_MEMORY = 48 * 1024
"""Bytes that a kernel can lay out without asking for them at its launch."""


@dataclass(frozen=True, slots=True)
class Contract:
    """What holds for units of a family.

    Besides, of every unit: no warning, no spilled register and no other memory of single threads.

    Attributes:
        of: pattern that is found in the words of a variant; the first contract of a family whose
            patterns are found is the unit's.
        registers: of a thread, at most; None for what the unit's threads and CTAs leave to one.
        shared_memory: bytes of a CTA, at most, static ones and those of its launch; of
            configurations it is what the unit states.
        launch_memory: bytes that a launch asks for, by a part of the kernel's name; of
            configurations it is what the unit states.
        opcodes: patterns, each of which an instruction of every kernel matches from its beginning.
        beside: parts of names of kernels that a unit has behind its own, which need no such
            instruction.
        without: patterns that no instruction matches.
        cpu_seconds: of the compiler, at most, however loaded the machine is.
        gibibytes: of the compiler's largest process, at most.
        point: pattern that is found in the name of a configuration.
        registers_on: of a thread, at most, on architectures for which the compiler takes others
            than `registers`, by name.
    """

    of: str = ""
    registers: int | None = None
    shared_memory: int = STATIC_SHARED_MEMORY
    launch_memory: Mapping[str, int] = field(default_factory=dict)
    opcodes: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    cpu_seconds: float = 40
    gibibytes: float = 0.75
    point: str = ""
    registers_on: Mapping[str, int] = field(default_factory=dict)

    @property
    def reads_code(self) -> bool:
        """Whether it says anything of machine instructions."""
        return bool(self.opcodes or self.without)

    def registers_of(self, arch: str) -> int | None:
        """Of a thread on an architecture, at most; None as `registers`."""
        return self.registers_on.get(arch, self.registers)

    def found_in(self, code: Collection[str]) -> tuple[str, ...]:
        """The instructions that it asks for, as code has them: the first of each pattern."""
        found = (matching(pattern, code) for pattern in self.opcodes)
        return tuple(each[0] for each in found if each)

    def covers(self, variant: Variant | None, point: str) -> bool:
        """Whether it is of such units."""
        found = re.search(self.of, str(variant or "")), re.search(self.point, point)
        return None not in found


def matching(pattern: str, code: Collection[str]) -> list[str]:
    """Opcodes that a pattern matches from their beginning, sorted."""
    return sorted(each for each in code if re.match(pattern, each))


ANY = Contract()
"""Of units of which nothing else is known."""


def contract_of(
    contracts: tuple[Contract, ...], variant: Variant | None, point: str = ""
) -> Contract:
    """The first that is of such units."""
    return next((each for each in contracts if each.covers(variant, point)), ANY)
