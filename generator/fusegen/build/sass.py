"""Machine instructions of compiled kernels, by NVIDIA's disassembler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from .toolchain import BuildError, package_folders

INSTALL_CUOBJDUMP: Final = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"

# An instruction stands behind its address, and behind the predicate that it has, if any.
_OPCODE: Final = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


def opcodes(binary: Path, kernels: Collection[str]) -> dict[str, frozenset[str]]:
    """Opcodes of kernels with their modifiers, such as ``HMMA.16816.F32``, by the kernel's name.

    Args:
        binary: an object or a library.
        kernels: mangled names; those that the binary lacks are left out. Code of others is not
            disassembled, unless it lies in one part with theirs.

    Raises:
        BuildError: there is no disassembler, or it fails.
    """
    wanted = {name.encode() for name in kernels}
    found: dict[str, frozenset[str]] = {}
    with tempfile.TemporaryDirectory(prefix="fusegen-") as folder:
        cuobjdump(Path(folder), "--extract-elf", "all", str(binary.resolve()))
        for part in sorted(Path(folder).glob("*.cubin")):
            code = part.read_bytes()
            if any(name in code for name in wanted):
                found |= functions(cuobjdump(part.parent, "--dump-sass", part.name))
    return {name: found[name] for name in kernels if name in found}


def functions(listing: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Opcodes by function, of what the disassembler prints."""
    for block in listing.split("Function : ")[1:]:
        name, _, body = block.partition("\n")
        yield name.strip(), frozenset(_OPCODE.findall(body))


def cuobjdump(folder: Path, *words: str) -> str:
    """What the disassembler prints that runs in a folder: the one on PATH, or of the package.

    Raises:
        BuildError: there is none, or it fails.
    """
    environment = _with_packages(os.environ)
    program = shutil.which("cuobjdump", path=environment["PATH"])
    if program is None:
        raise BuildError("cuobjdump was not found: PATH has none", remedy=INSTALL_CUOBJDUMP)
    done = subprocess.run(
        [program, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BuildError(f"cuobjdump {' '.join(words)} failed:\n{done.stderr}")
    return done.stdout


def _with_packages(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with the programs of packages behind PATH: cuobjdump looks for nvdisasm."""
    binaries = [
        str(place)
        for folder in package_folders("nvidia")
        for place in sorted(folder.glob("*/bin"), reverse=True)
    ]
    return {**env, "PATH": os.pathsep.join((env.get("PATH", ""), *binaries))}
