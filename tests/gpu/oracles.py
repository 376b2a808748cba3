"""GEMMs of grouped linears beside those of CUTLASS's builders, on a GPU that both are for.

    python tests/gpu/oracles.py ARCH [--build]

The tests of a bundle hold its results against a reference in PyTorch.  These are computed by the
same matrix instructions, from the same codes and scales, by code of other authors: what differs is
our reading of descriptors, of tensor memory and of scales.  Operands are quantised group by group
by the functions of the recipe, so no layout of ours is between them and CUTLASS; `--build` compiles
everything and runs nothing, which needs no GPU.  Exit code 1 where results are not the same.

Where CUTLASS has no builder, `PARTS` has nothing, and there is nothing to compare: `sm_80` and
`sm_89`, and 16 bits on `sm_120a`.  Of NVFP4 the forward alone is compared, because gradients are
rounded by random numbers, and of columns a transform is taken first.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import bundles
import torch
from cutlass_headers import cutlass_include
from torch import Tensor

from fusegen import api
from fusegen.build.library import build as build_bundle
from fusegen.build.toolchain import find_toolchain

SOURCE = Path(__file__).with_name("oracle.cu")
OUT = bundles.BUILD / "oracles"
NAMESPACE = "oracles"
MODULE, FUNCTIONS = "grouped_linear", "quantize"

SPLITS = (0, 1, 200, 129, 70, 0)
TOKENS, K, N = 424, 512, 384
"""Tokens behind the last group belong to none."""
DEPTH = 128
"""Contractions over tokens are padded with zeros to multiples of it."""
TOLERANCE = 4e-3
"""Relative Frobenius distance: one rounding to 16 bits."""
FAST = 2e-2
"""The same where the recipe lets sums lose bits."""


@dataclass(frozen=True, slots=True)
class Format:
    """What oracle.cu is compiled for.

    Attributes:
        a, b: elements, as CUTLASS has them.
        scaled: whether they have block scales, which the instruction reads.
        tile_k: elements of a stage along the contraction.
    """

    a: str
    b: str
    scaled: bool
    tile_k: int


_E4M3, _E5M2, _E2M1 = (f"cutlass::float_{name}_t" for name in ("e4m3", "e5m2", "e2m1"))
FORMATS: Mapping[str, Format] = {
    "bf16": Format("cutlass::bfloat16_t", "cutlass::bfloat16_t", False, 64),
    "e4m3": Format(_E4M3, _E4M3, False, 128),
    "e5m2": Format(_E5M2, _E4M3, False, 128),
    "mx": Format(f"cutlass::mx_float8_t<{_E4M3}>", f"cutlass::mx_float8_t<{_E4M3}>", True, 128),
    "nv": Format(f"cutlass::nv_float4_t<{_E2M1}>", f"cutlass::nv_float4_t<{_E2M1}>", True, 256),
}
LESS_DEEP = {("sm_120a", "nv"): 128}
"""Elements of a stage where 99 KiB have no room for two of those above."""


@dataclass(frozen=True, slots=True)
class Part:
    """GEMMs of a recipe that CUTLASS has.

    Attributes:
        recipe: of the bundle.
        forward: format of the forward's GEMM.
        backward: format of the gradients' GEMMs; None where none is compared.
        tolerance: of the forward.
    """

    recipe: str
    forward: str
    backward: str | None
    tolerance: float = TOLERANCE


_BF16 = Part("bf16", "bf16", "bf16")
_FP8 = Part("fp8_current", "e4m3", "e5m2", FAST)
_SCALED = (Part("fp8_block", "mx", "mx"), Part("mxfp8", "mx", "mx"), Part("nvfp4", "nv", None))
PARTS: Mapping[str, tuple[Part, ...]] = {
    "sm_90a": (_BF16, _FP8),
    "sm_100a": (_BF16, _FP8, *_SCALED),
    "sm_120a": (_FP8, *_SCALED),
}


# ---- operands


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of a GEMM, the contraction its last dimension.

    Attributes:
        codes: [rows, bytes or elements], packed.
        depth: elements of the contraction.
        atoms: uint8, scales of blocks as the instruction reads them; None without.
        factor: what all of it is multiplied by.
    """

    codes: Tensor
    depth: int
    atoms: Tensor | None = None
    factor: float = 1.0


def operand(functions: ModuleType, x: Tensor, role: str) -> Operand:
    """A matrix as the recipe quantises it for a GEMM over its last dimension.

    Args:
        functions: `quantize` of the recipe.
        x: [rows, depth], multiples of 128 of both, or of the depth alone if rows are tokens.
        role: of the recipe.
    """
    found = functions.quantize(x, role=role, columnwise=False)
    codes, scale, amax = found.rowwise_data, found.rowwise_scale_inv, found.rowwise_amax
    if scale is None:
        return Operand(codes, x.shape[1])
    if scale.numel() == 1:
        return Operand(codes, x.shape[1], factor=float(scale))
    # 2688 = 6 * 448: what codes and scales of NVFP4 reach at most.
    factor = 1.0 if amax is None else float(amax) / 2688
    return Operand(codes, x.shape[1], atoms_of(_per_row(scale, x.shape)), factor)


def _per_row(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """uint8 [rows, depth / 32 or / 16], the scales of each row as the instruction has them."""
    if scale.dtype is torch.float32:  # powers of two, of which E8M0 is the exponent
        scale = scale.view(torch.int32).bitwise_right_shift(23).to(torch.uint8)
        block = 32
    else:
        block = 32 if scale.dtype is torch.float8_e8m0fnu else 16
        scale = scale.view(torch.uint8)
    down, across = -(-shape[0] // scale.shape[0]), shape[1] // block // scale.shape[1]
    return scale.repeat_interleave(down, 0)[: shape[0]].repeat_interleave(across, 1)


def atoms_of(scale: Tensor) -> Tensor:
    """uint8 [ceil(rows, 128), ceil(blocks, 4), 32, 4, 4] of [rows, blocks], zeros in none.

    Row m, block b of an atom of 128 rows and 4 blocks: byte m % 32 * 16 + m / 32 * 4 + b.
    """
    rows, blocks = (-(-extent // size) for extent, size in zip(scale.shape, (128, 4), strict=True))
    padded = scale.new_zeros(rows * 128, blocks * 4)
    padded[: scale.shape[0], : scale.shape[1]] = scale
    return padded.view(rows, 4, 32, blocks, 4).permute(0, 3, 2, 1, 4).contiguous()


def _over_tokens(x: Tensor) -> Tensor:
    """[columns, tokens] of a group's rows, with zeros to a multiple of what an atom is deep."""
    padded = x.new_zeros(-(-x.shape[0] // DEPTH) * DEPTH, x.shape[1])
    padded[: x.shape[0]] = x
    return padded.t().contiguous()


# ---- GEMMs

Gemm = Callable[[Operand, Operand], Tensor]
"""fp32 [rows of a, rows of b]."""


class _Problem(ctypes.Structure):
    """See oracle.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "scale_a", "scale_b", "d", "workspace")),
        *((name, ctypes.c_int) for name in ("m", "n", "k")),
        ("alpha", ctypes.c_float),
    )


def library(arch: str, name: str) -> Path:
    """Where the GEMM of a format is built."""
    return OUT / f"{arch}_{name}.so"


def compile_oracle(arch: str, name: str) -> Path:
    """Build the GEMM of a format: about a minute of a processor and 5 GiB.

    Raises:
        SystemExit: it does not compile; with the compiler's words.
    """
    out, form = library(arch, name), FORMATS[name]
    if out.is_file() and out.stat().st_mtime > SOURCE.stat().st_mtime:
        return out
    tools, code = find_toolchain(), arch.removeprefix("sm_")
    out.parent.mkdir(parents=True, exist_ok=True)
    macros = {
        "ORACLE_ARCH": code.rstrip("af"),
        "ELEMENT_A": form.a,
        "ELEMENT_B": form.b,
        "SCALED": int(form.scaled),
        "TILE_K": LESS_DEEP.get((arch, name), form.tile_k),
    }
    words = [
        *(str(tools.nvcc), f"-ccbin={tools.host_compiler}", "-std=c++17", "-O3", "-DNDEBUG"),
        *("--expt-relaxed-constexpr", f"-gencode=arch=compute_{code},code=sm_{code}"),
        *("-Xcompiler=-fPIC", "-shared", f"-I{cutlass_include()}"),
        *(f"-D{key}={value}" for key, value in macros.items()),
        *(str(SOURCE), "-o", str(out)),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{out.name}: {' '.join(words)}\n{(done.stdout + done.stderr)[:4000]}")
    return out


def cutlass(path: Path) -> Gemm:
    """The GEMM of a library."""
    functions = ctypes.CDLL(str(path))
    functions.oracle_workspace.restype = ctypes.c_size_t

    def run(a: Operand, b: Operand) -> Tensor:
        d = torch.full((len(a.codes), len(b.codes)), torch.nan, device=a.codes.device)
        pointers = (None if each is None else each.data_ptr() for each in (a.atoms, b.atoms))
        problem = _Problem(
            *(a.codes.data_ptr(), b.codes.data_ptr(), *pointers, d.data_ptr(), None),
            *(*d.shape, a.depth, a.factor * b.factor),
        )
        size = functions.oracle_workspace(ctypes.byref(problem))
        memory = torch.empty(max(size, 1), dtype=torch.uint8, device=d.device)
        problem.workspace = memory.data_ptr()
        torch.cuda.synchronize()
        if status := functions.oracle(ctypes.byref(problem)):
            raise SystemExit(f"{path.name}: CUTLASS refuses {tuple(d.shape)}, status {status}")
        return d

    return run


# ---- comparison


@dataclass(frozen=True, slots=True)
class Compared:
    """One GEMM of a recipe.

    Attributes:
        name: its recipe and kind.
        distance: relative Frobenius distance of our result from the oracle's.
        tolerance: of that.
    """

    name: str
    distance: float
    tolerance: float

    @property
    def same(self) -> bool:
        return self.distance <= self.tolerance  # NaN is not


def compare(
    part: Part, layer: ModuleType, functions: ModuleType, forward: Gemm, backward: Gemm | None
) -> Iterator[Compared]:
    """Our GEMMs of one recipe beside an oracle's.

    Args:
        part: what is compared.
        layer, functions: cells of the recipe, of `grouped_linear` and `quantize`.
        forward, backward: the oracle's GEMMs.
    """
    device = bundles.DEVICE
    draw = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=draw, device=device)
        return drawn.to(torch.bfloat16)

    x, dy = normal(TOKENS, K).requires_grad_(), normal(TOKENS, N)
    module = layer.GroupedLinear(len(SPLITS), K, N, device=device)
    w = module.weight
    w.data.copy_(normal(*w.shape))
    y = module(x, torch.tensor(SPLITS, device=device))
    y.backward(dy)
    assert x.grad is not None and w.grad is not None
    wanted: dict[str, list[Tensor]] = {"fprop": [], "dgrad": [], "wgrad": []}
    begin, covered = 0, slice(0, sum(SPLITS))
    for group, count in enumerate(SPLITS):
        own = slice(begin, begin + count)
        begin += count
        if not count:  # CUTLASS has no contraction over nothing
            assert not w.grad[group].any()
            continue
        of = _Operands(functions, x[own].detach(), dy[own], w[group].detach())
        wanted["fprop"].append(forward(*of.fprop()))
        if backward is not None:
            wanted["dgrad"].append(backward(*of.dgrad()))
            wanted["wgrad"].append(backward(*of.wgrad()))
    filled = [group for group, count in enumerate(SPLITS) if count]
    found = {"fprop": y[covered], "dgrad": x.grad[covered], "wgrad": w.grad[filled].flatten(0, 1)}
    for kind, parts in wanted.items():
        if parts:
            tolerance = part.tolerance if kind == "fprop" else TOLERANCE
            yield Compared(f"{part.recipe} {kind}", distance(found[kind], parts), tolerance)


@dataclass(frozen=True, slots=True)
class _Operands:
    """Operands of the three GEMMs of one group, x [rows, K], dy [rows, N], w [N, K]."""

    functions: ModuleType
    x: Tensor
    dy: Tensor
    w: Tensor

    def _pair(self, a: Tensor, a_role: str, b: Tensor, b_role: str) -> tuple[Operand, Operand]:
        return operand(self.functions, a, a_role), operand(self.functions, b, b_role)

    def fprop(self) -> tuple[Operand, Operand]:
        return self._pair(self.x, "input", self.w, "weight")

    def dgrad(self) -> tuple[Operand, Operand]:
        return self._pair(self.dy, "grad_output", self.w.t().contiguous(), "weight")

    def wgrad(self) -> tuple[Operand, Operand]:
        columns = _over_tokens(self.dy), _over_tokens(self.x)
        return self._pair(columns[0], "grad_output", columns[1], "input")


def distance(found: Tensor, wanted: Sequence[Tensor]) -> float:
    """Relative Frobenius distance."""
    exact = torch.cat([*wanted]).double()
    return float((found.detach().double() - exact).norm() / exact.norm())


# ---- the run


def bundle(arch: str) -> Path:
    """The bundle of the recipes that are compared, brought up to the specs."""
    recipes = tuple(part.recipe for part in PARTS[arch])
    selection: dict[str, Any] = {"modules": (MODULE, FUNCTIONS), "recipes": recipes}
    api.generate(api.Request(out=OUT, archs=(arch,), namespace=NAMESPACE, **selection))
    return OUT / arch


def build(arch: str) -> None:
    """Compile the bundle and the oracles of an architecture."""
    build_bundle(bundle(arch))
    for part in PARTS[arch]:
        for name in filter(None, (part.forward, part.backward)):
            compile_oracle(arch, name)


def run(arch: str) -> bool:
    """Compare all, print it, and say whether all is the same."""
    sys.path.insert(0, str(OUT))
    same = True
    for part in PARTS[arch]:
        layer, functions = (
            importlib.import_module(f"{arch}.{name}__{part.recipe}") for name in (MODULE, FUNCTIONS)
        )
        backward = part.backward and cutlass(compile_oracle(arch, part.backward))
        forward = cutlass(compile_oracle(arch, part.forward))
        for each in compare(part, layer, functions, forward, backward or None):
            verdict = "as CUTLASS's" if each.same else f"NOT as CUTLASS's: above {each.tolerance}"
            print(f"{arch} {each.name:<18} {each.distance:.2e} {verdict}", flush=True)
            same = same and each.same
    return same


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arch", help="such as sm_100a")
    parser.add_argument("--build", action="store_true", help="compile and run nothing")
    asked = parser.parse_args(words)
    if asked.arch not in PARTS:
        print(f"{asked.arch}: CUTLASS's builders have no GEMM for it, so nothing is compared")
        return 0
    build(asked.arch)
    return 0 if asked.build or run(asked.arch) else 1


if __name__ == "__main__":
    sys.exit(main())
