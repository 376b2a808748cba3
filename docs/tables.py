"""Tables of the documentation that are printed from the code: `python docs/tables.py [--check]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from fusegen.checks.load import load
from fusegen.ir.buffers import size_in_bytes
from fusegen.ir.naming import Cell
from fusegen.ir.shapes import evaluate
from fusegen.options.backward_calls import ONE_CALL
from fusegen.passes.pipeline import PASSES, resolve_module
from fusegen.publish.paths import builtin_specs
from fusegen.spec.load import SpecSet
from fusegen.spec.offers import refusal
from fusegen.steps.footprint import backward_peak, for_each_parameter, for_each_token, held

PAGE = Path(__file__).parent / "architecture.md"
ROOT = PAGE.parents[1]


def passes() -> Iterator[str]:
    """The table of all passes in their order."""
    yield "| | pass | what it does | where chosen |"
    yield "|---|---|---|---|"
    for number, each in enumerate(PASSES, 1):
        words = ", ".join(f"`{word}`" for word in each.options)
        yield f"| {number} | `{each.name}` | {each.summary} | {words} |"


# ---- what it takes to add something


WALKTHROUGHS = ROOT / "tests" / "walkthroughs"
PATCH = "changes.patch"
COMMENTS = {".py": "#", ".yaml": "#", ".j2": "<#", ".h": "//", ".cuh": "//", ".cu": "//"}
"""What a line of comment begins with, by the suffix of its file."""


@dataclass(frozen=True, slots=True)
class Addition:
    """Something that is added in a walk-through.

    Attributes:
        what: for people.
        folder: of the walk-through.
        most: as many files may be touched at most.
    """

    what: str
    folder: str
    most: int


ADDITIONS = (
    Addition("a recipe with blocks that no matrix instruction reads", "recipe_1x64", 1),
    Addition("an architecture whose MMA is known: a part of Hopper", "known_mma", 1),
    Addition(
        "an option whose code runs around every step, as `nvtx_ranges` does", "pointwise_option", 4
    ),
    Addition("a kind of step with a kernel, in a package of its own", "log_sum_exp", 6),
)
HOPPER = (
    "specs/archs/sm_90a.yaml",
    "generator/fusegen/families/wgmma.py",
    "generator/fusegen/families/*_sm90.py",
    "templates/csrc/*_sm90.*",
    "templates/static/csrc/fusegen/*/*.sm90.cuh",
)
"""What is Hopper's alone, besides the lines of its families in their registry."""
MMA_SYNC = (
    "specs/archs/sm_80.yaml",
    "specs/archs/sm_89.yaml",
    "specs/archs/sm_120a.yaml",
    "generator/fusegen/families/mma_sync.py",
    "generator/fusegen/families/*_mma.py",
    "templates/csrc/*_mma.*",
    "templates/static/csrc/fusegen/*/*.mma.cuh",
)
"""The same of Ampere, Ada and GeForce's Blackwell; later architectures can run most of it, too."""
TENSOR_MEMORY = (
    "specs/archs/sm_100a.yaml",
    "generator/fusegen/families/tcgen05.py",
    "generator/fusegen/families/*_tcgen05.py",
    "templates/csrc/*_tcgen05.*",
    "templates/static/csrc/fusegen/*/*.sm100.cuh",
)
"""The same of Blackwell for data centres, whose loads and stores are Hopper's."""
OWN = {
    "an architecture with an MMA of its own: what Hopper has of its own": HOPPER,
    "the same: what Ampere, Ada and GeForce's Blackwell have of their own": MMA_SYNC,
    "the same: what Blackwell has of its own, for data centres": TENSOR_MEMORY,
}


def lines_of(text: Iterable[str], suffix: str) -> int:
    """How many lines are neither blank nor comments."""
    stripped = (line.strip() for line in text)
    return sum(1 for line in stripped if line and not line.startswith(COMMENTS[suffix]))


def changed(patch: str) -> Mapping[str, int]:
    """Files that a patch changes, and the lines that it takes away or adds."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in patch.splitlines():
        if line.startswith("+++ b/"):
            current = found.setdefault(line.removeprefix("+++ b/"), [])
        elif line.startswith(("+", "-")) and not line.startswith("--- "):
            current.append(line[1:])
    return {name: lines_of(lines, Path(name).suffix) for name, lines in found.items()}


def touched(folder: Path) -> Mapping[str, int]:
    """Files that a walk-through adds or changes, and their lines.

    What lies beside its folders is no part of it: its README, the metadata of a package.

    Raises:
        KeyError: of the suffix of a file in which nobody said what a comment is.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _is_source(path))
    own = [path for path in files if path.parent != folder]
    found = {
        path.relative_to(folder).as_posix(): lines_of(
            path.read_text("utf-8").splitlines(), path.suffix
        )
        for path in own
    }
    patch = folder / PATCH
    return found | (changed(patch.read_text("utf-8")) if patch.exists() else {})


def _is_source(path: Path) -> bool:
    """Whether it was written, and not left there by Python."""
    return not {"__pycache__", ".ruff_cache"} & {*path.parts}


def additions() -> Iterator[str]:
    """The table of what is touched to add something."""
    yield "| to add | files | lines | which |"
    yield "|---|---|---|---|"
    for each in ADDITIONS:
        found = touched(WALKTHROUGHS / each.folder)
        names = ", ".join(f"`{name}`" for name in found)
        link = f"[{each.what}](../tests/walkthroughs/{each.folder}/README.md)"
        yield f"| {link} | {len(found)} | {sum(found.values())} | {names} |"
    for what, patterns in OWN.items():
        files = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
        lines = sum(lines_of(path.read_text("utf-8").splitlines(), path.suffix) for path in files)
        names = ", ".join(f"`{pattern}`" for pattern in patterns)
        rounded = round(lines, -3 if lines > 2000 else -2)
        yield f"| {what} | {len(files)} | about {rounded} | {names} |"


# ---- what a forward keeps


LAYER = {"T": 65536, "E": 32, "H": 7168, "F": 2048}
"""Of the experts that DeepSeek-V3 has on a rank, `dsv3` of `benchmarks/shapes.py`."""
CHOICES = (
    *((), ("held_weights",), ("recompute_activations",), ("cache_quantized_input",)),
    ("cache_quantized_input", "recompute_activations"),
)


def memory() -> Iterator[str]:
    """The table of what expert MLPs keep, by recipe and choice."""
    specs = load([builtin_specs()])
    yield (
        "| recipe | `--option` | for each token | for each parameter | held |"
        " peak of the backward | as one call |"
    )
    yield "|---|---|---|---|---|---|---|"
    for recipe, spec in specs.recipes.items():
        for words in CHOICES:
            if refusal(words, specs.modules["grouped_mlp"], spec, specs.ops) is None:
                yield _memory_row(specs, Cell("grouped_mlp", recipe, words))


def _memory_row(specs: SpecSet, cell: Cell) -> str:
    plan = resolve_module(specs, cell, "sm_90a")
    one = resolve_module(specs, replace(cell, options=(*cell.options, ONE_CALL)), "sm_90a")
    made = sum(evaluate(size_in_bytes(plan.buffer(name)), LAYER) for name in held(plan))
    peaks = (f"{backward_peak(each, LAYER) / 2**30:.2f} GiB" for each in (plan, one))
    words = ", ".join(f"`{word}`" for word in cell.options)
    of_token, of_parameter = for_each_token(plan, held(plan)), for_each_parameter(plan)
    kept = (of_token, f"{of_parameter:.2g}", f"{made / 2**30:.2f} GiB")
    return f"| `{cell.recipe}` | {words} | {' | '.join((*kept, *peaks))} |"


# ---- what recipes cost a model


RECORD = ROOT / "examples" / "recipes_sm_90a.json"
"""What `examples/train_recipes.py` found."""


def training() -> Iterator[str]:
    """Final losses of trained models, means over seeds, and what they are above bf16's."""
    record = json.loads(RECORD.read_text("utf-8"))
    base = record["runs"]["bf16"]
    steps, torch = record["config"]["steps"], record["torch"].partition("+")[0]
    where = f"on one {record['device']}, torch {torch}, {record['date']}"
    yield f"{steps:,} steps from {record['seeds']} seeds, {where}."
    yield ""
    yield "| experts of | final loss | | on held-out files | |"
    yield "|---|---|---|---|---|"
    for name, runs in record["runs"].items():
        found = (_loss(runs, base, loss) for loss in ("final_loss", "held_out_loss"))
        yield f"| {name} | {' | '.join(found)} |"


def _loss(
    runs: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]], loss: str
) -> str:
    """The mean of a loss, and by how much it is above the baseline's, seed by seed."""
    above = [run[loss] / other[loss] - 1 for run, other in zip(runs, base, strict=True)]
    band = f"{fmean(above):+.2%} ({min(above):+.2%} to {max(above):+.2%})" if runs != base else ""
    return f"{fmean(run[loss] for run in runs):.4f} | {band}"


Table = Callable[[], Iterator[str]]
TABLES: Mapping[str, Table] = {"passes": passes, "additions": additions}
"""Tables of the page on the architecture, by the names that stand in their markers."""
MEMORY = Path(__file__).parent / "features" / "memory.md"
NUMERICS = Path(__file__).parent / "numerics.md"
PAGES: Mapping[Path, Mapping[str, Table]] = {
    PAGE: TABLES,
    MEMORY: {"memory": memory},
    NUMERICS: {"training": training},
}


def replaced(page: str, path: Path, tables: Mapping[str, Table] = TABLES) -> str:
    """The page with each table between its markers."""
    for name in tables:
        begin, end = f"<!-- {name}: written by docs/tables.py -->", f"<!-- end of {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            sys.exit(f"{path} has no lines {begin} and {end}, once each, for the table of {name}")
        head, rest = page.split(begin)
        _, tail = rest.split(end)
        page = "\n".join((f"{head}{begin}", *tables[name](), f"{end}{tail}"))
    return page


def main(words: Sequence[str], path: Path | None = None) -> int:
    """Write the tables, or with ``--check`` say whether they are as they would be written.

    Args:
        words: of the command line.
        path: a page for the tables on the architecture; by default all pages have theirs.
    """
    if path is None:
        return max(_written(words, page, tables) for page, tables in PAGES.items())
    return _written(words, path, TABLES)


def _written(words: Sequence[str], path: Path, tables: Mapping[str, Table]) -> int:
    page = path.read_text(encoding="utf-8")
    wanted = replaced(page, path, tables)
    if wanted == page:
        return 0
    if "--check" in words:
        print(f"{path.name} is out of date; run: python docs/tables.py", file=sys.stderr)
        return 1
    path.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
