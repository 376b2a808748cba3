"""Scripts that several ranks run together on the CPU, each in a process of its own.

Not in the process of the tests: gloo's threads would live among all else that it has started.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from .loading import LOAD

TIMEOUT_S = 300
_JOIN = (
    LOAD
    + """
import torch, torch.distributed as dist
store, folder, bundle = sys.argv[1:4]
rank, ranks = map(int, sys.argv[4:6])
words = sys.argv[6:]
load("bundle", bundle)
dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
"""
)
# Past Python's own end: functional collectives keep their group for ever, destroyed or not, and a
# thread of gloo that frees a tensor of the last collective while Python ends aborts the process.
_LEAVE = """
dist.barrier()
import os
sys.stdout.flush(), sys.stderr.flush()
os._exit(0)
"""


def run_ranks(script: str, folder: Path, bundle: Path, *words: str, ranks: int = 2) -> None:
    """Run a script on all ranks to its end.

    It finds `folder`, `rank`, `ranks` and `words`, its process group, and the bundle as `bundle`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        start = [sys.executable, "-c", _JOIN + script + _LEAVE, f"{scratch}/store"]
        running = [
            subprocess.Popen(
                [*start, str(folder), str(bundle), str(rank), str(ranks), *words], cwd="/"
            )
            for rank in range(ranks)
        ]
        try:
            assert [process.wait(timeout=TIMEOUT_S) for process in running] == [0] * ranks
        finally:
            for process in running:
                process.kill()
                process.wait()
