"""Dispatch headers as host C++: what GPUs that let a CTA have less memory are given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from plans import SPECS

from fusegen.emit.bundle import render_bundle
from fusegen.emit.render import Renderer
from fusegen.families.limits import SHARED_BYTES, SHARED_MEMORY, hardware_limits
from fusegen.families.registry import known_family
from fusegen.ir.kernel import GemmKind
from fusegen.ir.kernel_set import KernelSet
from fusegen.ir.naming import Cell
from fusegen.ir.predicate import SizeVariable
from fusegen.passes.pipeline import resolve
from fusegen.publish.paths import builtin_templates
from fusegen.tuning.fit import choose

from .dispatching import definition, lines_of

pytestmark = pytest.mark.compile

ARCH = SPECS.archs["sm_80"]
CELLS = [Cell("grouped_linear", recipe) for recipe in ("bf16", "nvfp4", "fp8_rowwise")]
MEMORY = [hardware_limits(each)[SHARED_MEMORY] for each in ((8, 0), (8, 6), (9, 0), (12, 0))]
Case = tuple[int, int, int, int]
"""Tokens, groups, n and k."""
# Around the thresholds of the rules.
CASES: tuple[Case, ...] = tuple(
    (tokens, groups, n, k)
    for tokens in (64, 4088, 4096, 65536)
    for groups in (1, 8)
    for n, k in ((512, 1016), (1024, 1024), (8192, 512), (512, 8192))
)

SMS = 8

DEVICES = """
#include <cuda_runtime_api.h>

#include <cstdio>

static int current = 0, asked = 0;
static int memory[80] = {};

extern "C" cudaError_t cudaGetDevice(int* device) { *device = current; return cudaSuccess; }
extern "C" cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  ++asked;
  if (attribute != cudaDevAttrMaxSharedMemoryPerBlockOptin) return cudaErrorInvalidValue;
  *value = memory[device];
  return memory[device] > 0 ? cudaSuccess : cudaErrorInvalidDevice;
}
"""


def gemm_sets() -> dict[str, KernelSet]:
    """Those of the cells whose kernels are chosen by size."""
    plans = resolve(SPECS, ARCH.name, CELLS).modules
    sets = {each.name: each for plan in plans for each in plan.kernel_sets}
    return {name: each for name, each in sorted(sets.items()) if each.kind}


SETS = gemm_sets()


def call(name: str, arguments: str, case: Case) -> str:
    """Prints the kernel that a dispatch function calls."""
    tokens, groups, n, k = case
    plain = f"{{nullptr, nullptr, nullptr, nullptr, nullptr, {tokens}, {groups}, {n}, {k}, {SMS}}}"
    given = plain if arguments == "GemmArguments" else f"{{{plain}, nullptr, nullptr}}"
    dispatched = f"fusegen_sm_80::{name}(ScalarType::Half, {arguments}{given}, stream)"
    return f"  std::puts({dispatched}.call);"


def program(sets: Mapping[str, KernelSet]) -> str:
    """Every set and case on a device per capability, then on one that cannot be asked."""
    functions, calls = [], []
    for name, kernels in sets.items():
        family = known_family(kernels.template)
        assert family
        arguments = family.launch.arguments
        functions += [definition(kernel.name, arguments) for kernel in kernels.kernels]
        calls += [call(name, arguments, case) for case in CASES]
    memory = [f"  memory[{i}] = {each};" for i, each in enumerate(MEMORY)]
    return "\n".join(
        (
            *(f'#include "dispatch/{name}.h"' for name in sets),
            DEVICES,
            "namespace fusegen_sm_80 {",
            *functions,
            "}",
            "using namespace fusegen;",
            "void run(int device) {",
            "  Stream stream;",
            "  current = device;",
            *calls,
            "}",
            "int main() {",
            *memory,
            f"  for (int device = 0; device < {len(MEMORY)}; ++device) run(device);",
            '  std::printf("asked %d times\\n", asked);',
            f"  run({len(MEMORY)});",
            "}\n",
        )
    )


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the program prints."""
    folder = tmp_path_factory.mktemp("dispatch")
    files = render_bundle(
        resolve(SPECS, ARCH.name, CELLS).modules,
        ARCH,
        "fusegen_sm_80",
        Renderer((builtin_templates(),)),
    )
    headers = {name: files[f"csrc/dispatch/{name}.h"].text for name in SETS}
    return lines_of(program(SETS), headers, folder)


def sizes_of(kind: GemmKind, case: Case) -> dict[SizeVariable, int]:
    tokens, groups, n, k = case
    rows, columns, along = {
        GemmKind.FPROP: (tokens, n, k),
        GemmKind.DGRAD: (tokens, k, n),
        GemmKind.WGRAD: (n, k, tokens // groups),
    }[kind]
    return {
        SizeVariable.TOKENS: tokens,
        SizeVariable.GROUPS: groups,
        SizeVariable.MEAN_GROUP_TOKENS: tokens // groups,
        SizeVariable.ROWS: rows,
        SizeVariable.COLUMNS: columns,
        SizeVariable.K: along,
        SizeVariable.SMS: SMS,
    }


def expected(kernels: KernelSet, case: Case, memory: int) -> str:
    """The point of the first rule of the spec that holds and whose kernel a device can launch."""
    family = kernels.template
    assert kernels.kind
    spec = ARCH.kernels[family].kinds[kernels.kind]
    taken = {unit.point: dict(unit.constants)[SHARED_BYTES] for unit in kernels.units}
    sizes = sizes_of(kernels.kind, case)
    return next(
        choose([rule], sizes)
        for rule in spec.select
        if rule.when.holds(sizes) and max(taken[point] for point in rule.points) <= memory
    )


def check(lines: Iterable[str], memory: int) -> set[str]:
    """That what a device was given is what the spec's rules choose; all of its points."""
    of_case = [(name, each, case) for name, each in SETS.items() for case in CASES]
    points = [expected(kernels, case, memory) for _, kernels, case in of_case]
    names = [f"{name}_float16_{point}" for (name, *_), point in zip(of_case, points, strict=True)]
    assert [*lines] == names
    return {*points}


def test_each_device_is_given_what_it_can_launch(printed: list[str]) -> None:
    """One that cannot be asked gets what fits everywhere; its launch says why it fails."""
    count = len(SETS) * len(CASES)
    chosen = [check(printed[i * count :][:count], memory) for i, memory in enumerate(MEMORY)]
    unknown = check(printed[-count:], ARCH.least_limits[SHARED_MEMORY])
    assert chosen[0] == chosen[2] > chosen[1] == chosen[3] == unknown
    assert chosen[1] == {"mma_128x128x32_2x2_4_2"}


def test_a_device_is_asked_once(printed: list[str]) -> None:
    asked = [line for line in printed if line.startswith("asked")]
    assert asked == [f"asked {len(MEMORY)} times"]


def test_only_rules_that_some_gpu_cannot_follow_ask() -> None:
    """Those of code that is tied to one capability do not."""
    asking = {name for name, each in SETS.items() if any(rule.shared_bytes for rule in each.rules)}
    assert asking == {*SETS}
    assert all(not each.rules[-1].shared_bytes for each in SETS.values())
    for plan in resolve(SPECS, "sm_90a", CELLS).modules:
        assert all(not rule.shared_bytes for each in plan.kernel_sets for rule in each.rules)
