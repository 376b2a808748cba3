"""Whether compiled units are what their families say that they have to be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final

from ..families.contract import (
    ANY,
    MOST_REGISTERS,
    STATIC_SHARED_MEMORY,
    Contract,
    matching,
)
from ..families.limits import REGISTERS, SHARED_BYTES, SHARED_MEMORY
from ..families.registry import known_family
from ..ir.kernel_set import KernelSet, KernelUnit
from ..ir.plan import ModulePlan
from ..spec.arch import ArchSpec
from .objcache import CachedObject, KernelUsage, Report
from .sass import opcodes

OF_LAUNCHERS: Final = Contract(cpu_seconds=120, gibibytes=4)
"""PyTorch's headers are most of what they are compiled from."""
_LOCAL_MEMORY: Final = ("LDL", "STL")
_GIBIBYTE: Final = 2**30

Code = Mapping[str, Collection[str]]
"""Opcodes of each kernel, by its name."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The contract of one unit, with all numbers.

    Attributes:
        contract: of its family.
        registers: of a thread, at most.
        shared_memory: bytes of a CTA, at most.
        stated: bytes that its launch asks for, as a configuration states them; 0 without one.
    """

    contract: Contract
    registers: int = MOST_REGISTERS
    shared_memory: int = 0
    stated: int = 0

    def breaches(self, report: Report, code: Code) -> Iterator[str]:
        """What of a compiled unit is otherwise, one line each.

        Args:
            report: how it compiled.
            code: opcodes of its kernels; needed where the contract says anything of them.
        """
        yield from (f"warning: {line}" for line in report.warnings)
        yield from _compilation(self.contract, report)
        for kernel in report.kernels:
            found = chain(self._usage(kernel), self._code(kernel.name, code))
            yield from (f"{kernel.name}: {what}" for what in found)

    def memory(self, kernel: KernelUsage) -> int:
        """Bytes of shared memory of a CTA, static ones and those of its launch."""
        asked = (size for name, size in self.contract.launch_memory.items() if name in kernel.name)
        return kernel.shared + self.stated + max(asked, default=0)

    def _usage(self, kernel: KernelUsage) -> Iterator[str]:
        spilled = kernel.spill_stores + kernel.spill_loads
        if spilled or kernel.stack:
            yield (
                f"{spilled} bytes of spilled registers and a stack of {kernel.stack} bytes,"
                " expected none"
            )
        if kernel.registers > self.registers:
            yield f"{kernel.registers} registers, expected {self.registers} at most"
        taken = self.memory(kernel)
        if taken > self.shared_memory:
            yield f"{taken} bytes of shared memory, expected {self.shared_memory} at most"

    def _code(self, name: str, code: Code) -> Iterator[str]:
        if not self.contract.reads_code:
            return
        if name not in code:
            yield "no machine code was found to look for instructions in"
            return
        own = not any(part in name for part in self.contract.beside)
        for pattern in self.contract.opcodes if own else ():
            if not matching(pattern, code[name]):
                yield f"no instruction {pattern}, expected one"
        for pattern in (*self.contract.without, *_LOCAL_MEMORY):
            if strange := matching(pattern, code[name]):
                yield f"instruction {strange[0]}, expected none that matches {pattern}"


def _compilation(contract: Contract, report: Report) -> Iterator[str]:
    """Objects of a cache that is older than these numbers have no processor time."""
    seconds, memory = report.cpu_seconds, report.peak_bytes / _GIBIBYTE
    if seconds is not None and seconds > contract.cpu_seconds:
        yield f"compiled in {seconds:.0f} s of a processor, expected {contract.cpu_seconds} at most"
    if memory > contract.gibibytes:
        yield f"compiled in {memory:.1f} GiB of memory, expected {contract.gibibytes} at most"


def promises(plans: Iterable[ModulePlan], arch: ArchSpec) -> dict[str, Promise]:
    """What every unit of these cells has to be, by its path below ``csrc``."""
    found: dict[str, Promise] = {}
    for plan in plans:
        if plan.ops:
            found[f"{plan.cell}.cpp"] = Promise(OF_LAUNCHERS)
        for kernels in plan.kernel_sets:
            for unit in kernels.units:
                found[f"kernels/{unit.name}.cu"] = _promise(unit, kernels, arch)
    return found


def code_of(promise: Promise, made: CachedObject) -> Code:
    """Opcodes of each kernel of a compiled unit; none if its contract says nothing of them."""
    kernels = [kernel.name for kernel in made.report.kernels]
    return opcodes(made.path, kernels) if kernels and promise.contract.reads_code else {}


def _promise(unit: KernelUnit, kernels: KernelSet, arch: ArchSpec) -> Promise:
    family, stated = known_family(unit.template), dict(unit.constants)
    contract = family.contract(unit.variant, unit.point) if family else ANY
    configured = SHARED_BYTES in stated
    of_device, registers = _cta_memory(unit, kernels, arch), contract.registers_of(arch.name)
    return Promise(
        contract=contract,
        registers=_left(stated, arch) if registers is None else registers,
        shared_memory=of_device if configured else min(of_device, contract.shared_memory),
        stated=stated.get(SHARED_BYTES, 0),
    )


def _cta_memory(unit: KernelUnit, kernels: KernelSet, arch: ArchSpec) -> int:
    """What every GPU on which a rule uses the unit lets a CTA have."""
    rules = [rule for rule in kernels.rules if unit.point in rule.points]
    asks = rules and all(rule.shared_bytes for rule in rules)
    return (arch.limits if asks else arch.least_limits).get(SHARED_MEMORY, STATIC_SHARED_MEMORY)


def _left(stated: Mapping[str, int], arch: ArchSpec) -> int:
    """Registers that the threads of all CTAs on an SM leave to each; they come in eights."""
    threads = stated.get("threads", 0) * stated.get("ctas", 1)
    if not threads or REGISTERS not in arch.limits:
        return MOST_REGISTERS
    return min(MOST_REGISTERS, arch.limits[REGISTERS] // threads // 8 * 8)
