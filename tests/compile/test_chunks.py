"""Launchers that loop over chunks of rows, on the CPU with plain kernels, against one chunk."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusegen.checks.load import load
from fusegen.ir.kernel import GemmKind
from fusegen.ir.kernel_set import KernelSet
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.program import Program
from fusegen.passes.pipeline import resolve_module
from fusegen.publish.paths import builtin_specs, builtin_templates
from fusegen.spec.load import SpecSet
from fusegen.tuning.variants import publish_cells

HERE = Path(__file__).parent
NAME = "linear_cross_entropy"
CHUNK = 128
H, V = 24, 40
TOKENS = (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 300, 3 * CHUNK)
CELLS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sm_90a", ()),
    ("sm_90a", ("add_to_main_grad",)),
    ("sm_90a", ("write_main_grad",)),
    ("sm_90a", ("write_16_bit_main_grad",)),
    ("sm_90a", ("nvtx_ranges",)),
    ("sm_80", ()),
)
DTYPES = (torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32)
"""In the order of the stand-in's ``ScalarType``."""
IGNORED, SMOOTHING, Z_LOSS = -100, 0.1, 1e-2
SCALARS = f"{IGNORED}, {SMOOTHING}, {Z_LOSS}"
WHOLE = 2048


class Given(ctypes.Structure):
    """``Given`` of tensors.h."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * 2),
        ("dtype", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, tensor: Tensor) -> Given:
        sizes = (ctypes.c_int64 * 2)(*tensor.shape)
        return cls(tensor.data_ptr(), tensor.dim(), sizes, DTYPES.index(tensor.dtype))


@dataclass(frozen=True)
class Launcher:
    """A compiled launcher, and the plan that it was printed from."""

    plan: ModulePlan
    library: ctypes.CDLL

    def call(self, program: Program, tensors: Mapping[str, Tensor], *results: Tensor) -> None:
        """Run an op with all that it can be asked for."""
        given = [Given.of(tensors[argument.buffer]) for argument in program.arguments]
        made = [Given.of(tensor) for tensor in results]
        arrays = ((Given * max(len(each), 1))(*each) for each in (given, made))
        getattr(self.library, f"run_{program.name}")(*arrays)


@cache
def specs_with(folder: Path, chunk: int) -> SpecSet:
    """The built-in specs, and an op of smaller chunks."""
    for kind in ("ops", "modules"):
        text = (builtin_specs() / kind / f"{NAME}.yaml").read_text(encoding="utf-8")
        text = text.replace(NAME, f"{NAME}_{chunk}").replace("chunk: 2048", f"chunk: {chunk}")
        text = re.sub(r"class: (\w+)", r"class: \1Apart", text)
        (folder / kind).mkdir(parents=True, exist_ok=True)
        (folder / kind / f"{NAME}_{chunk}.yaml").write_text(text, encoding="utf-8")
    return load([builtin_specs(), folder])


def plain(kernels: KernelSet) -> str:
    """A dispatch header's function, of plain kernels."""
    struct, call = "PointwiseArguments", "plain::narrow(in)"
    if kernels.kind is not None:
        variant = kernels.units[0].variant
        store = variant.store.value if variant else "io"
        kind = GemmKind(kernels.kind).value
        struct, call = "GemmArguments", f"plain::gemm(Gemm::{kind}, Store::{store}, in)"
    elif not kernels.name.startswith("pointwise"):
        struct = "CrossEntropyGradArguments" if "grad" in kernels.name else "CrossEntropyArguments"
        call = "plain::run(in, stream)"
    return f"""\
#pragma once
#include "plain_kernels.h"
namespace fusegen {{
inline Status {kernels.name}(ScalarType, const {struct}& in, [[maybe_unused]] Stream& stream) {{
  return {call};
}}
}}
"""


def runner(program: Program) -> str:
    """An op as a C function of tensors."""
    tensors = ", ".join(f"taken(given[{i}])" for i in range(len(program.arguments)))
    flags = "".join(", true" for _ in program.flags)
    call = f"{program.name}({tensors}{flags}, {SCALARS})"
    return f"""\
extern "C" void run_{program.name}(fusegen::Given* given, fusegen::Given* results) {{
  give({call}, results);
}}
"""


@cache
def launcher(folder: Path, chunk: int, options: tuple[str, ...], arch: str) -> Launcher:
    """The launcher of a cell, compiled with plain kernels in the place of the dispatch."""
    specs = specs_with(folder / "specs", chunk)
    cell = Cell(f"{NAME}_{chunk}", "bf16", options)
    plan = resolve_module(specs, cell, arch)
    own = folder / f"{arch}_{cell}"
    assert not publish_cells(specs, arch, [cell], "fusegen", own)
    stand_ins = own / "stand_ins"
    (stand_ins / "dispatch").mkdir(parents=True)
    for kernels in plan.kernel_sets:
        (stand_ins / "dispatch" / f"{kernels.name}.h").write_text(plain(kernels))
    (stand_ins / "fusegen" / "host").mkdir(parents=True)
    (stand_ins / "fusegen" / "host" / "range.h").write_text(
        "#pragma once\nnamespace fusegen {\nstruct Range { explicit Range(const char*) {} };\n}\n"
    )
    source = own / "launcher.cpp"  # apart from the headers, which would be found before stand-ins
    text = (own / "csrc" / f"{cell}.cpp").read_text()
    ops = (plan.forward, plan.backward)
    opening = f"namespace fusegen_{arch} {{}}\n"
    source.write_text("".join((opening, text, '#include "tensors.h"\n', *map(runner, ops))))
    output = own / "launcher.so"
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "this test compiles C++: install g++"
    device_code = builtin_templates() / "static" / "csrc"
    rooms = (stand_ins, HERE / "launcher_on_cpu", HERE / "cuda_on_cpu", device_code)
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off"]
    command += ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]
    command += [*(f"-I{each}" for each in rooms), str(source), "-o", str(output)]
    subprocess.run(command, check=True)
    return Launcher(plan, ctypes.CDLL(str(output)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chunks")


def inputs(tokens: int) -> dict[str, Tensor]:
    """Tensors of both ops; a target is ignored in each chunk that has three rows."""
    rng = torch.Generator().manual_seed(tokens)
    targets = torch.randint(V, (tokens,), generator=rng)
    targets[2::CHUNK] = IGNORED
    return {
        "x": torch.randn(tokens, H, generator=rng).bfloat16(),
        "weight": torch.randn(V, H, generator=rng).bfloat16(),
        "targets": targets,
        "dloss": torch.randn(tokens, generator=rng),
    }


@dataclass(frozen=True)
class Step:
    """Results of a forward and its backward."""

    loss: Tensor
    lse: Tensor
    dx: Tensor
    dweight: Tensor


def trained(launched: Launcher, tensors: Mapping[str, Tensor]) -> Step:
    """A forward and a backward; the gradient of the weight is what its buffer has afterwards."""
    tokens, plan = tensors["x"].shape[0], launched.plan
    made = {
        "loss": torch.full((tokens,), torch.nan),
        "lse": torch.full((tokens,), torch.nan),
        "dx": torch.full((tokens, H), torch.nan).bfloat16(),
        "dweight": torch.full((V, H), torch.nan).bfloat16(),
    }
    lent = {name: main_grad(plan, name) for _, name in plan.main_grads}
    launched.call(plan.forward, tensors, *(made[r.buffer] for r in plan.forward.results))
    backward = [made[result.buffer] for result in plan.backward.results]
    launched.call(plan.backward, {**tensors, **made, **lent}, *backward)
    return Step(**{**made, "dweight": next(iter(lent.values()), made["dweight"])})


def main_grad(plan: ModulePlan, name: str) -> Tensor:
    """A caller's buffer with something in it."""
    own = torch.full((V, H), 0.5)
    return own if plan.buffer(name).dtype.value == "float32" else own.bfloat16()


def exact(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, dx and dweight in float64, of logits in 16 bits."""
    x, weight = (tensors[name].double().requires_grad_() for name in ("x", "weight"))
    logits = x @ weight.T
    logits = logits + (logits.bfloat16().double() - logits).detach()
    loss = functional.cross_entropy(
        logits,
        tensors["targets"],
        reduction="none",
        ignore_index=IGNORED,
        label_smoothing=SMOOTHING,
    )
    loss = loss + Z_LOSS * logits.logsumexp(-1).square() * (tensors["targets"] != IGNORED)
    dx, dweight = torch.autograd.grad(loss, (x, weight), tensors["dloss"].double())
    return loss.detach(), dx, dweight


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("arch", "options"), CELLS)
def test_chunks_give_what_all_rows_give(
    folder: Path, arch: str, options: tuple[str, ...], tokens: int
) -> None:
    """Rows do not know of each other, so that losses and dx are the same bits; dweight adds up."""
    tensors = inputs(tokens)
    chunked, whole = (
        trained(launcher(folder, chunk, options, arch), tensors) for chunk in (CHUNK, WHOLE)
    )
    for one, other in ((chunked.loss, whole.loss), (chunked.lse, whole.lse)):
        assert torch.equal(one, other)
    assert torch.equal(chunked.dx, whole.dx)
    loss, dx, dweight = exact(tensors)
    assert ((chunked.loss - loss).abs() <= 1e-5 * (1 + loss.abs())).all()
    assert ((chunked.dx - dx).abs() <= 2e-2 * (1 + dx.abs())).all()
    before = 0.5 if "add_to_main_grad" in options else 0.0
    for found in (chunked.dweight, whole.dweight):
        assert ((found - before - dweight).abs() <= 3e-2 * (1 + dweight.abs())).all()
    assert not chunked.loss[2::CHUNK].any() and not chunked.dx[2::CHUNK].any()
