"""Runs quantise kernels, on a GPU or in the emulation on the CPU, next to the PyTorch reference.

Outputs are full of 0xA5 before a kernel writes them and stand between guards of 64 bytes: what is
not written, or written outside, shows.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "numerics"))

from subject import reference  # noqa: E402

CSRC = ROOT / "templates" / "static" / "csrc"
GUARD = 64
AMAX_PARTIALS = 384  # of a group
UNWRITTEN = 0xA5
Pointer, Long, Float, Bool = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_bool


class Stream(ctypes.Structure):
    """``Stream`` of stream.h."""

    _fields_ = [("handle", Pointer), ("after_kernel", Bool)]


class _Copy(ctypes.Structure):
    _fields_ = [
        ("data", Pointer),
        ("scale", Pointer),
        ("pitch", Long),
        ("amax", Pointer),
        ("group_amax", Pointer),
    ]


class _Quantize(ctypes.Structure):
    _fields_ = [
        ("input", Pointer),
        ("group_sizes", Pointer),
        ("rows", Long),
        ("columns", Long),
        ("groups", Long),
        ("rowwise", _Copy),
        ("columnwise", _Copy),
        ("row_align", Long),
        ("token_pitch", Long),
        ("epsilon", Float),
        ("power_of_two", Bool),
        ("round_down", Bool),
        ("scale", Pointer),
        ("folded_amax", Pointer),
        ("row_sums", Pointer),
        ("rng_state", Pointer),
    ]


class DelayedState(ctypes.Structure):
    """``DelayedState`` of quantize.h."""

    _fields_ = [
        ("history", Pointer),
        ("scale", Pointer),
        ("slots", Long),
        ("groups", Long),
        ("max", Float),
        ("margin", ctypes.c_int),
        ("grouped", Bool),
        ("amax", Pointer),
    ]


class Delayed(ctypes.Structure):
    """``DelayedArguments`` of quantize.h."""

    _fields_ = [("states", DelayedState * 8), ("count", ctypes.c_int)]


class UpdateScale(ctypes.Structure):
    """``UpdateScaleArguments`` of update_scale.h."""

    _fields_ = [
        ("state", DelayedState),
        ("due", Pointer),
        ("moves_states", Bool),
        ("update", Bool),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("quantize", _Quantize),
        ("amax", Pointer),
        ("partial_amax", Pointer),
        ("row_amax", Pointer),
        ("column_amax", Pointer),
        ("rowwise_amax", Pointer),
        ("columnwise_amax", Pointer),
        ("sums", Pointer),
        ("rng_state", Pointer),
        ("state", DelayedState),
        ("due", Pointer),
        ("moves_states", Bool),
        ("update", Bool),
    ]


MOST_STEPS = 4  # of one launch


class _Several(ctypes.Structure):
    _fields_ = [("steps", _Step * MOST_STEPS), ("count", ctypes.c_int)]


class _RowSums(ctypes.Structure):
    _fields_ = [
        ("row_sums", Pointer),
        ("output", Pointer),
        ("group_sizes", Pointer),
        ("rows", Long),
        ("columns", Long),
        ("groups", Long),
        ("row_align", Long),
    ]


class _Amax(ctypes.Structure):
    _fields_ = [
        ("input", Pointer),
        ("group_sizes", Pointer),
        ("rows", Long),
        ("columns", Long),
        ("groups", Long),
        ("row_align", Long),
        ("of_group", Pointer),
        ("of_transformed_group", Pointer),
        ("of_row", Pointer),
        ("of_column", Pointer),
    ]


class _Clear(ctypes.Structure):
    _fields_ = [
        ("buffers", Pointer * 8),
        ("counts", Long * 8),
        ("rng_state", Pointer),
        ("rng_steps", Long),
    ]


class _Dequantize(ctypes.Structure):
    _fields_ = [
        ("data", Pointer),
        ("scale", Pointer),
        ("output", Pointer),
        ("matrices", Long),
        ("lines", Long),
        ("length", Long),
        ("pitch", Long),
        ("scale_matrix", Long),
        ("scale_line", Long),
        ("scale_block", Long),
        ("lines_per_scale", Long),
        ("amax", Pointer),
        ("group_sizes", Pointer),
        ("groups", Long),
        ("scale_group", Long),
        ("row_align", Long),
    ]


class _DequantizeGroups(ctypes.Structure):
    _fields_ = [
        ("data", Pointer),
        ("scale", Pointer),
        ("output", Pointer),
        ("group_sizes", Pointer),
        ("padded_sizes", Pointer),
        ("rows", Long),
        ("columns", Long),
        ("groups", Long),
        ("pitch", Long),
        ("row_align", Long),
    ]


class Buffer:
    """Bytes between guards."""

    def __init__(self, nbytes: int, device: str) -> None:
        self._bytes = torch.full((nbytes + 2 * GUARD,), UNWRITTEN, dtype=torch.uint8, device=device)
        self.nbytes = nbytes

    def pointer(self) -> int:
        return int(self._bytes.data_ptr()) + GUARD

    def bytes(self) -> Tensor:
        host = self._bytes.cpu()
        guards = torch.cat((host[:GUARD], host[GUARD + self.nbytes :]))
        assert (guards == UNWRITTEN).all(), "written outside of a buffer"
        return host[GUARD : GUARD + self.nbytes].clone()

    def floats(self) -> Tensor:
        return self.bytes().view(torch.float32)


@dataclass(frozen=True)
class Recipe:
    """A kernel's number in quantize_kernels.cuh and what the reference calls the same."""

    config: int
    quantization: reference.Quantization  # type: ignore[name-defined]
    square: bool = False
    atoms: bool = False
    untransposed: bool = False

    def layout(self, align: int) -> reference.Layout:  # type: ignore[name-defined]
        """How its copies lie."""
        return reference.Layout(not self.untransposed, align, atoms=self.atoms)


def _ratio(fmt: str, block: tuple[int | None, int | None], **more: object) -> object:
    return reference.Quantization(fmt, block, "float32", "max_over_amax", **more)


def _pow2(fmt: str, block: tuple[int, int], **more: object) -> object:
    """Powers of two, stored as exponents."""
    return reference.Quantization(fmt, block, "e8m0", "max_over_amax", round="pow2_down", **more)


def _mx(fmt: str, block: tuple[int, int], rounding: str = "pow2_up") -> object:
    return reference.Quantization(fmt, block, "e8m0", "mx", round=rounding)


def _nv(block: tuple[int, int], **more: object) -> object:
    return reference.Quantization("e2m1", block, "e4m3", "nvfp4", tensor_scale=True, **more)


RECIPES: dict[str, Recipe] = {
    "current_e4m3": Recipe(0, _ratio("e4m3", (None, None))),
    "current_e5m2_epsilon": Recipe(1, _ratio("e5m2", (None, None), epsilon=0.25)),
    "delayed_e4m3": Recipe(0, _ratio("e4m3", (None, None), source="history", history=16)),
    "delayed_e5m2": Recipe(1, _ratio("e5m2", (None, None), source="history", history=16)),
    "row": Recipe(2, _ratio("e4m3", (1, None))),
    "row_pow2": Recipe(2, _ratio("e4m3", (1, None), round="pow2_down", epsilon=1e-12)),
    "block_1x128": Recipe(3, _ratio("e4m3", (1, 128), round="pow2_down")),
    "block_1x128_exact": Recipe(3, _ratio("e4m3", (1, 128), epsilon=1e-6)),
    "block_128x128": Recipe(4, _ratio("e4m3", (128, 128), round="pow2_down"), square=True),
    "mx_1x32": Recipe(5, _mx("e4m3", (1, 32), "pow2_up")),
    "mx_1x32_floor": Recipe(5, _mx("e4m3", (1, 32), "pow2_down")),
    "mx_1x32_e5m2": Recipe(6, _mx("e5m2", (1, 32), "pow2_up")),
    "mx_1x32_e5m2_floor": Recipe(6, _mx("e5m2", (1, 32), "pow2_down")),
    "mx_32x32": Recipe(7, _mx("e4m3", (32, 32), "pow2_up"), square=True),
    "nv_1x16": Recipe(8, _nv((1, 16))),
    "nv_16x16": Recipe(9, _nv((16, 16)), square=True),
    "nv_1x16_stochastic": Recipe(10, _nv((1, 16), rounding="stochastic")),
    "nv_1x16_hadamard": Recipe(11, _nv((1, 16), hadamard="columnwise")),
    "nv_1x16_both": Recipe(12, _nv((1, 16), rounding="stochastic", hadamard="columnwise")),
    # Blocks that no shipped recipe has.
    "block_1x64": Recipe(13, _ratio("e4m3", (1, 64), round="pow2_down")),
    "block_64x64": Recipe(14, _ratio("e4m3", (64, 64)), square=True),
    "block_1x32_e5m2": Recipe(15, _ratio("e5m2", (1, 32), epsilon=1e-6)),
    "block_32x32_e5m2": Recipe(16, _ratio("e5m2", (32, 32), epsilon=1e-6), square=True),
    "block_1x16": Recipe(17, _ratio("e4m3", (1, 16))),
    "block_16x16_e2m1": Recipe(18, _ratio("e2m1", (16, 16), round="pow2_down"), square=True),
    "mx_1x64": Recipe(19, _mx("e4m3", (1, 64))),
    "mx_1x128_e2m1": Recipe(20, _mx("e2m1", (1, 128))),
    "mx_128x128_e5m2": Recipe(21, _mx("e5m2", (128, 128), "pow2_down"), square=True),
    "nv_1x64_stochastic": Recipe(22, _nv((1, 64), rounding="stochastic")),
    "nv_32x32": Recipe(23, _nv((32, 32)), square=True),
}

# Whose scales lie where matrix instructions read them.
ATOMS: dict[str, Recipe] = {
    "mx_1x32": Recipe(30, _mx("e4m3", (1, 32)), atoms=True),
    "mx_32x32": Recipe(31, _mx("e4m3", (32, 32)), square=True, atoms=True),
    "nv_1x16": Recipe(32, _nv((1, 16)), atoms=True),
    "nv_16x16": Recipe(33, _nv((16, 16)), square=True, atoms=True),
    "nv_1x16_both": Recipe(
        34, _nv((1, 16), rounding="stochastic", hadamard="columnwise"), atoms=True
    ),
    "pow2_1x128": Recipe(35, _pow2("e4m3", (1, 128)), atoms=True),
    "pow2_128x128": Recipe(36, _pow2("e4m3", (128, 128)), square=True, atoms=True),
    "mx_1x64_e5m2": Recipe(37, _mx("e5m2", (1, 64), "pow2_down"), atoms=True),
    "pow2_64x64_e5m2": Recipe(38, _pow2("e5m2", (64, 64), epsilon=1e-6), square=True, atoms=True),
    "nv_32x32": Recipe(39, _nv((32, 32)), square=True, atoms=True),
}

# Whose columnwise copies lie as the tensor does.
UNTRANSPOSED: dict[str, Recipe] = {
    "current_e4m3": Recipe(40, _ratio("e4m3", (None, None)), untransposed=True),
    "row_e5m2": Recipe(41, _ratio("e5m2", (1, None), epsilon=1e-3), untransposed=True),
    "block_1x128": Recipe(42, _ratio("e4m3", (1, 128), round="pow2_down"), untransposed=True),
    "block_128x128": Recipe(43, _ratio("e4m3", (128, 128)), square=True, untransposed=True),
    "block_1x64": Recipe(44, _ratio("e4m3", (1, 64)), untransposed=True),
    "mx_1x32_e5m2": Recipe(45, _mx("e5m2", (1, 32)), untransposed=True),
    "block_1x16": Recipe(46, _ratio("e4m3", (1, 16), epsilon=1e-6), untransposed=True),
    "mx_1x32": Recipe(50, _mx("e4m3", (1, 32)), atoms=True, untransposed=True),
    "mx_32x32": Recipe(51, _mx("e4m3", (32, 32)), square=True, atoms=True, untransposed=True),
    "pow2_1x128": Recipe(52, _pow2("e4m3", (1, 128)), atoms=True, untransposed=True),
    "pow2_128x128": Recipe(
        53, _pow2("e4m3", (128, 128)), square=True, atoms=True, untransposed=True
    ),
    "mx_1x64_e5m2": Recipe(54, _mx("e5m2", (1, 64), "pow2_down"), atoms=True, untransposed=True),
}

# Decoded as they are: their scales are left to who reads them.
CODES: dict[str, Recipe] = {
    "codes_e4m3": Recipe(24, _ratio("e4m3", (1, None))),
    "codes_e5m2": Recipe(25, _ratio("e5m2", (1, None))),
    "codes_e2m1": Recipe(26, _ratio("e2m1", (None, None))),
}


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def reference_of(name: str) -> ModuleType:
    """A file of the normative reference, in a package as a bundle has it.

    Args:
        name: such as `_router`.
    """
    folder = ROOT / "templates" / "static" / "reference"
    package = f"fusegen_reference_of{name}"
    spec = importlib.util.spec_from_file_location(
        package, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{package}.{name}")


def compile_for_cpu(header: str, folder: Path, *, architectures: str | None = None) -> Path:
    """A library of a header's C functions, whose kernels `cuda_on_cpu` runs.

    A header's own folder is searched first, as that of a bundle's sources.

    Args:
        header: by name, next to this file, or its path.
        folder: where the library goes.
        architectures: that the code is for, as nvcc lists them: 800 is sm_80. By default it is
            for the CPU, which has the functions of all.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "this test compiles C++: install g++"
    source, output = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(f'#include "{header}"\n')
    strict = ["-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]
    includes = [f"-I{each}" for each in (HERE / "cuda_on_cpu", (HERE / header).parent, HERE, CSRC)]
    macros = [] if architectures is None else [f"-D__CUDA_ARCH_LIST__={architectures}"]
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", *strict, *macros, *includes]
    subprocess.run([*command, str(source), "-o", str(output)], check=True)
    return output


class Kernels:
    """The C functions of a library.

    Args:
        early: whether kernels may start before the stream's previous one has ended.
    """

    def __init__(self, library: Path, device: str, *, early: bool = False) -> None:
        self._library = ctypes.CDLL(str(library))
        self._early = early
        self.device = device

    def call(self, name: str, *args: object) -> None:
        call = ctypes.c_char_p()
        handle = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else None
        stream = Stream(handle, self._early)
        passed = [ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in args]
        code = getattr(self._library, name)(*passed, ctypes.byref(stream), ctypes.byref(call))
        assert code == 0, f"{name}: {code} {call.value!r}"

    def floats(self, count: int) -> Buffer:
        return Buffer(4 * count, self.device)

    def clear(self, buffers: list[Buffer], rng_state: Tensor | None = None, steps: int = 0) -> None:
        arguments = _Clear(rng_state=address(rng_state), rng_steps=steps)
        for i, buffer in enumerate(buffers):
            arguments.buffers[i], arguments.counts[i] = buffer.pointer(), buffer.nbytes // 4
        self.call("run_clear", arguments)


def address(value: Tensor | Buffer | None) -> int | None:
    if isinstance(value, Buffer):
        return value.pointer()
    return None if value is None else int(value.data_ptr())


@dataclass(frozen=True)
class Case:
    """One tensor to quantise: x [T, K] with splits, dense [T, K], or weights [E, N, K]."""

    x: Tensor
    splits: Tensor | None

    @property
    def groups(self) -> int:
        if self.splits is not None:
            return len(self.splits)
        return self.x.shape[0] if self.x.dim() == 3 else 1

    @property
    def rows(self) -> int:
        return self.x.shape[-2]

    @property
    def columns(self) -> int:
        return self.x.shape[-1]

    @property
    def all_rows(self) -> int:
        return self.x.numel() // self.columns

    def sizes(self) -> dict[str, int]:
        return {"rows": self.rows, "columns": self.columns, "groups": self.groups}

    def segments(self) -> int:
        """Rows of partial row sums."""
        if self.splits is not None:
            return self.rows // 128 + 2 * self.groups + 1
        return self.groups * max(1, -(-self.rows // 128))


class Run:
    """One launch of every kernel that a recipe needs on a case."""

    def __init__(self, kernels: Kernels, recipe: Recipe, case: Case, align: int = 32) -> None:
        self.kernels, self.recipe, self.case = kernels, recipe, case
        self.align = 128 if recipe.atoms else align
        self.q = recipe.quantization
        self.x = case.x.to(kernels.device)
        self.splits = None if case.splits is None else case.splits.to(kernels.device)
        self.half = int(case.x.dtype == torch.float16)

    def amax(self) -> dict[str, Buffer]:
        """Every kind of amax that this recipe reads."""
        case, q = self.case, self.q
        wanted: dict[str, int] = {}
        partials = case.groups * AMAX_PARTIALS
        if q.block == (None, None) or q.tensor_scale:
            wanted["of_group"] = partials
        if q.hadamard is not None:
            wanted["of_transformed_group"] = partials
        if q.block == (1, None):
            wanted |= {"of_row": case.all_rows, "of_column": case.groups * case.columns}
        found = {name: self.kernels.floats(count) for name, count in wanted.items()}
        if q.block == (1, None):
            self.kernels.clear(list(found.values()))
        sizes = {**case.sizes(), "row_align": self.align}
        arguments = _Amax(address(self.x), address(self.splits), **sizes)
        for name, buffer in found.items():
            setattr(arguments, name, buffer.pointer())
        self.kernels.call("run_amax", self.half, arguments)
        return found

    def _copy(self, operand: object, amax: Buffer | None) -> tuple[_Copy, Buffer, Buffer]:
        data, scale = operand.data, operand.scale  # type: ignore[attr-defined]
        data, scale = data.view(torch.uint8), scale.view(torch.uint8)
        codes, scales = (Buffer(t.numel(), self.kernels.device) for t in (data, scale))
        copy = _Copy(codes.pointer(), scales.pointer(), data.shape[-1], address(amax))
        return copy, codes, scales

    def arguments(self) -> _Quantize:
        """What every launch on this case says."""
        q = self.q
        return _Quantize(
            input=address(self.x),
            group_sizes=address(self.splits),
            **self.case.sizes(),
            row_align=self.align,
            epsilon=q.epsilon,
            power_of_two=q.rule == "max_over_amax" and q.round == "pow2_down",
            round_down=q.rule == "mx" and q.round == "pow2_down",
        )

    def quantize(
        self,
        rowwise: bool = True,
        columnwise: bool = True,
        *,
        scale: Tensor | None = None,
        rng_state: Tensor | None = None,
        token_major: bool = False,
        fold: bool = False,
        sums: bool = False,
        longer: int = 0,
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Name of an output -> (what the kernel wrote, what the reference wants), as bytes.

        `longer`: tokens by which dense copies are longer than the reference's, all padding.
        """
        case, q, device = self.case, self.q, self.kernels.device
        expected = reference.quantize(
            case.x,
            q,
            rowwise=rowwise,
            columnwise=columnwise,
            group_sizes=case.splits,
            layout=self.recipe.layout(self.align),
            scale=scale,
            rng_state=rng_state,
        )
        amax = self.amax() if scale is None else {}
        rows_amax = amax.get("of_row", amax.get("of_group"))
        columns_amax = amax.get("of_column", amax.get("of_transformed_group", amax.get("of_group")))
        on_device = [None if t is None else t.to(device) for t in (scale, rng_state)]
        arguments = self.arguments()
        arguments.scale, arguments.rng_state = (address(each) for each in on_device)
        outputs: dict[str, tuple[Buffer, Tensor]] = {}
        for name, operand, own in (
            ("rowwise", expected.rowwise, rows_amax),
            ("columnwise", expected.columnwise, columns_amax),
        ):
            if operand is None:
                continue
            stored = operand.scale
            if token_major and name == "rowwise":
                stored = reference.token_major(stored, case.splits, align=self.align)
                stored = pad(stored, (0, longer), value=1.0)
                arguments.token_pitch = stored.shape[1]
            codes = operand.data
            if name == "columnwise" and longer:
                codes = pad(codes.view(torch.uint8), (0, longer))
            copy, data, scales = self._copy(operand._replace(data=codes, scale=stored), own)
            if name == "columnwise" and self.recipe.untransposed:
                copy.pitch = 0
            outputs[f"{name} data"] = data, codes
            outputs[f"{name} scale"] = scales, stored
            if own is not None and operand.amax is not None:
                amax_result = self.kernels.floats(case.groups)
                copy.group_amax = amax_result.pointer()
                outputs[f"{name} amax"] = amax_result, operand.amax
            setattr(arguments, name, copy)
        if fold:
            folded = self.kernels.floats(case.groups)
            self.kernels.clear([folded])
            arguments.folded_amax = folded.pointer()
            outputs["folded amax"] = (
                folded,
                reference.group_amax(case.x, q, group_sizes=case.splits),
            )
        partial = self.kernels.floats(case.segments() * case.columns) if sums else None
        arguments.row_sums = address(partial)
        self.kernels.call("run_quantize", self.half, self.recipe.config, arguments)
        if partial is not None:
            self._check_sums(partial)
        return {
            name: (buffer.bytes(), wanted.contiguous().view(torch.uint8).flatten())
            for name, (buffer, wanted) in outputs.items()
        }

    def _check_sums(self, partial: Buffer) -> None:
        """Row sums against float64: each is a sum of at most `rows` fp32 roundings."""
        case = self.case
        partial.bytes()  # checks its guards
        output = self.kernels.floats(case.groups * case.columns)
        blocks = [block or 0 for block in self.q.block]
        arguments = _RowSums(
            partial.pointer(),
            output.pointer(),
            address(self.splits),
            **case.sizes(),
            row_align=max(self.align, *blocks),
        )
        self.kernels.call("run_row_sums", arguments)
        self.check_sums(output.floats(), 1e-5)

    def check_sums(self, sums: Tensor, tolerance: float) -> None:
        """Sums over rows [groups, columns]: relative to those of magnitudes."""
        case = self.case
        found = sums.view(case.groups, case.columns).double()
        rows = reference._rows(tuple(case.x.shape), case.splits, case.x.device)
        values = case.x.reshape(-1, case.columns).double()[rows.valid]
        wanted = torch.zeros(case.groups, case.columns, dtype=torch.float64)
        bound = torch.zeros_like(wanted)
        wanted.index_add_(0, rows.group[rows.valid], values)
        bound.index_add_(0, rows.group[rows.valid], values.abs())
        plain = bound.isfinite()
        assert ((found - wanted).abs() <= tolerance * bound)[plain].all()
        assert (found.isfinite() == plain)[plain].all()


def check(outputs: dict[str, tuple[Tensor, Tensor]], where: str) -> None:
    for name, (found, wanted) in outputs.items():
        if torch.equal(found, wanted):
            continue
        differ = (found != wanted).nonzero().flatten()
        at = int(differ[0])
        raise AssertionError(
            f"{where}: {name} differs in {len(differ)} of {len(wanted)} bytes, first at {at}: "
            f"got {int(found[at]):#x}, expected {int(wanted[at]):#x}"
        )
