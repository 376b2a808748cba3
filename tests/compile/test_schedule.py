"""Tile sources hand out every tile exactly once: `tile_source/`, run on the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import pytest

from fusegen.spec.arch import ArchSpec
from fusegen.spec.kinds import SpecKind
from fusegen.spec.load import parse_spec

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("walk_schedule.cpp")
CSRC = ROOT / "templates" / "static" / "csrc"
SOURCES = Path("fusegen", "tile_source")
ARCH = ROOT / "specs" / "archs" / "sm_90a.yaml"

# No spec names a cluster of one, yet the headers have branches for it.
ALONE = (64, 128, 1)

# Around the 64 rows of a multiplication and the 128 of a tile.
BOUNDARIES = (0, 1, 63, 64, 65, 127, 128, 129)
# A size is any int64 that a tensor may hold, sensible or not.
HOSTILE = (-1, 2**62, 5, -(2**63), 2**63 - 1, 0, 200)


@dataclass(frozen=True, slots=True)
class Case:
    """A problem and the launch it is walked with; no sizes: dense.

    n and k are result columns of fprop and of dgrad and wgrad; n is also the rows of wgrad.
    """

    name: str
    tokens: int
    n: int
    k: int
    clusters: int
    sizes: Sequence[int] = ()

    def line(self) -> str:
        """How the driver reads it."""
        numbers = (self.tokens, self.n, self.k, self.clusters, len(self.sizes), *self.sizes)
        return " ".join([self.name, *map(str, numbers)])


def repeated(sizes: Sequence[int], groups: int) -> tuple[int, ...]:
    return tuple(islice(cycle(sizes), groups))


def ragged(groups: int, most: int) -> tuple[int, ...]:
    """Sizes in [0, most) without a pattern that a walk could be in step with."""
    return tuple(group * group * 7919 % most for group in range(groups))


def grouped(name: str, sizes: Sequence[int], n: int, k: int, clusters: int, rest: int = 0) -> Case:
    """A case whose sizes are sensible: `rest` tokens belong to no group."""
    return Case(name, sum(sizes) + rest, n, k, clusters, sizes)


# Columns: 128, 192 and 256 divide 768; 392 leaves 8 of each; 8 and 136 are less than most tiles.
CASES = (
    Case("dense_empty", 0, 392, 136, 3),
    Case("dense_one_token", 1, 8, 8, 2),
    Case("dense_odd_row_blocks", 640, 392, 768, 3),
    Case("dense_even_row_blocks", 768, 768, 392, 5),
    Case("dense_several_super_rows", 4745, 1160, 264, 7),
    Case("dense_fewer_tiles_than_clusters", 300, 136, 136, 20),
    grouped("one_group", [900], 392, 640, 4),
    grouped("one_group_and_rest", [513], 640, 392, 3, rest=387),
    grouped("one_empty_group", [0], 136, 392, 2, rest=130),
    grouped("two_groups", [640, 2177], 768, 392, 5),
    grouped("two_groups_first_empty", [0, 384], 392, 8, 3, rest=1),
    Case("two_groups_second_oversized", 700, 392, 264, 3, (129, 10_000)),
    grouped("boundaries", repeated(BOUNDARIES, 33), 392, 264, 6, rest=65),
    Case("boundaries_without_tokens", 0, 264, 136, 2, repeated(BOUNDARIES, 33)),
    grouped("super_rows_per_group", [1153, 2176, 0, 3000], 264, 200, 9, rest=1300),
    grouped("ragged_128", ragged(128, 301), 136, 264, 5, rest=129),
    Case("hostile_128", 5000, 136, 264, 4, repeated(HOSTILE, 128)),
    Case("negative_128", 333, 136, 8, 2, repeated([-5], 128)),
    grouped("ragged_512", ragged(512, 140), 136, 72, 2, rest=200),
    grouped("last_of_512", [*repeated([0], 511), 900], 8, 72, 2),
    grouped("boundaries_600", repeated(BOUNDARIES, 600), 8, 136, 2, rest=64),
    Case("hostile_600", 3000, 136, 8, 1, (*ragged(300, 9), *repeated(HOSTILE, 300))),
)

# A header, code of it, what to break it into, and what the driver must then say. Each walk is
# broken in its own way, so that one copy serves for both.
MUTATIONS = (
    (
        "row_walk.cuh",
        "step_(base.cluster)",
        "step_(base.cluster + 1)",
        "fprop 128x128 cluster 2: group 1: tile (0, 0) is computed 0 times",
    ),
    (
        "k_walk.cuh",
        "step = wave_ * this->clusters",
        "step = wave_ / 2 * this->clusters",
        "wgrad 128x128 cluster 2: group 0: tile (0, 0) is computed 2 times",
    ),
)
MUTATIONS_OF_PARTS = (
    (
        "blocks_of_slots.cuh",
        "range_.inside ? first :",
        "range_.inside ? 0 :",
        "fprop 128x128 cluster 2: group 1: row 0 is in the other part",
    ),
)


def tilings() -> list[tuple[int, int, int]]:
    """Tile rows, tile columns and cluster size of every point of the architecture, and ALONE."""
    arch, _ = parse_spec(SpecKind.ARCHS, ARCH, ARCH.name)
    assert isinstance(arch, ArchSpec)
    kinds = [kind for family in arch.kernels.values() for kind in family.kinds.values()]
    points = [point for kind in kinds for point in kind.points]
    assert points, f"{ARCH.name} names no configuration"
    named = {(*point.tile[:2], point.cluster[0] * point.cluster[1]) for point in points}
    return sorted({*named, ALONE})


def compiled(folder: Path, include: Path, walked: Sequence[tuple[int, int, int]]) -> Path:
    """The driver, built with the headers below `include` for some tilings."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    assert compiler, "this test compiles C++: install g++"
    listed = ",".join(f"Tiling<{m},{n},{cluster}>" for m, n, cluster in walked)
    program = folder / "walk_schedule"
    # The headers are CUDA: as system headers they may hold pragmas that C++ does not know.
    own = ("-I", str(ROOT / "tests" / "sim"), "-isystem", str(include))
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-DTILINGS={listed}"]
    subprocess.run([*command, *own, str(DRIVER), "-o", str(program)], check=True)
    return program


def walk(program: Path, cases: Sequence[Case]) -> subprocess.CompletedProcess[str]:
    lines = "".join(f"{case.line()}\n" for case in cases)
    return subprocess.run(
        [program], input=lines, capture_output=True, text=True, timeout=60, check=False
    )


def said(done: subprocess.CompletedProcess[str]) -> str:
    """For people: how the driver ended, what it found, and where it was if it crashed."""
    last = done.stderr.splitlines()[-1:]
    return f"exit status {done.returncode}, last walk {last}\n{done.stdout}"


def test_every_tile_is_computed_once(tmp_path: Path) -> None:
    done = walk(compiled(tmp_path, CSRC, tilings()), CASES)
    assert done.returncode == 0, said(done)
    assert done.stdout.startswith(f"{len(CASES)} cases, ")


def test_every_device_computes_the_same_tiles(tmp_path: Path) -> None:
    """However many clusters run: one, more than there are tiles, those of 114, 132 and 148 SMs."""
    program = compiled(tmp_path, CSRC, tilings())
    names = ("dense_several_super_rows", "super_rows_per_group", "ragged_128", "hostile_128")
    cases = [
        replace(case, name=f"{case.name}_on_{clusters}", clusters=clusters)
        for case in CASES
        if case.name in names
        for clusters in (1, 2, 57, 66, 74)
    ]
    assert len(cases) == 5 * len(names)
    done = walk(program, cases)
    assert done.returncode == 0, said(done)


@pytest.mark.parametrize("mutations", (MUTATIONS, MUTATIONS_OF_PARTS))
def test_broken_walks_are_noticed(
    mutations: Sequence[tuple[str, str, str, str]], tmp_path: Path
) -> None:
    shutil.copytree(CSRC / "fusegen", tmp_path / "fusegen")
    for name, sound, broken, _ in mutations:
        header = tmp_path / SOURCES / name
        text = header.read_text()
        assert text.count(sound) == 1, f"{name} no longer holds {sound!r}: break other code"
        header.write_text(text.replace(sound, broken))
    cases = [case for case in CASES if case.name == "two_groups_first_empty"]
    done = walk(compiled(tmp_path, tmp_path, [(128, 128, 2)]), cases)
    assert done.returncode == 1, said(done)
    for *_, report in mutations:
        assert f"two_groups_first_empty {report}" in done.stdout
