"""Benchmarks of fusegen.

    python benchmarks/run.py grouped main_grad host mlp          on a machine with a GPU
    python benchmarks/run.py ranks                               on two GPUs of a machine
    python benchmarks/run.py ranks_of_4                          on four
    python benchmarks/run.py model --quick                       a smaller one, not recorded
    python benchmarks/run.py mlp --case "qwen3 zipf" --rounds 30  some cases, more of their rounds
    FUSEGEN_TEST_DEVICE=cpu python benchmarks/run.py mlp --quick does it run? on the reference
    python benchmarks/run.py generate                            anywhere
    python benchmarks/run.py summary                             write docs/performance.md

The same as `fusegen bench NAME...`, which also compares with records and sweeps selection rules.
Each writes benchmarks/results/<name>_<device>_<date>.json and takes half a minute to three on an
H200 (CONTRIBUTING.md), but for `model`, which is compiled once for every recipe.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

# A checkout need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "generator"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import common

# Benchmark -> the module and function that measure it; loaded only if asked for.
GPU = {
    "grouped": ("gemms", "grouped"),
    "dense": ("gemms", "dense"),
    "main_grad": ("gemms", "main_grad"),
    "host": ("host", "host"),
    "pointwise": ("pointwise", "pointwise"),
    "norms": ("norms", "norms"),
    "residual_norms": ("norms", "residual_norms"),
    "norm_quantize": ("norm_quantize", "norm_quantize"),
    "dropout": ("dropout", "dropout"),
    "moe_ops": ("moe_ops", "moe_ops"),
    "moe_layer": ("moe_layer", "moe_layer"),
    "moe_forms": ("moe_layer", "moe_forms"),
    "ranks": ("ranks", "ranks"),
    "ranks_of_4": ("ranks", "ranks_of_4"),
    "router": ("router", "router"),
    "softmax": ("softmax", "softmax"),
    "mlp": ("mlp", "mlp"),
    "memory": ("memory", "memory"),
    "model": ("model", "model"),
    "layers": ("layers", "layers"),
    "decoder": ("decoder", "decoder"),
    "mma": ("mma", "mma"),
    "revisions": ("revisions", "revisions"),
    "kernels_gemm_fp8_bench": ("kernels.run", "gemm_fp8_bench"),
    "kernels_quantize_bench": ("kernels.run", "quantize_bench"),
}
CPU = {"generate": ("generation", "generate")}
ON_SEVERAL = {"ranks": 2, "ranks_of_4": 4}
"""How many GPUs they run on."""
# Not among those that are run without a name: one wants another bundle beside ours.
ON_REQUEST = (*ON_SEVERAL, "revisions")
# What can be told to measure less.
QUICK = (
    "grouped",
    "dense",
    "main_grad",
    "mma",
    "host",
    "norms",
    "residual_norms",
    "norm_quantize",
    "dropout",
    "moe_ops",
    "moe_layer",
    "moe_forms",
    *ON_SEVERAL,
    "router",
    "softmax",
    "mlp",
    "memory",
    "model",
    "layers",
    "decoder",
    "revisions",
    "kernels_gemm_fp8_bench",
)
SUMMARY = "summary"
NAMES = (*GPU, *CPU, SUMMARY)


def measure(
    name: str, *, quick: bool = False, rounds: int | None = None, cases: Sequence[str] = ()
) -> common.Result:
    """Run one benchmark; what fails of it stands among its rows.

    Args:
        name: of the benchmark.
        quick: smaller cases and few rounds.
        rounds: turns of every contender, by default `common.ROUNDS`.
        cases: parts of the names of cases; without any, all are measured.

    Raises:
        SystemExit: all of it fails, so there is nothing to record.
    """
    module, function = {**GPU, **CPU}[name]
    benchmark: Callable[..., Iterable[common.Case]]
    benchmark = getattr(importlib.import_module(module), function)
    on_gpu = name in GPU and common.DEVICE != "cpu"
    facts = common.gpu_environment() if on_gpu else common.environment()
    with common.rounds_of(rounds or (common.QUICK_ROUNDS if quick else None)):
        rows = common.outcomes(benchmark(quick=True) if quick else benchmark(), cases)
    if on_gpu and name in ON_SEVERAL:
        facts["gpus"] = ON_SEVERAL[name]
    if on_gpu:
        facts["clocks_after"] = common.gpu_environment()["clocks"]
    result = common.result(name, rows, facts)
    if not common.measured(result):
        raise SystemExit(common.told(result) or f"{name}: no case to measure")
    return result


def summarise() -> list[Path]:
    """Write the page and the figure of all results."""
    return [Path(path) for path in importlib.import_module("summary").summarise()]


def main() -> None:
    """The command line.

    Raises:
        SystemExit: something failed; what did not is recorded.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="measure less, and record nothing")
    parser.add_argument("--rounds", type=int, help="turns of every contender")
    parser.add_argument(
        "--case", action="append", default=[], help="part of a case's name; others are kept"
    )
    words = parser.parse_args()
    if words.rounds is not None and words.rounds < 1:
        parser.error("--rounds: expected at least 1")
    if words.quick and not set(words.names) <= set(QUICK):
        parser.error(f"--quick goes with: {', '.join(QUICK)}")
    failed = []
    for name in words.names:
        if name == SUMMARY:
            print(*summarise(), sep="\n")
            continue
        try:
            result = measure(name, quick=words.quick, rounds=words.rounds, cases=words.case)
            partial = bool(words.case)
            common.show(result) if words.quick else common.write(result, partial=partial)
            failed += [common.told(result)]
        except (Exception, SystemExit) as error:
            failed += [common.failure(name, common.ALL, error).error]
    if any(failed):
        raise SystemExit("\n".join(filter(None, failed)))


if __name__ == "__main__":
    main()
