"""Scripts that several ranks run together, each in a process of its own: on the CPU, or on GPUs.

Not in the process of the tests: gloo's threads would live among all else that it has started.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from forked import start

from .loading import LOAD

TIMEOUT_S = 300
EXAMPLES = Path(__file__).parents[2] / "examples"
_JOIN = (
    LOAD
    + f"sys.path.append({str(EXAMPLES)!r})"
    + """
import torch, torch.distributed as dist
store, folder, bundle, backend, device = sys.argv[1:6]
rank, ranks = map(int, sys.argv[6:8])
words = sys.argv[8:]
if device == "cuda":
    torch.cuda.set_device(rank)
else:
    from gloo import use_one_thread
    use_one_thread()
load("bundle", bundle)
dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
"""
)
# Past Python's own end: functional collectives keep their group for ever, destroyed or not, and a
# thread of gloo that frees a tensor of the last collective while Python ends aborts the process.
_LEAVE = """
dist.barrier()
if device == "cuda":
    torch.cuda.synchronize()
import os
sys.stdout.flush(), sys.stderr.flush()
os._exit(0)
"""


@dataclass(frozen=True)
class Place:
    """Where ranks run.

    Attributes:
        bundle: what they load.
        backend: of torch.distributed.
        device: the type of the devices, of which each rank has one.
    """

    bundle: Path
    backend: str = "gloo"
    device: str = "cpu"


def run_ranks(script: str, folder: Path, place: Place, *words: str, ranks: int = 2) -> None:
    """Run a script on all ranks to its end.

    It finds `folder`, `rank`, `ranks`, `words` and `device`, a type whose current device is its
    own, its process group, and the bundle as `bundle`.
    """
    codes = end_ranks(script, folder, place, *words, ranks=ranks)
    assert codes == [0] * ranks


def end_ranks(
    script: str, folder: Path, place: Place, *words: str, ranks: int = 2, said: Path | None = None
) -> list[int | None]:
    """The exit codes of ranks that run a script, as `run_ranks` does; None of one that had to be
    killed.

    Args:
        said: where each rank writes its errors, as `<rank>.err`; None for where this process does.
    """
    # Multicast over NVLink needs rights that containers often lack.
    environment = {"NCCL_NVLS_ENABLE": "0"}
    given = [str(folder), str(place.bundle), place.backend, place.device]
    with tempfile.TemporaryDirectory() as scratch:
        running = [
            start(
                _JOIN + script + _LEAVE,
                [f"{scratch}/store", *given, str(rank), str(ranks), *words],
                environment=environment,
                errors=None if said is None else said / f"{rank}.err",
            )
            for rank in range(ranks)
        ]
        try:
            for process in running:
                process.join(TIMEOUT_S)
            return [process.exitcode for process in running]
        finally:
            for process in running:
                process.kill()
                process.join()
