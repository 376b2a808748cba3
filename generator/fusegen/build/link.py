"""Linking a library, unless it was linked from the same objects."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ..spec.files import named, read
from .objcache import CachedObject
from .processes import Runner
from .sources import EXPORTS
from .toolchain import BuildError, Toolchain, dotted

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


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """What a library was linked from; lies beside it as JSON.

    Attributes:
        inputs: hash over all objects, flags and tools.
        library: hash of the library itself.
        cuda: version of the toolkit, such as "13.0"; its runtime is part of the library.
        machine: processor that it runs on, such as "x86_64".
    """

    inputs: str
    library: str
    cuda: str
    machine: str


def read_record(library: Path) -> LinkRecord | None:
    """The record of a library; None where there is none of this very library."""
    try:
        record = LinkRecord(**json.loads(read(_record_path(library))))
        return record if record.library == _sha256(library) else None
    except (OSError, ValueError, TypeError):
        return None


def _record_path(library: Path) -> Path:
    return library.with_suffix(".link.json")


def link(csrc: Path, library: Path, objects: Sequence[CachedObject], tools: Toolchain) -> bool:
    """Link the library unless it was linked from just these inputs. True if it was linked."""
    key = _link_key(csrc, objects, tools)
    found = read_record(library)
    if found is not None and found.inputs == key:
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
        record = LinkRecord(key, _sha256(staged), dotted(tools.version), platform.machine())
        os.replace(staged, library)
        _write_atomically(_record_path(library), json.dumps(asdict(record)) + "\n")
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


def _write_atomically(path: Path, text: str) -> None:
    staged = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with named(staged):
        staged.write_text(text, "utf-8")
    os.replace(staged, path)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
