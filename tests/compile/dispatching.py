"""Dispatch headers, compiled as host C++ without LibTorch and without kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from fusegen.build.toolchain import find_toolchain
from fusegen.publish.paths import builtin_templates

# In the place of the glue to LibTorch, of which dispatch headers have element types alone.
_STABLE = "#pragma once\nnamespace fusegen { enum class ScalarType { BFloat16, Half }; }\n"


def definition(function: str, arguments: str) -> str:
    """A kernel's function that says its name."""
    parameters = f"const fusegen::{arguments}&, fusegen::Stream&"
    return f'fusegen::Status {function}({parameters}) {{ return {{0, "{function}"}}; }}'


def lines_of(program: str, headers: Mapping[str, str], folder: Path) -> list[str]:
    """What a program prints that calls dispatch functions.

    Args:
        program: C++ that includes ``dispatch/<name>.h``.
        headers: their text, by name.
        folder: an empty one.
    """
    files = {f"dispatch/{name}.h": text for name, text in headers.items()}
    files |= {"fusegen/host/stable.h": _STABLE, "program.cpp": program}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    assert compiler, "this test compiles C++: install g++"
    includes = [f"-I{folder}", f"-I{builtin_templates() / 'static' / 'csrc'}"]
    includes += [f"-isystem{path}" for path in find_toolchain().cuda_include]
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", *includes]
    binary = str(folder / "program")
    subprocess.run([compiler, *flags, str(folder / "program.cpp"), "-o", binary], check=True)
    done = subprocess.run([binary], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()
