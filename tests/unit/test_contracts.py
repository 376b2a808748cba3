"""Contracts of compiled units: every family has one, and each breach of it is found and named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans import SPECS

from fusegen.build.contracts import OF_LAUNCHERS, Promise, promises
from fusegen.build.objcache import KernelUsage, Report
from fusegen.build.sass import functions
from fusegen.families.contract import ANY, Contract, contract_of
from fusegen.families.family import Family
from fusegen.families.registry import SHIPPED
from fusegen.ir.dtypes import DType
from fusegen.ir.kernel import Store
from fusegen.ir.kernel_set import Variant
from fusegen.ir.naming import Cell
from fusegen.passes.pipeline import resolve

KERNEL = KernelUsage("k", registers=80, stack=0, spill_stores=0, spill_loads=0, shared=1024)
REPORT = Report(9.0, peak_bytes=1 << 28, kernels=(KERNEL,), warnings=(), cpu_seconds=5.0)
CODE = {"k": ("HMMA.16816.F32", "LDG.E", "EXIT")}
PROMISE = Promise(
    Contract(opcodes=("HMMA",), without=("QMMA",), cpu_seconds=10, gibibytes=1),
    registers=80,
    shared_memory=1024,
)


def found(
    report: Report, promise: Promise = PROMISE, code: dict[str, tuple[str, ...]] = CODE
) -> str:
    return "\n".join(promise.breaches(report, code))


def with_kernel(**changes: int) -> Report:
    return replace(REPORT, kernels=(replace(KERNEL, **changes),))


def test_a_unit_that_keeps_its_contract_has_no_breach() -> None:
    assert found(REPORT) == ""
    assert found(replace(REPORT, cpu_seconds=None)) == "", "of an older cache"


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (replace(REPORT, warnings=("a.cu(3): warning #177-D",)), "warning: a.cu(3)"),
        (replace(REPORT, cpu_seconds=11.0), "compiled in 11 s of a processor, expected 10 at most"),
        (replace(REPORT, peak_bytes=3 << 30), "compiled in 3.0 GiB of memory, expected 1 at most"),
        (with_kernel(registers=81), "k: 81 registers, expected 80 at most"),
        (with_kernel(spill_loads=8), "k: 8 bytes of spilled registers and a stack of 0 bytes"),
        (with_kernel(stack=16), "k: 0 bytes of spilled registers and a stack of 16 bytes"),
        (with_kernel(shared=1025), "k: 1025 bytes of shared memory, expected 1024 at most"),
    ],
)
def test_what_compilers_report(report: Report, said: str) -> None:
    assert said in found(report)


@pytest.mark.parametrize(
    ("opcodes", "said"),
    [
        (("LDG.E",), "k: no instruction HMMA, expected one"),
        (("HMMA.16816", "QMMA.16832"), "k: instruction QMMA.16832, expected none that matches"),
        (("HMMA.16816", "LDL.64"), "k: instruction LDL.64, expected none that matches LDL"),
    ],
)
def test_what_the_machine_code_has(opcodes: tuple[str, ...], said: str) -> None:
    assert said in found(REPORT, code={"k": opcodes})


def test_kernels_beside_a_units_own_need_not_multiply() -> None:
    beside = replace(PROMISE, contract=replace(PROMISE.contract, beside=("moves",)))
    report = replace(REPORT, kernels=(KERNEL, replace(KERNEL, name="that_moves_on")))
    code = {**CODE, "that_moves_on": ("LDG.E", "EXIT")}
    assert found(report, beside, code) == ""
    assert "that_moves_on: no instruction HMMA" in found(report, code=code)
    code["that_moves_on"] = ("QMMA.16832",)
    assert "that_moves_on: instruction QMMA.16832" in found(report, beside, code)


def test_registers_of_an_architecture_are_its_own() -> None:
    cell = Cell("softmax", "bf16")
    for arch, most in (("sm_89", 96), ("sm_80", 64), ("sm_120a", 64)):
        plan = resolve(SPECS, arch, [cell]).modules
        assert promises(plan, SPECS.archs[arch])["kernels/softmax.cu"].registers == most
    named = {arch for family in SHIPPED for each in family.contracts for arch in each.registers_on}
    assert named <= {*SPECS.archs}, "a contract of an architecture that there is not"


def test_code_that_was_not_found_is_a_breach() -> None:
    assert "no machine code was found" in found(REPORT, code={})
    assert found(REPORT, Promise(Contract(), shared_memory=1024), {}) == "", "none is asked for"


def test_memory_that_launches_ask_for_counts() -> None:
    asks = replace(PROMISE.contract, launch_memory={"k": 512, "other": 4096})
    assert "1536 bytes of shared memory" in found(REPORT, replace(PROMISE, contract=asks))
    assert "1088 bytes of shared memory" in found(REPORT, replace(PROMISE, stated=64))


def test_the_first_contract_of_a_variant_is_its_own() -> None:
    both = (Contract("(^|_)add$", registers=1), Contract(registers=2))
    added = Variant((DType.IO,), (), (), Store.ADD)
    assert contract_of(both, added).registers == 1
    assert contract_of(both, Variant((DType.IO,), (), ())).registers == 2
    assert contract_of(both, None).registers == 2
    assert contract_of((), None) is ANY


@pytest.mark.parametrize("family", SHIPPED, ids=lambda family: family.name)
def test_every_family_has_a_contract(family: Family) -> None:
    """The last one is of all that the others leave; GEMMs say by what they multiply."""
    assert family.contracts and family.contracts[-1].of == ""
    for contract in family.contracts:
        assert (contract.registers is None) == (family.configured is not None)
        assert bool(contract.opcodes) == (family.configured is not None)


def test_what_units_of_cells_promise() -> None:
    plans = resolve(SPECS, "sm_90a", [Cell("grouped_linear", "fp8_block", ("add_to_main_grad",))])
    found = promises(plans.modules, SPECS.archs["sm_90a"])
    assert found["grouped_linear__fp8_block__add_to_main_grad.cpp"].contract is OF_LAUNCHERS
    wgrad = [each for name, each in found.items() if "wgrad" in name]
    assert wgrad and {each.registers for each in wgrad} == {168, 128}, "of 384 threads and of 512"
    assert all("UTMAREDG" in each.contract.opcodes for each in wgrad)
    assert all(0 < each.stated <= each.shared_memory == 227 * 1024 for each in wgrad)
    fprop = next(each for name, each in found.items() if "fprop" in name)
    assert "UTMAREDG" in fprop.contract.without


def test_what_later_gpus_lack_is_promised_where_no_rule_asks() -> None:
    """A CTA of 8.6 may have 99 KiB, so the last rule's kernel must fit into them."""
    arch = SPECS.archs["sm_80"]
    found = promises(resolve(SPECS, "sm_80", [Cell("linear", "bf16")]).modules, arch)
    by_point = {
        name.partition("fprop_")[2]: each for name, each in found.items() if "fprop" in name
    }
    assert by_point["mma_128x256x32_2x4_4_1.cu"].shared_memory == 163 * 1024
    assert by_point["mma_128x128x32_2x2_4_2.cu"].shared_memory == 99 * 1024


def test_opcodes_of_a_listing() -> None:
    listing = """
	code for sm_90a
		Function : first
        /*0000*/                   LDC R1, c[0x0][0x28] ;   /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 HMMA.16816.F32.BF16 R4, R8, R2, R4 ;  /* 0x1 */
        /*0020*/             @!UP1 UTMALDG.2D [UR8], [UR4] ;
		Function : second
        /*0000*/                   EXIT ;
"""
    assert dict(functions(listing)) == {
        "first": {"LDC", "HMMA.16816.F32.BF16", "UTMALDG.2D"},
        "second": {"EXIT"},
    }
