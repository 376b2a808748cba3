"""CUTLASS's headers, with whose GEMMs and layouts tests compare; no bundle includes one."""

from __future__ import annotations

import os
from pathlib import Path

from fusegen.build.toolchain import BuildError, package_folders

INSTALL = "pip install --no-deps nvidia-cutlass==4.2.0.0"


def cutlass_include() -> Path:
    """Of a checkout that CUTLASS_HOME names, else of the package nvidia-cutlass.

    Raises:
        BuildError: there are none; with the command that installs them.
    """
    home = os.environ.get("CUTLASS_HOME")
    roots = [Path(home)] if home else [f / "source" for f in package_folders("cutlass_library")]
    for root in roots:
        if (root / "include" / "cutlass" / "cutlass.h").is_file():
            return root / "include"
    where = f"below CUTLASS_HOME, {home}" if home else "in the package cutlass_library"
    raise BuildError(f"no CUTLASS headers {where}", remedy=INSTALL)
