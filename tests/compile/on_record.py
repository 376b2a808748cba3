"""Which units of bundles were compiled and kept their contracts, by all that decides it.

`compiled.txt` has a digest for each: of its text and that of the headers it includes, of flags and
of its contract.  Compiled again by the same compilers it would come to the same, so tests compile
what is not on record, and a sample of the rest.  Before them stands which compilers, and which
PyTorch, the record is of: with others, tests compile everything.

    make compiled      compiles what is not on record, and writes it
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fusegen import api
from fusegen.build.compilation import HEADER_OF_LAUNCHERS, Command, commands, compile_all
from fusegen.build.contracts import Promise, code_of
from fusegen.build.library import default_jobs
from fusegen.build.objcache import CachedObject, ObjectCache, Report, default_root
from fusegen.build.progress import Silent
from fusegen.build.sources import read_sources
from fusegen.build.toolchain import find_toolchain
from fusegen.emit.digests import Tree
from fusegen.ir.naming import Cell
from fusegen.publish.selection import DEFAULT_PREFIX
from fusegen.spec.load import SpecSet
from fusegen.tuning.variants import publish_cells

from .contracts import promises_of

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("compiled.txt")
COMPILED = sorted(path.parents[1] for path in (ROOT / "generated").glob("*/csrc/sources.cmake"))
"""Committed bundles with kernels."""

_TESTS = Path(__file__).parents[1]
SPECS = api.Folders(
    specs=(_TESTS / "walkthroughs" / "recipe_1x64" / "specs", _TESTS / "numerics" / "specs")
)
"""Where there are recipes which fusegen does not come with."""

_MAIN_GRAD = ("bf16", "fp8_block", "mxfp8")
_CACHED = ("fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")
_OF_ADA = ("fp8_delayed", "fp8_rowwise", "fp8_block", "nvfp4")
"""Fast and split sums of both formats, every scaling, and what is decoded."""
_ANY_SCALING = ("fp8_block_1x64", "fp8_mixed", "fp8_per_row")
FURTHER = {
    "choices": (
        "sm_90a",
        (
            ("linear", ("fp8_delayed",), "reduced_amax"),
            ("linear", ("fp8_delayed",), "nvtx_ranges"),
            ("grouped_linear", ("nvfp4",), "debug"),
            ("grouped_linear", _MAIN_GRAD, "add_to_main_grad"),
            ("grouped_linear", _MAIN_GRAD, "write_main_grad"),
            ("grouped_linear", _CACHED, "cached_weights"),
            ("linear", ("fp8_block", "nvfp4"), "dequantized_backward"),
            ("grouped_linear", ("fp8_delayed", "mxfp8"), "delayed_wgrad"),
            ("grouped_mlp", ("bf16", "fp8_block"), "delayed_wgrad"),
            ("grouped_mlp", ("fp8_delayed",), "recompute_activations"),
            ("grouped_mlp", ("bf16", "fp8_current", "fp8_block", "mxfp8"), "scaled_bias"),
            ("grouped_linear", ("bf16",), "scaled_bias"),
            ("grouped_mlp", ("bf16", "fp8_block"), "interleaved_32"),
            ("swiglu", ("bf16",), "interleaved_32"),
        ),
    ),
    "any_scaling": ("sm_90a", (("grouped_linear", _ANY_SCALING, ""),)),
    "ada": ("sm_89", (("grouped_linear", _OF_ADA, "add_to_main_grad"),)),
}
"""Bundles that are not committed: of an architecture modules, recipes and the option, if any.

Every choice that changes a launcher or a kernel; scalings that are decoded; FP8 by `mma.sync`.
"""


ELEMENTS = ("13__nv_bfloat16", "6__half")
"""Element types, as names of kernels have them."""
UNTYPED = {
    f"kernels/{name}.cu"
    for name in ("gather_rows", "routing_plan", "take", "route", "update_scale")
}
"""Units whose kernels copy 16-bit values, whatever they are, or have fp32 and integers alone."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of a bundle.

    Attributes:
        command: that compiles it.
        promise: what it has to be.
        digest: of all that decides whether it is, but for the compilers.
    """

    command: Command
    promise: Promise
    digest: str


def cells_of(name: str) -> tuple[Cell, ...]:
    """The cells of one of `FURTHER`."""
    return tuple(
        Cell(module, recipe, (option,) if option else ())
        for module, recipes, option in FURTHER[name][1]
        for recipe in recipes
    )


def write_further(name: str, folder: Path) -> Path:
    """One of `FURTHER`, below a folder.

    It has the namespace of the committed bundle, so that units which both have compile once.
    """
    bundle = folder / FURTHER[name][0]
    lacking = publish_cells(_specs(), bundle.name, cells_of(name), DEFAULT_PREFIX, bundle)
    assert not lacking, lacking[0]
    return bundle


def bundles(folder: Path) -> Iterator[Path]:
    """All of them; those that are not committed are written below a folder."""
    yield from COMPILED
    yield from (write_further(name, folder / name) for name in FURTHER)


def units_of(bundle: Path, scratch: Path) -> dict[str, Unit]:
    """The units of a bundle's cells, by name.

    Args:
        bundle: its folder.
        scratch: for what compilers leave.
    """
    csrc, tools = bundle / "csrc", find_toolchain()
    sources = read_sources(csrc / "sources.cmake")
    every = commands(csrc, sources, tools, scratch, strict=True, lineinfo=False)
    promised = promises_of(bundle, _specs())
    tree = Tree(lambda path: _text(csrc / path))
    return {
        each.name: Unit(each, promised[each.name], digest(tree, each, promised[each.name]))
        for each in every
        if each.name in promised
    }


@cache
def _specs() -> SpecSet:
    return api.load_specs(SPECS)


def _text(path: Path) -> bytes | None:
    """Of a file, without remarks, such as what it was generated from; None where there is none."""
    if not path.is_file():
        return None
    lines = path.read_bytes().splitlines()
    return b"\n".join(line for line in lines if line and not line.startswith(b"//"))


def digest(tree: Tree, command: Command, promise: Promise) -> str:
    """Of a unit.

    Args:
        tree: files below the bundle's `csrc`.
        command: that compiles it.
        promise: what it has to be.
    """
    first = (HEADER_OF_LAUNCHERS,) if command.shares_header else ()
    return tree.digest((command.name, *first), *command.flags, repr(promise))


def compiled(units: Iterable[Unit], scratch: Path) -> dict[str, CachedObject]:
    """Objects of units, by their names; from the user's cache where nothing changed.

    Raises:
        BuildError: one does not compile.
    """
    plan = [unit.command for unit in units]
    cache = ObjectCache(default_root())
    return compile_all(plan, scratch, cache, default_jobs(), Silent())


def breaches(unit: Unit, made: CachedObject) -> list[str]:
    """What of a unit is otherwise than its contract says, or of one type alone, one line each."""
    found = unit.promise.breaches(made.report, code_of(unit.promise, made))
    return [*found, *of_one_type(unit.command.name, made.report)]


def of_one_type(name: str, report: Report) -> Iterator[str]:
    """Whether a unit has kernels for one of the element types that it has not for the others."""
    if not name.startswith("kernels/"):
        return
    names = [kernel.name for kernel in report.kernels]
    first, *others = (_named_for(names, element) for element in ELEMENTS)
    if bool(first) == (name in UNTYPED) or any(each != first for each in others):
        yield f"expected the same kernels for each element type, got {sorted(names)}"


def _named_for(names: Iterable[str], element: str) -> set[str]:
    """Names of the kernels of an element type, without the type."""
    return {name.replace(element, "") for name in names if element in name}


def lacking(units: Mapping[str, Unit], known: Collection[str]) -> set[str]:
    """Names of those that are not on record."""
    return {name for name, unit in units.items() if unit.digest not in known}


def read(path: Path = RECORD) -> frozenset[str]:
    """The digests on record, if it is of these compilers; none otherwise."""
    said, *digests = path.read_text("ascii").splitlines() if path.exists() else [""]
    return frozenset(digests) if said == _toolchain() else frozenset()


def _toolchain() -> str:
    """The compilers and PyTorch, in a line."""
    tools = find_toolchain()
    said = f"{tools.identity}\n{tools.torch.version}"
    return f"compilers {hashlib.sha256(said.encode()).hexdigest()}"


def main() -> int:
    """Compile what is not on record, and write what is then; 1 where a contract is broken."""
    known, kept, broken = read(), set[str](), False
    with tempfile.TemporaryDirectory(prefix="fusegen-") as folder:
        root = Path(folder).resolve()
        for number, bundle in enumerate(bundles(root)):
            scratch = root / str(number)
            scratch.mkdir()
            units = units_of(bundle, scratch)
            kept |= known & {unit.digest for unit in units.values()}
            wanted = [units[name] for name in sorted(lacking(units, known))]
            where = f"{bundle.parent.name}/{bundle.name}"
            print(f"{where}: {len(wanted)} of {len(units)} units", flush=True)
            for unit, said in _held(wanted, scratch):
                print("".join(f"{unit.command.name}: {line}\n" for line in said), end="")
                broken = broken or bool(said)
                kept |= set() if said else {unit.digest}
    RECORD.write_text("\n".join((_toolchain(), *sorted(kept), "")), "ascii")
    return 1 if broken else 0


def _held(units: list[Unit], scratch: Path) -> Iterator[tuple[Unit, list[str]]]:
    """Units, and what each breaks of its contract."""
    objects = compiled(units, scratch)
    for unit in units:
        yield unit, breaches(unit, objects[unit.command.name])


if __name__ == "__main__":
    sys.exit(main())
