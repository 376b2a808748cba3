"""Scripts run as `python -c` runs them, in processes that begin with PyTorch imported.

They are forked from one that has imported it and done nothing else: to import it takes each process
seconds, and ranks are many processes.  Where there is a GPU each begins by itself: what is imported
asks for its properties, and CUDA refuses a process that is forked from one that has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

import torch

PRELOADED = [
    "torch",
    "torch.distributed._functional_collectives",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch._inductor.compile_fx",
]
_STARTS = get_context("spawn" if torch.cuda.is_available() else "forkserver")
_STARTS.set_forkserver_preload(PRELOADED)


def start(
    script: str,
    words: Sequence[str],
    *,
    environment: Mapping[str, str],
    errors: Path | None = None,
) -> BaseProcess:
    """A process that runs a script in the folder `/`, and has an exit code as Python's.

    Args:
        script: in Python.
        words: `sys.argv` without the first.
        environment: variables that it has beside those of this process.
        errors: where its errors go; None for where they go here.
    """
    process = _STARTS.Process(target=_run, args=(script, words, environment, errors))
    process.start()
    return process


def _run(
    script: str, words: Sequence[str], environment: Mapping[str, str], errors: Path | None
) -> None:
    os.environ.update(environment)
    os.chdir("/")
    if errors is not None:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), sys.stderr.fileno())
    sys.argv = ["-c", *words]
    main = sys.modules["__main__"] = ModuleType("__main__")  # where pickles look for its classes
    exec(compile(script, "<string>", "exec"), main.__dict__)
