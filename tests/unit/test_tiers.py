"""Every test has one tier; cells are left out only where another one's tests say the same."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import tiers
from tiers import BROAD, EXHAUSTIVE, FAST, KERNELS, OPTIONS
from twins import twins

ROOT = Path(__file__).parents[2]
CPU, HOPPER = ROOT / "generated" / "cpu", ROOT / "generated" / "sm_90a"


def test_every_file_of_tests_is_in_a_tier_that_collects_it() -> None:
    words = ["git", "ls-files", "tests/**/test_*.py", "generated/**/test_*.py"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    files = listed.stdout.splitlines() or [
        str(path.relative_to(ROOT)) for top in ("tests", "generated")
        for path in (ROOT / top).rglob("test_*.py")
    ]  # fmt: skip
    assert len(files) > 100
    for file in files:
        tier = tiers.tier_at(file)
        assert tier is not None, file
        assert tiers.may_hold((tier,), file), file
        assert all(tiers.may_hold((tier,), str(folder)) for folder in Path(file).parents[:-1]), file


@pytest.mark.parametrize(
    ("path", "function", "markers", "tier"),
    [
        ("tests/unit/test_a.py", "test_it", (), FAST),
        ("tests/unit/test_a.py", "test_compiles_whole", (), FAST),
        ("tests/golden/test_a.py", "test_it", ("slow",), OPTIONS),
        ("tests/generated/test_options.py", "test_it", (), OPTIONS),
        ("tests/generated/test_sampled_options.py", "test_it", (), OPTIONS),
        ("generated/cpu/tests/test_a__b.py", "test_opcheck", (), OPTIONS),
        ("generated/cpu/tests/test_a__b.py", "test_no_tokens", (), FAST),
        ("generated/sm_120a/tests/test_a__b.py", "test_it", (), OPTIONS),
        ("tests/compile/test_a.py", "test_it", (), KERNELS),
        ("tests/gpu/test_a.py", "test_it", (), tiers.GPU),
        ("elsewhere/test_a.py", "test_it", (), None),
    ],
)
def test_tiers(path: str, function: str, markers: tuple[str, ...], tier: tiers.Tier | None) -> None:
    assert tiers.tier_of(path, function, markers) is tier


def test_a_slow_test_is_where_the_other_tier_looks() -> None:
    with pytest.raises(ValueError, match="test_it is slow; add its folder to SLOW_PLACES"):
        tiers.tier_of("tests/numerics/test_a.py", "test_it", ("slow",))


def test_of_many_parameters_some_are_chosen_and_no_other_ones_when_more_come() -> None:
    few = [f"test_it[{number}]" for number in range(5)]
    many = [*few, *(f"test_it[{number}]" for number in range(100, 300))]
    assert tiers.spread(few, 5) == {*few}
    chosen = tiers.spread(many, 5)
    assert len(chosen) == 5 and chosen <= {*many}
    assert tiers.spread(reversed(many), 5) == chosen
    assert len(tiers.spread([*many, "test_it[another]"], 5) - chosen) <= 1


@pytest.mark.parametrize(
    ("path", "tier", "counts"),
    [
        ("tests/unit/test_a.py", FAST, {FAST: 3, BROAD: 97}),
        ("tests/numerics/test_a.py", FAST, {FAST: 100}),
        ("tests/unit/test_a.py", OPTIONS, {OPTIONS: 2, EXHAUSTIVE: 98}),
        ("tests/compile/test_a.py", KERNELS, {KERNELS: 2, EXHAUSTIVE: 98}),
        ("generated/cpu/tests/test_a__b.py", FAST, {FAST: 100}),
        ("generated/cpu/tests/test_a__b.py", OPTIONS, {OPTIONS: 100}),
        ("tests/gpu/test_a.py", tiers.GPU, {tiers.GPU: 100}),
    ],
)
def test_parameters_beside_a_sample_are_in_other_tiers(
    path: str, tier: tiers.Tier, counts: dict[tiers.Tier, int]
) -> None:
    found = tiers.tiers_of([f"test_it[{number}]" for number in range(100)], path, tier)
    assert Counter(found.values()) == counts


@pytest.mark.parametrize("folder", ["unit", "errors", "generated", "compile"])
def test_parameters_beside_the_sample_are_collected(folder: str) -> None:
    assert tiers.may_hold((EXHAUSTIVE,), f"tests/{folder}/test_a.py")
    assert not tiers.may_hold((EXHAUSTIVE,), "tests/gpu/test_a.py")


@pytest.mark.parametrize("folder", ["unit", "errors"])
def test_parameters_beside_a_few_are_collected(folder: str) -> None:
    assert tiers.may_hold((BROAD,), f"tests/{folder}/test_a.py")
    assert not tiers.may_hold((BROAD,), "tests/numerics/test_a.py")


def test_a_sample_has_every_module_format_and_option() -> None:
    cells = ["b__fp8_x", "b__fp8_y", "a__bf16", "a__bf16__p__q", "a__fp8_y__q", "b__mxfp8__p"]
    assert tiers.sample(cells) == {"a__bf16", "a__bf16__p__q", "a__fp8_y__q", "b__fp8_x"} | {
        "b__mxfp8__p"
    }


def test_what_ran_is_compared_with_what_there_is(tmp_path: Path) -> None:
    files = {"fast": "a\nb\n", "kernels": "b\nd\n", "all": "a\nb\nc\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert tiers.problems("abc", ("ab", "bd")) == [
        "c: in no tier",
        "d: ran, but is not collected",
        "b: ran 2 times",
    ]
    paths = [str(tmp_path / name) for name in ("fast", "kernels")]
    assert tiers.main([*paths, "--all", str(tmp_path / "all")]) == 1
    (tmp_path / "kernels").write_text("c\n")
    assert tiers.main([*paths, "--all", str(tmp_path / "all")]) == 0


# ---- twins


@pytest.fixture
def copies(tmp_path: Path) -> tuple[Path, Path]:
    """The code of one cell in both bundles."""
    for bundle in (CPU, HOPPER):
        for path in (
            *bundle.glob("_*.py"),
            *bundle.glob("*/_*.py"),
            *bundle.glob("*/*linear__bf16.py"),
        ):
            if path.stem.removeprefix("test_") == "linear__bf16" or path.name.startswith("_"):
                target = tmp_path / path.relative_to(ROOT / "generated")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        shutil.copyfile(bundle / "linear__bf16.py", tmp_path / bundle.name / "linear__bf16.py")
    return tmp_path / "sm_90a", tmp_path / "cpu"


def test_a_cell_that_differs_in_texts_and_checks_alone_has_a_twin(
    copies: tuple[Path, Path],
) -> None:
    assert twins(*copies) == {"linear__bf16"}


def test_checks_of_sizes_are_no_difference_where_both_cells_have_them(
    copies: tuple[Path, Path],
) -> None:
    """However strict they are: what the tests of one expect, those of the other one do."""
    strict, _ = copies
    reference = strict / "reference" / "linear__bf16.py"
    text = reference.read_text("utf-8")
    reference.write_text(text.replace(', 8, "sm_90a")', ', 128, "sm_90a")'), "utf-8")
    other = strict.with_name("sm_80")
    for path in strict.rglob("*.py"):
        target = other / path.relative_to(strict)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text("utf-8").replace("sm_90a", "sm_80"), "utf-8")
    assert twins(*copies) == set()
    assert twins(other, strict) == {"linear__bf16"}


def test_files_that_the_other_bundle_has_beside_are_no_difference(
    copies: tuple[Path, Path],
) -> None:
    bundle, other = copies
    (bundle / "reference" / "_sums.py").unlink()
    assert twins(bundle, other) == {"linear__bf16"}
    assert twins(other, bundle) == set()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("tests/test_linear__bf16.py", "    assert ", "    assert not "),
        ("reference/linear__bf16.py", "checks.rank(", "checks.another("),
        ("reference/linear__bf16.py", "return ", "return 2 * "),
        ("reference/linear__bf16.py", ', 8, "sm_90a")', ', 128, "sm_90a")'),
        ("reference/_checks.py", "raise RuntimeError", "raise ValueError"),
        ("linear__bf16.py", "backward", "backwards"),
        ("_library.py", "def join", "def enter"),
        ("tests/_support.py", "norm()", "sum()"),
    ],
)
def test_any_other_difference_is_one(
    copies: tuple[Path, Path], file: str, old: str, new: str
) -> None:
    changed = copies[0] / file
    text = changed.read_text("utf-8")
    assert old in text
    changed.write_text(text.replace(old, new), "utf-8")
    assert twins(*copies) == set()
