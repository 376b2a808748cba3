"""Runs every kernel of a bundle under compute-sanitizer and reports per kernel.

    python tests/gpu/sanitize.py [--bundle generated/sm_90a] [--json report.json]

Every matrix kernel that the plan's rules can reach runs on ragged groups that leave rows over,
those of whole layers in one with ids of nobody; every module runs forward and backward on the
inputs of its own tests.  A further bundle leaves out the matrix kernels that the committed bundle
has, too.  Cases are dealt to several processes, each
of which is sanitized by itself.
Needs compute-sanitizer (in the CUDA toolkit) on PATH or in $CUDA_HOME/bin.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import bundles
import selection
import steps
from units import hash_units

HERE = Path(__file__).resolve().parent
TOOLS = ("memcheck", "racecheck")
MARK = "@@ sanitize:"
TIMEOUT = 900  # seconds for one tool; it takes about a minute on an H200
ELEMENTS = ("bfloat16", "float16")
LAYERS = {"moe_layer__bf16": "gemm_gather", "moe_layer__fp8_delayed": "gemm_codes"}
"""Cells of whole layers, and the GEMMs that only they have."""

_PROBLEM = re.compile(
    r"=+ +(?:(?:Error|Warning|Invalid|Misaligned|Uninitialized|Program hit|Out-of-range"
    r"|Potential|Barrier|Unused|Stack|Fatal|Internal)\b.*)"
)
_SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)")


class SanitizeError(Exception):
    """The tool could not do its work: what happened, and the end of what it printed."""


@dataclass(frozen=True)
class ToolReport:
    """What one tool said.

    Attributes:
        tool: its name.
        total: problems by the tool's own count.
        kernels: first lines of problems, by the kernel or module that ran.
    """

    tool: str
    total: int
    kernels: dict[str, list[str]] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """By the tool's count: some of its remarks are no problems."""
        return self.total == 0


def parse_log(tool: str, log: str) -> ToolReport:
    """Read a tool's output, in which every case is announced before it runs.

    Raises:
        SanitizeError: no summary, or a case that did not end: the program broke off.
    """
    kernels: dict[str, list[str]] = {}
    current = ""
    for line in log.splitlines():
        if line.startswith(MARK):
            current = line.removeprefix(MARK).strip()
            kernels.setdefault(current, [])
        elif _PROBLEM.match(line):
            kernels.setdefault(current or "before any kernel", []).append(line.strip("= "))
    summaries = _SUMMARY.findall(log)
    finished = kernels.pop("end", None) is not None
    if not summaries or not finished:
        tail = "\n".join(log.splitlines()[-25:])
        raise SanitizeError(f"{tool} broke off after {current or 'the start'}:\n{tail}")
    return ToolReport(tool, max(int(count) for count in summaries), kernels)


def find_sanitizer() -> str | None:
    """The path of compute-sanitizer, or None."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which(f"{home}/bin/compute-sanitizer")


def run_tool(
    sanitizer: str, tool: str, bundle: Path, hand: str = "0/1", units: Collection[str] | None = None
) -> ToolReport:
    """One tool over all cases, or over those of some units, or dealt to one of several hands.

    Raises:
        SanitizeError: the tool or the program under it broke off.
    """
    words = [sanitizer, "--tool", tool, "--print-limit", "200", "--report-api-errors", "no"]
    words += [sys.executable, str(HERE / "sanitize.py"), "--cases", hand, "--bundle", str(bundle)]
    words += [f"--unit={unit}" for unit in units or ()]
    # The caching allocator would hide a read past one tensor in the block of the next.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(
            words,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SanitizeError(f"{tool} took longer than {TIMEOUT} s") from error
    return parse_log(tool, done.stdout)


def merge(reports: list[ToolReport]) -> ToolReport:
    """What one tool said in all its processes, of which some may have been dealt no case.

    Raises:
        SanitizeError: none of them was.
    """
    kernels: dict[str, list[str]] = {}
    for report in reports:
        for name, problems in report.kernels.items():
            kernels.setdefault(name, []).extend(problems)
    if not kernels:
        raise SanitizeError(f"{reports[0].tool} had no case to run")
    return ToolReport(reports[0].tool, sum(report.total for report in reports), kernels)


Said = list[ToolReport] | SanitizeError
"""What every tool said of a bundle, or how one of them broke off."""


def sanitize(folders: Mapping[Path, Collection[str] | None], hands: int) -> dict[Path, Said] | None:
    """Every tool over bundles, all side by side, or None where compute-sanitizer is not installed.

    Args:
        folders: the bundles, and of each the units that run; None for all.
        hands: how many processes the cases of one bundle under one tool are dealt to.
    """
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return None
    with ThreadPoolExecutor(len(folders) * len(TOOLS) * hands) as pool:
        running = {
            folder: [
                [
                    pool.submit(run_tool, sanitizer, tool, folder, f"{i}/{hands}", units)
                    for i in range(hands)
                ]
                for tool in TOOLS
            ]
            for folder, units in folders.items()
        }
        return {folder: _said(tools) for folder, tools in running.items()}


def _said(tools: Sequence[Sequence[Future[ToolReport]]]) -> Said:
    """What the processes of every tool said together."""
    try:
        return [merge([each.result() for each in hands]) for hands in tools]
    except SanitizeError as error:
        return error


# ---- the cases, run below the tool


Case = tuple[str, Callable[[], Any]]


def cells_of(folder: Path) -> list[str]:
    """Modules of a bundle that have tests which run them."""
    cells = [path.stem for path in sorted(folder.glob("*__*.py")) if path.stem != "__init__"]
    return [cell for cell in cells if (folder / "csrc" / f"{cell}.cpp").exists()]


@dataclass(frozen=True)
class Chosen:
    """What runs: cells, and of matrix kernels all but those of units that are known."""

    cells: tuple[str, ...]
    known: frozenset[str]

    @classmethod
    def of(cls, folder: Path, units: Collection[str] = ()) -> Chosen:
        """All that a bundle has, or some units and the cells that have one of them."""
        cells, known = cells_of(folder), known_units(folder)
        if units:
            known |= hash_units(folder).keys() - {*units}
            cells = [cell for cell in steps.cells_with(folder, units) if cell in cells]
        return cls(tuple(cells), frozenset(known))


def _gemm_case(programs: Any, kind: str, sizes: selection.Reach, element: str) -> Callable[[], Any]:
    def gemm() -> None:
        import gpu_support as support
        import torch

        dtype = getattr(torch, element)
        splits = support.dirichlet(sizes.groups, sizes.tokens - sizes.tokens // 10, 1.0)
        # Random numbers come from the host: the tool then has no foreign kernels to watch.
        named = {"T": sizes.tokens, "E": sizes.groups, "K": sizes.k, "N": sizes.n}
        tensors = programs.inputs(dtype, splits, named)
        if kind == "fprop":
            programs.call("forward", tensors, ())()
            return
        dy = torch.randn(sizes.tokens, sizes.n).to(dtype).to(bundles.DEVICE)
        wanted = {"dgrad": "x", "wgrad": "weight"}[kind]
        programs.call("backward", programs.backward_tensors(tensors, dy), {wanted})()

    return gemm


def gemm_cases(bundle: Any, folder: Path, known: Collection[str]) -> Iterator[Case]:
    """One case per matrix kernel, by its name, but for units that are known."""
    from gpu_support import has_op
    from programs import Programs

    done = set()
    for cell in cells_of(folder):
        if not cell.startswith("grouped_linear__"):
            continue
        if not all(has_op(bundle, f"{cell}_{each}") for each in ("forward", "backward")):
            continue
        programs = Programs(bundle, cell)
        # Where gradients of weights wait, the backward has no such GEMM; other cells have.
        waits = {"wgrad"} if hasattr(programs.module, "backward_dw") else set()
        plan = programs.module.GroupedLinear.describe()
        for name, rules in selection.read_rules(plan).items():
            kind = selection.kind_of(name)
            if kind is None or kind in waits or name in done:
                continue
            done.add(name)
            for point, sizes in selection.reach_every_point(kind, rules).items():
                if f"kernels/{name}_{point}.cu" in known:
                    continue
                for element in ELEMENTS:
                    yield f"{name}_{element}_{point}", _gemm_case(programs, kind, sizes, element)


def _layer_case(
    bundle: Any, cell: str, problem: tuple[int, ...], element: str
) -> Callable[[], Any]:
    def layer() -> None:
        import torch

        tokens, choices, experts, hidden, intermediate = problem
        dtype, device = getattr(torch, element), bundles.DEVICE
        made = bundles.load_cell(bundle, cell).MoELayer(
            experts, hidden=hidden, intermediate=intermediate, device=device, dtype=dtype
        )
        x = torch.randn(tokens, hidden).to(dtype).to(device).requires_grad_()
        probs = torch.rand(tokens, choices).to(device).requires_grad_()
        ids = torch.randint(-1, experts + 1, (tokens, choices), dtype=torch.int32)
        own = ids[(ids >= 0) & (ids < experts)].long()
        counts = torch.bincount(own, minlength=experts)
        y = made(x, probs, ids.to(device), counts.to(device))
        y.backward(torch.randn(tokens, hidden).to(dtype).to(device))

    return layer


def layer_cases(bundle: Any, cells: Collection[str]) -> Iterator[Case]:
    """Layers with GEMMs of their own, at sizes that reach all of these' tiles."""
    from gpu_support import LAYERS as PROBLEMS

    for cell in sorted(LAYERS.keys() & {*cells}):
        plan = bundles.load_cell(bundle, cell).MoELayer.describe()
        if not any(name.startswith(LAYERS[cell]) for name in selection.read_rules(plan)):
            continue
        for problem in PROBLEMS:
            for element in ELEMENTS:
                yield f"{cell} {problem} {element}", _layer_case(bundle, cell, problem, element)


def known_units(folder: Path) -> set[str]:
    """Units of a further bundle that are, as they are, in the committed bundle, too.

    One that is whole runs in the place of its part.
    """
    if bundles.kind_of(folder) in ("", bundles.WHOLE):
        return set()
    committed = hash_units(bundles.GENERATED / folder.name)
    return {unit for unit, value in hash_units(folder).items() if committed.get(unit) == value}


def _cell_case(bundle: Any, cell: str, element: str) -> Callable[[], Any]:
    def train() -> None:
        import torch

        dtype = getattr(torch, element)
        tests: Any = bundles.load_cell(bundle, f"tests.test_{cell}")
        if hasattr(tests, "ORIENTATIONS"):  # a module that quantises: every role and form
            for role, form in tests.module._OPS:
                tests.module.quantize(**tests.make(role, form, dtype, bundles.DEVICE), role=role)
            return
        tensors = tests.make_inputs(dtype, bundles.DEVICE)
        dy = tests.make_dy(tensors)
        # A call that is asked for less has less memory to write to.
        for wanted in (tests.WANTED, *((name,) for name in tests.WANTED)):
            tests.run(tensors, dy, wanted=wanted)

    return train


def cell_cases(bundle: Any, cells: Collection[str]) -> Iterator[Case]:
    """Forward and backward of every module, for all gradients together and for each alone.

    What refreshes copies of weights runs before them, gradients that wait are called for after.
    """
    for cell in cells:
        for element in ELEMENTS:
            yield f"{cell} {element}", _cell_case(bundle, cell, element)


def run_cases(folder: Path, hand: str, units: Collection[str] = ()) -> None:
    """Announce and run every case dealt to a hand, "2/8"; each ends before the next begins."""
    import torch

    index, _, hands = hand.partition("/")
    bundle, chosen = bundles.load_bundle(folder), Chosen.of(folder, units)
    cases = [
        *gemm_cases(bundle, folder, chosen.known),
        *layer_cases(bundle, chosen.cells),
        *cell_cases(bundle, chosen.cells),
    ]
    for name, run in cases[int(index) :: int(hands)]:
        print(MARK, name, flush=True)
        run()
        torch.cuda.synchronize()
    print(MARK, "end", flush=True)


# ---- command line


def _folders(wanted: str | None) -> list[Path]:
    import torch

    if wanted:
        return [Path(wanted).resolve()]
    return bundles.bundles_to_test(torch.cuda.get_device_capability())


def print_report(folder: Path, reports: list[ToolReport]) -> None:
    """One line per kernel, then the problems."""
    key = bundles.key_of(folder)
    for name in reports[0].kernels:
        counts = ", ".join(f"{r.tool} {len(r.kernels.get(name, []))}" for r in reports)
        print(f"{key}  {name}: {counts}")
    for report in reports:
        print(f"{key}  {report.tool}: {report.total} problems")
        for name, problems in report.kernels.items():
            for problem in problems[:5]:
                print(f"  {name}: {problem}")


def main() -> int:
    """0 clean, 1 problems, 2 not installed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--bundle", help="the bundle; by default every one that this GPU runs")
    parser.add_argument("--json", type=Path, help="write the reports there")
    parser.add_argument("--hands", type=int, default=1, help="processes per bundle and tool")
    parser.add_argument("--cases", metavar="I/N", help="run every Nth case without a tool")
    parser.add_argument("--unit", action="append", default=[], help="with --cases: some units")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    clean = True
    folders = _folders(arguments.bundle)
    if arguments.cases:
        for folder in folders:
            run_cases(folder, arguments.cases, arguments.unit)
        return 0
    reports = sanitize(dict.fromkeys(folders), arguments.hands)
    if reports is None:
        print("compute-sanitizer: not on PATH nor in $CUDA_HOME/bin", file=sys.stderr)
        return 2
    for folder, said in reports.items():
        print_report(folder, said)
        found[bundles.key_of(folder)] = [asdict(report) for report in said]
        clean = clean and all(report.clean for report in said)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
