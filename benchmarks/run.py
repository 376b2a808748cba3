"""Benchmarks of fusegen.

    python benchmarks/run.py grouped dense host pointwise mlp    on a machine with a GPU
    python benchmarks/run.py generate                            anywhere
    python benchmarks/run.py summary                             write docs/performance.md

Each writes benchmarks/results/<name>_<device>_<date>.json and takes about a minute on an H200.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common

# Benchmark -> the module and function that measure it; loaded only if asked for.
GPU = {
    "grouped": ("products", "grouped"),
    "dense": ("products", "dense"),
    "host": ("host", "host"),
    "pointwise": ("pointwise", "pointwise"),
    "mlp": ("mlp", "mlp"),
}
CPU = {"generate": ("generation", "generate")}


def measure(name: str) -> Path:
    """Run one benchmark and write its result."""
    module, function = {**GPU, **CPU}[name]
    benchmark: Callable[[], list[common.Row]]
    benchmark = getattr(importlib.import_module(module), function)
    facts = common.gpu_environment() if name in GPU else common.environment()
    rows = benchmark()
    if name in GPU:
        facts["clocks_after"] = common.gpu_environment()["clocks"]
    return common.write(name, rows, facts)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=[*GPU, *CPU, "summary"], metavar="NAME")
    for name in parser.parse_args().names:
        if name == "summary":
            print(importlib.import_module("summary").summarise())
        else:
            measure(name)


if __name__ == "__main__":
    main()
