"""Compilers as processes, which are stopped together."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .objcache import Cancelled


@dataclass(frozen=True, slots=True)
class Run:
    """A finished process: exit code, everything it printed, wall and processor seconds, memory.

    Processor time is that of its children, too; memory is what the largest of them took.
    """

    code: int
    text: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int


class Runner:
    """Runs compilers from several threads and can stop them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._running: set[int] = set()

    def is_cancelled(self) -> bool:
        """Whether the build was given up."""
        return self._cancelled

    def cancel(self) -> None:
        """Stop every process and start no further one."""
        with self._lock:
            self._cancelled = True
            for pid in self._running:
                os.killpg(pid, signal.SIGKILL)

    def run(self, words: Sequence[str], *, cwd: Path, scratch: Path) -> Run:
        """Run to the end. Raises Cancelled if the build was given up meanwhile."""
        started = time.monotonic()
        env = os.environ | {"LC_ALL": "C", "TMPDIR": str(scratch)}
        with tempfile.TemporaryFile(dir=scratch) as output:
            with self._lock:
                if self._cancelled:
                    raise Cancelled
                # A session of its own: nvcc's many children are stopped together.
                process = subprocess.Popen(
                    words,
                    cwd=cwd,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._running.add(process.pid)
            # The process is reaped under the lock, so that cancel() never signals a reused id.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            with self._lock:
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                self._running.discard(process.pid)
                if self._cancelled:
                    raise Cancelled
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
        return Run(
            code=process.returncode,
            text=text,
            seconds=time.monotonic() - started,
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            peak_bytes=usage.ru_maxrss * 1024,
        )
