"""Find what a build needs: nvcc, a host C++ compiler and an installed PyTorch.

Nothing here imports torch or loads CUDA: packages are located by their import spec alone, so that
a build works on a machine without a GPU and with a CPU-only PyTorch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

INSTALL_CUDA: Final = 'pip install "cuda-toolkit[nvcc,cudart,cccl,crt,nvvm,nvtx]==13.0.2"'
INSTALL_TORCH: Final = "pip install torch"
INSTALL_HOST_COMPILER: Final = "apt-get install g++"

SYSTEM_ROOT: Final = Path("/usr/local/cuda")
SYSTEM_HOST_COMPILER: Final = Path("/usr/bin/g++")

# The stable ABI carries the E8M0 and E2M1 dtypes from this release on.
MIN_TORCH: Final = (2, 11)

# The first nvcc that compiles the instructions each architecture's kernels use. sm_90a itself came
# with 12.0, but its wgmma and bulk-copy code is only reliable from 12.3 on.
MIN_NVCC: Final[Mapping[str, tuple[int, int]]] = {
    "sm_80": (11, 4),
    "sm_86": (11, 4),
    "sm_89": (11, 8),
    "sm_90": (12, 0),
    "sm_90a": (12, 3),
    "sm_100a": (12, 8),
    "sm_103a": (12, 9),
    "sm_120a": (12, 8),
}


class BuildError(Exception):
    """A build that cannot go on: what is wrong and, where one exists, the command that helps."""

    def __init__(self, what: str, *, remedy: str = "") -> None:
        super().__init__(f"{what}\n  run: {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy


class Origin(Enum):
    """Where nvcc was found, in the order of search."""

    CUDA_HOME = "CUDA_HOME"
    CUDA_PATH = "CUDA_PATH"
    PATH = "PATH"
    SYSTEM = "/usr/local/cuda"
    PIP = "the pip package cuda-toolkit"


@dataclass(frozen=True, slots=True)
class Torch:
    """An installed PyTorch, read from its files and never imported."""

    version: str
    include: Path
    library: Path


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Every outside program and folder of a build.

    `identity` is the text by which cached objects know their compilers: versions, and no path.
    """

    origin: Origin
    nvcc: Path
    version: tuple[int, int]
    host_compiler: Path
    identity: str
    cuda_include: tuple[Path, ...]
    cuda_library: Path
    torch: Torch

    def describe(self) -> str:
        """One line for people: which compilers and which PyTorch a build uses."""
        return (
            f"nvcc {dotted(self.version)} from {self.origin.value} ({self.nvcc}), "
            f"host compiler {self.host_compiler}, torch {self.torch.version}"
        )

    def require(self, code: str) -> None:
        """Refuse an nvcc that is too old for `code`, such as "sm_90a".

        An architecture without an entry in MIN_NVCC is left to nvcc, which names those it knows.
        """
        least = MIN_NVCC.get(code)
        if least is not None and self.version < least:
            raise BuildError(
                f"{code} needs nvcc {dotted(least)} or newer, but nvcc {dotted(self.version)} "
                f"was found through {self.origin.value} ({self.nvcc})",
                remedy=f"{INSTALL_CUDA}, and unset CUDA_HOME, CUDA_PATH or the older nvcc on PATH",
            )


def find_toolchain(env: Mapping[str, str] | None = None) -> Toolchain:
    """Locate everything a build needs; raise BuildError naming the first piece that is missing.

    Args:
        env: the variables to obey (CUDA_HOME, CUDA_PATH, PATH, CXX); the process
            environment by default.
    """
    env = os.environ if env is None else env
    host = _find_host_compiler(env)
    origin, nvcc = _find_nvcc(env)
    banner = _output(nvcc, "--version")
    include, library = _cuda_folders(nvcc, host)
    return Toolchain(
        origin=origin,
        nvcc=nvcc,
        version=_nvcc_version(nvcc, banner),
        host_compiler=host,
        identity="\n".join((banner, _output(host, "--version"), _output(host, "-dumpmachine"))),
        cuda_include=include,
        cuda_library=library,
        torch=_find_torch(),
    )


def missing_tools(code: str, env: Mapping[str, str] | None = None) -> tuple[BuildError, ...]:
    """Everything that keeps bundles for `code`, such as "sm_90a", from being built; often nothing.

    Args:
        env: see `find_toolchain`.
    """
    env = os.environ if env is None else env
    found: list[BuildError] = []
    pieces: tuple[Callable[[], object], ...] = (
        lambda: _find_host_compiler(env),
        lambda: _find_nvcc(env),
        _find_torch,
    )
    for find in pieces:
        try:
            find()
        except BuildError as error:
            found.append(error)
    if found:
        return tuple(found)
    try:
        find_toolchain(env).require(code)
    except BuildError as error:
        return (error,)
    return ()


def dotted(version: tuple[int, ...]) -> str:
    """A version as people write it."""
    return ".".join(str(part) for part in version)


def _output(program: Path, *arguments: str) -> str:
    """What `program` prints on both streams; a program that cannot run is a BuildError."""
    try:
        done = subprocess.run(
            [str(program), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except OSError as error:
        raise BuildError(f"{program} cannot be run: {error}") from error
    if done.returncode != 0:
        command = shlex.join([str(program), *arguments])
        raise BuildError(f"`{command}` failed with exit code {done.returncode}:\n{done.stdout}")
    return done.stdout.strip()


def _which(name: str, env: Mapping[str, str]) -> Path | None:
    found = shutil.which(name, path=env.get("PATH", ""))
    return Path(found) if found else None


def package_folders(name: str) -> tuple[Path, ...]:
    """The folders of an importable top-level package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        return ()
    return tuple(Path(folder) for folder in spec.submodule_search_locations)


def _find_nvcc(env: Mapping[str, str]) -> tuple[Origin, Path]:
    for origin in (Origin.CUDA_HOME, Origin.CUDA_PATH):
        root = env.get(origin.value)
        if root:
            nvcc = Path(root) / "bin" / "nvcc"
            if not nvcc.is_file():
                # What is named explicitly is never passed over in silence for some other toolkit.
                raise BuildError(
                    f"{origin.value} is {root}, but {nvcc} does not exist; "
                    f"unset {origin.value} or point it at a CUDA toolkit with nvcc",
                    remedy=INSTALL_CUDA,
                )
            return origin, nvcc
    for origin, candidate in _nvcc_candidates(env):
        if candidate.is_file():
            return origin, candidate
    raise BuildError(
        f"nvcc was not found: CUDA_HOME and CUDA_PATH are not set, PATH and {SYSTEM_ROOT} have "
        "none, and the pip package cuda-toolkit is not installed",
        remedy=INSTALL_CUDA,
    )


def _nvcc_candidates(env: Mapping[str, str]) -> Iterator[tuple[Origin, Path]]:
    on_path = _which("nvcc", env)
    if on_path is not None:
        yield Origin.PATH, on_path
    yield Origin.SYSTEM, SYSTEM_ROOT / "bin" / "nvcc"
    for folder in package_folders("nvidia"):
        for root in sorted(folder.glob("cu[0-9]*"), reverse=True):
            yield Origin.PIP, root / "bin" / "nvcc"


def _nvcc_version(nvcc: Path, banner: str) -> tuple[int, int]:
    match = re.search(r"release (\d+)\.(\d+)", banner)
    if match is None:
        raise BuildError(f"{nvcc} --version names no release, but printed:\n{banner}")
    return int(match[1]), int(match[2])


def _find_host_compiler(env: Mapping[str, str]) -> Path:
    command = env.get("CXX")
    if command:
        found = _which(command, env)
        if found is None:
            raise BuildError(
                f"CXX is {command}, but no such program exists; unset CXX or name a C++17 compiler",
                remedy=INSTALL_HOST_COMPILER,
            )
        return found
    # The system's own compiler first: one whose libstdc++ is linked statically builds libraries
    # that crash inside a Python process at the first integer written to a stream.
    if SYSTEM_HOST_COMPILER.is_file():
        return SYSTEM_HOST_COMPILER
    found = _which("g++", env)
    if found is None:
        raise BuildError(
            f"no C++ compiler was found: CXX is not set, {SYSTEM_HOST_COMPILER} does not exist "
            "and PATH has no g++",
            remedy=INSTALL_HOST_COMPILER,
        )
    return found


def _cuda_folders(nvcc: Path, host: Path) -> tuple[tuple[Path, ...], Path]:
    """The toolkit's header folders and the folder of its static runtime.

    nvcc is asked for them: it may be a wrapper script far from its toolkit, and toolkits from an
    installer, from pip and from conda arrange their folders in three ways.
    """
    said = _output(nvcc, "--dryrun", "-ccbin", str(host), "-x", "cu", "-c", os.devnull)
    folders = [
        Path(word.removeprefix("-I").removeprefix("-L"))
        for line in said.splitlines()
        if re.match(r"#\$ (INCLUDES|LIBRARIES|TOP)=", line)
        for word in shlex.split(line.split("=", 1)[1])
    ]
    roots = [folder.parent for folder in folders] + folders
    headers = [*folders, *(root / "include" for root in roots)]
    libraries = [*folders, *(root / name for root in roots for name in ("lib64", "lib"))]
    include = _folder_with("cuda_runtime_api.h", headers, nvcc, "headers")
    library = _folder_with("libcudart_static.a", libraries, nvcc, "static runtime")
    # From 13.0 on libcu++, which cuda_fp8.h includes, has a folder of its own.
    cccl = include / "cccl"
    return ((include, cccl) if cccl.is_dir() else (include,)), library


def _folder_with(name: str, folders: list[Path], nvcc: Path, what: str) -> Path:
    for folder in folders:
        if (folder / name).is_file():
            return folder.resolve()
    raise BuildError(
        f"the CUDA toolkit of {nvcc} has no {what} ({name} was not found)", remedy=INSTALL_CUDA
    )


def _find_torch() -> Torch:
    for folder in package_folders("torch"):
        include, library = folder / "include", folder / "lib"
        if (include / "torch/csrc/stable/library.h").is_file() and library.is_dir():
            version = _torch_version(folder / "version.py")
            if _release(version) < MIN_TORCH:
                raise BuildError(
                    f"torch {dotted(MIN_TORCH)} or newer is needed for its stable ABI, "
                    f"but torch {version} is installed in {folder}",
                    remedy='pip install --upgrade "torch>=2.11"',
                )
            return Torch(version=version, include=include, library=library)
        raise BuildError(
            f"the torch in {folder} has no headers of the stable ABI "
            f"({include / 'torch/csrc/stable/library.h'} was not found)",
            remedy='pip install --upgrade "torch>=2.11"',
        )
    raise BuildError("torch is not installed in this environment", remedy=INSTALL_TORCH)


def _torch_version(path: Path) -> str:
    match = re.search(r"^__version__ = ['\"]([^'\"]+)['\"]", path.read_text("utf-8"), re.MULTILINE)
    if match is None:
        raise BuildError(f"{path} states no __version__", remedy=INSTALL_TORCH)
    return match[1]


def _release(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
