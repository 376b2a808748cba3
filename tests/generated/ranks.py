"""Scripts that several ranks run together, each in a process of its own: on the CPU, or on GPUs.

Not in the process of the tests: gloo's threads would live among all else that it has started.  One
process imports PyTorch, which takes seconds, and does nothing else but fork the ranks.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .loading import LOAD

TIMEOUT_S = 300
_JOIN = (
    LOAD
    + """
import torch, torch.distributed as dist
store, folder, bundle, backend, device = sys.argv[1:6]
rank, ranks = map(int, sys.argv[6:8])
words = sys.argv[8:]
if device == "cuda":
    torch.cuda.set_device(rank)
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
# What forks: a line of JSON asks for ranks, one answers with how they ended.
_FORKING = """
import json, os, signal, sys, time, traceback, types
import torch, torch._dynamo, torch.distributed, torch.distributed.fsdp, torch.distributed.tensor


def run(asked, rank):
    if asked["said"]:
        os.dup2(os.open(f"{asked['said']}/{rank}.err", os.O_CREAT | os.O_WRONLY), 2)
    os.dup2(2, 1)  # answers go there
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir("/")
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = ["-c", *asked["given"], str(rank), str(asked["ranks"]), *asked["words"]]
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(asked["script"], "<string>", "exec"), vars(sys.modules["__main__"]))


def fork(asked, rank):
    if pid := os.fork():
        return pid
    code = 1
    try:
        run(asked, rank)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(pids, until):
    codes = {}
    while len(codes) < len(pids):
        for pid in (each for each in pids if each not in codes):
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


for line in sys.stdin:
    asked = json.loads(line)
    until = time.monotonic() + asked["timeout_s"]
    codes = ended([fork(asked, rank) for rank in range(asked["ranks"])], until)
    print(json.dumps(codes), flush=True)
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
) -> list[int]:
    """The exit codes of ranks that run a script, as `run_ranks` does.

    Args:
        said: where each rank writes its errors, as `<rank>.err`; None for where this process does.
    """
    # Multicast over NVLink needs rights that containers often lack.
    asked = {
        "script": _JOIN + script + _LEAVE,
        "environment": {**os.environ, "NCCL_NVLS_ENABLE": "0"},
        "said": None if said is None else str(said),
        "words": words,
        "ranks": ranks,
        "timeout_s": TIMEOUT_S,
    }
    with tempfile.TemporaryDirectory() as scratch:
        asked["given"] = [f"{scratch}/store", str(folder), str(place.bundle)]
        asked["given"] += [place.backend, place.device]
        forking = _forking()
        assert forking.stdin and forking.stdout
        forking.stdin.write(json.dumps(asked) + "\n")
        forking.stdin.flush()
        codes: list[int] = json.loads(forking.stdout.readline())
    return codes


@cache
def _forking() -> subprocess.Popen[str]:
    """The process that forks ranks; it ends with this one."""
    words = [sys.executable, "-c", _FORKING]
    process = subprocess.Popen(
        words, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.kill)
    return process
