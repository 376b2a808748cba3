"""Build, check and time single kernels on a machine with a Hopper GPU.

    python benchmarks/kernels/run.py                                  everything
    python benchmarks/kernels/run.py build gemm_fp8_check --quick     some of it
    python benchmarks/kernels/run.py gemm_fp8_check quantize_check --device cpu

Each check and each timing writes benchmarks/results/<name>_<device>_<date>.json; on the CPU, where
kernels are emulated, nothing is written.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import torch

from kernels import build

CHECKS = ("gemm_fp8_check", "quantize_check")
BENCHES = ("gemm_fp8_bench", "quantize_bench")
STEPS = ("build", *CHECKS, *BENCHES)
MOST_JOBS = 14  # each compiler takes about 3 GB


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="a part of the cases and shapes")
    parser.add_argument(
        "--target", action="append", default=[], help="an FP8 kernel, by name; timed beside ours"
    )
    parser.add_argument("--rounds", type=int, help="turns of every contender of a timing")
    parser.add_argument(
        "--case", action="append", default=[], help="part of a case's name, of timings"
    )
    parser.add_argument("--jobs", type=int, default=min(MOST_JOBS, os.cpu_count() or 1))
    parser.add_argument("--list", action="store_true", help="print the names of FP8 kernels")
    parsed = parser.parse_args(arguments)
    for step in parsed.steps:
        if step not in STEPS:
            parser.error(f"no step {step!r}; steps: {', '.join(STEPS)}")
    try:
        parsed.targets = tuple(build.Target.parse(name) for name in parsed.target)
    except ValueError as error:
        parser.error(str(error))
    if parsed.device == "cpu" and "quantize_bench" in parsed.steps:
        parser.error("quantize_bench needs a GPU: leave out --device cpu")
    return parsed


def _steps(options: argparse.Namespace) -> tuple[str, ...]:
    if options.steps:
        return tuple(step for step in STEPS if step in options.steps)
    return STEPS if options.device == "cuda" else CHECKS


def _require_hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit(
            "checks and timings need a Hopper GPU (compute capability 9.0), but PyTorch finds "
            "none; --device cpu checks what can be checked without one"
        )


def _measure(step: str, options: argparse.Namespace) -> str:
    """Run a check or a timing; what failed of it, a line each."""
    module: Any = importlib.import_module(f"kernels.{step}")
    chosen: dict[str, Any] = {"quick": options.quick}
    if step.startswith("gemm_fp8"):
        chosen["targets"] = options.targets
    if step in CHECKS:
        chosen["device"] = options.device
    if options.device == "cuda":
        _require_hopper()
    else:
        common.DEVICE = "cpu"
    facts = common.gpu_environment()
    with common.rounds_of(options.rounds or (common.QUICK_ROUNDS if options.quick else None)):
        rows = module.run(**chosen)
        if step in BENCHES:
            rows = common.outcomes(rows, options.case)
    if options.device == "cpu":
        return "\n".join(each.error for each in rows if isinstance(each, common.Failure))
    facts["clocks_after"] = common.gpu_environment()["clocks"]
    result = common.result(f"kernels_{step}", rows, facts)
    common.write(result, partial=bool(options.case))
    return common.told(result)


def gemm_fp8_bench(*, quick: bool = False) -> Iterator[common.Case]:
    """Time the FP8 GEMMs that ship; on the CPU, their address arithmetic."""
    if common.DEVICE != "cpu":
        _require_hopper()
    return _bench("gemm_fp8_bench", quick)


def quantize_bench() -> Iterator[common.Case]:
    """Time the quantise kernels."""
    _require_hopper()
    return _bench("quantize_bench", quick=False)


def _bench(step: str, quick: bool) -> Iterator[common.Case]:
    cases: Iterator[common.Case] = importlib.import_module(f"kernels.{step}").run(quick=quick)
    return cases


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line.

    Raises:
        SystemExit: a case failed; the others are recorded.
    """
    options = _parse(arguments)
    if options.list:
        print(*(target.name for target in build.targets()), sep="\n")
        return
    failed = []
    for step in _steps(options):
        if step == "build":
            build.build(options.targets or build.targets(), options.jobs)
        else:
            failed.append(_measure(step, options))
    if any(failed):
        raise SystemExit("\n".join(filter(None, failed)))


if __name__ == "__main__":
    main()
