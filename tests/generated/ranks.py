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
shared = False  # whether all ranks have one GPU
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())
else:
    from gloo import use_one_thread
    use_one_thread()
load("bundle", bundle)
dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
"""
)
# NCCL refuses ranks of one GPU, and gloo's ops fail on it: what they send goes by way of the host.
_BY_HOST = """
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensor

shared = True


def every_of(source, *_):
    own = source.cpu().contiguous().flatten().view(torch.uint8)
    every = own.new_empty(ranks * own.numel())
    gather_on_host(every, own)
    return every.view(source.dtype).view(ranks * source.shape[0], *source.shape[1:]).to(device)


def total_of(source, op, *_):
    own = source.cpu()
    total = own.float() if own.is_floating_point() else own.clone()
    dist.all_reduce(total, getattr(dist.ReduceOp, op.upper()))
    return total.to(own.dtype).to(device)


def swapped(source, *_):
    return every_of(source).unflatten(0, (ranks, ranks, -1))[:, rank].flatten(0, 1)


gather_on_host, ops = dist.all_gather_into_tensor, torch.ops._c10d_functional
ways = {
    "all_gather_into_tensor": every_of,
    "all_reduce": total_of,
    "all_to_all_single": swapped,
    "reduce_scatter_tensor": lambda source, *how: total_of(source, *how).chunk(ranks)[rank],
    "wait_tensor": lambda value: value,
}


class ByHost:
    def __init__(self, op, way):
        self.op, self.way = op, way

    def __call__(self, first, *others):  # compilers ask for shapes alone
        return (self.op if isinstance(first, FakeTensor) else self.way)(first, *others)

    def __getattr__(self, name):  # inductor reads overloads
        return getattr(self.op, name)


for name, way in ways.items():
    setattr(ops, name, ByHost(getattr(ops, name), way))
functional.wait_tensor = ops.wait_tensor
dist.all_gather_into_tensor = lambda every, own: every.copy_(every_of(own).view(every.shape))
dist.all_to_all_single = lambda every, own: every.copy_(swapped(own).view(every.shape))
"""
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
        shared: whether all ranks have the same one, a GPU: copy engines bring what they would from
            another, all else goes by way of the host.
    """

    bundle: Path
    backend: str = "gloo"
    device: str = "cpu"
    shared: bool = False


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
    environment |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"} if place.shared else {}
    joined = _JOIN + (_BY_HOST if place.shared else "")
    given = [str(folder), str(place.bundle), place.backend, place.device]
    with tempfile.TemporaryDirectory() as scratch:
        running = [
            start(
                joined + script + _LEAVE,
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
