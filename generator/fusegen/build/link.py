"""Linking a library, unless it was linked from the same objects."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..spec.files import named, read
from .objcache import CachedObject
from .processes import Runner
from .sources import EXPORTS
from .toolchain import BuildError, Toolchain

LINK_FLAGS: Final = (
    "-shared",
    "-Wl,--version-script=exports.map",
    "-Wl,--exclude-libs,ALL",
    "-Wl,--no-undefined",
    # The linker would drop libtorch, which nothing names: but it is libtorch that pulls in the
    # CUDA half of PyTorch, where the weak symbols of stable.h are found.
    "-Wl,--no-as-needed",
)
LINK_LIBRARIES: Final = ("-ltorch", "-ltorch_cpu", "-lc10", "-lcudart_static")
# What the static CUDA runtime itself needs.
SYSTEM_LIBRARIES: Final = ("-Wl,--as-needed", "-lpthread", "-ldl", "-lrt")


def link(csrc: Path, library: Path, objects: Sequence[CachedObject], tools: Toolchain) -> bool:
    """Link the library unless it was linked from just these inputs. True if it was linked."""
    record = library.with_suffix(".link.json")
    key = _link_key(csrc, objects, tools)
    if _is_current(library, record, key):
        return False
    library.parent.mkdir(exist_ok=True)
    staged = library.with_name(f"{library.name}.{os.getpid()}.tmp")
    words = (
        *(str(tools.host_compiler), *LINK_FLAGS, "-o", str(staged.resolve())),
        *(str(item.path) for item in objects),
        *(f"-L{tools.torch.library}", f"-L{tools.cuda_library}"),
        *(*LINK_LIBRARIES, *SYSTEM_LIBRARIES),
    )
    runner = Runner()
    try:
        run = runner.run(words, cwd=csrc, scratch=objects[0].path.parent)
        if run.code != 0:
            raise BuildError(
                f"{library} does not link (exit code {run.code}):\n{run.text}\n{shlex.join(words)}"
            )
        said = {"inputs": key, "library": _sha256(staged)}
        os.replace(staged, library)
        _write_atomically(record, json.dumps(said) + "\n")
    except BaseException:
        runner.cancel()
        raise
    finally:
        staged.unlink(missing_ok=True)
    return True


def _link_key(csrc: Path, objects: Sequence[CachedObject], tools: Toolchain) -> str:
    parts = (
        *(item.sha256 for item in objects),
        *(*LINK_FLAGS, *LINK_LIBRARIES, *SYSTEM_LIBRARIES),
        tools.identity,
        _sha256(csrc / EXPORTS),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _is_current(library: Path, record: Path, key: str) -> bool:
    try:
        said = json.loads(read(record))
        return bool(said["inputs"] == key and said["library"] == _sha256(library))
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _write_atomically(path: Path, text: str) -> None:
    staged = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with named(staged):
        staged.write_text(text, "utf-8")
    os.replace(staged, path)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
