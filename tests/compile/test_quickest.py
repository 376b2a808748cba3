"""Dispatch by estimates as host C++: headers choose what the plan says, wave by wave."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from fusegen.checks.load import load
from fusegen.emit.bundle import render_bundle
from fusegen.emit.render import Renderer
from fusegen.ir.kernel import GemmKind
from fusegen.ir.kernel_set import KernelSet
from fusegen.ir.naming import Cell
from fusegen.passes.pipeline import resolve
from fusegen.publish.paths import builtin_specs, builtin_templates
from fusegen.tuning.cases import SMS
from fusegen.tuning.cases import Case as Sizes

from .dispatching import definition, lines_of

pytestmark = pytest.mark.compile

ARCH = "sm_90a"
# On both sides of where a wave ends, and of where estimates begin.
TOKENS = (8, 511, 512, 2048, 2176, 4096, 4224, 8192, 16384)
WIDTHS = ((4096, 4096), (4224, 1024), (14336, 4096), (768, 2048), (2048, 57344))
CASES = [
    Sizes(groups, groups * tokens, n, k)
    for groups, tokens, (n, k) in itertools.product((1, 2), TOKENS, WIDTHS)
]


def gemm_sets() -> tuple[dict[str, KernelSet], dict[str, str]]:
    """Those of a linear in bf16, and the text of their headers."""
    specs = load([builtin_specs()])
    plans = resolve(specs, ARCH, [Cell("linear", "bf16")]).modules
    sets = {each.name: each for plan in plans for each in plan.kernel_sets if each.kind}
    files = render_bundle(
        plans, specs.archs[ARCH], "fusegen_sm_90a", Renderer((builtin_templates(),))
    )
    return sets, {name: files[f"csrc/dispatch/{name}.h"].text for name in sets}


def call(name: str, case: Sizes) -> str:
    """Prints the kernel that a dispatch function calls."""
    sizes = f"{case.tokens}, {case.groups}, {case.n}, {case.k}, {SMS}"
    given = f"GemmArguments{{nullptr, nullptr, nullptr, nullptr, nullptr, {sizes}}}"
    return f"  std::puts(fusegen_sm_90a::{name}(ScalarType::Half, {given}, stream).call);"


def program(sets: dict[str, KernelSet]) -> str:
    kernels = [kernel.name for each in sets.values() for kernel in each.kernels]
    return "\n".join(
        (
            *(f'#include "dispatch/{name}.h"' for name in sets),
            "#include <cstdio>",
            "namespace fusegen_sm_90a {",
            *(definition(name, "GemmArguments") for name in kernels),
            "}",
            "using namespace fusegen;",
            "int main() {",
            "  Stream stream;",
            *(call(name, case) for name in sets for case in CASES),
            "}\n",
        )
    )


def test_headers_choose_what_the_plan_says(tmp_path: Path) -> None:
    sets, headers = gemm_sets()
    found = lines_of(program(sets), headers, tmp_path)
    wanted = [
        (each.kind, f"{name}_float16_{each.point(case.sizes(each.kind))}")
        for name, each in sets.items()
        for case in CASES
        if each.kind
    ]
    assert found == [name for _, name in wanted]
    # Neither is the other's rule everywhere.
    for kind in GemmKind:
        assert len({name for each, name in wanted if each is kind}) > 1
