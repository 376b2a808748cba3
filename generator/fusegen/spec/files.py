"""Files that may be anything: read without waiting, resolved, and named in every error."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of the system say which file they are about; writing to a full disk does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def read(path: Path, limit: int = -1) -> bytes:
    """Content of a regular file, or as much of it as the limit says.

    Raises:
        OSError: with the path; also for a folder, a device, or a pipe, which is not waited for.
    """
    with named(path):
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "expected a regular file", str(path))
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(limit)
        finally:
            os.close(descriptor)


def resolve(path: Path) -> Path:
    """The absolute path without links; of links that go round in a circle, as it stands."""
    return Path(os.path.realpath(path))
