"""`vendor`: bundles in a folder of somebody's own repository."""

from __future__ import annotations

from pathlib import Path

from ..publish.publish import MUTEX_NAME
from ..publish.selection import find_bundles
from ..spec.usage import UsageError, command_line
from .generate import generate
from .report import Generated
from .request import Request

PACKAGE = '"""Modules that fusegen wrote.  This file makes the folder a package; it is yours."""\n'


def vendor(request: Request, *, verify: bool = False) -> Generated:
    """Write the bundles that a request names, and make the folder above them a package.

    Without one pytest and Python would know two copies of a bundle by the same name. A file
    `__init__.py` that is there stays as it is, and a folder that holds anything but bundles is its
    owner's to make a package of.

    Args:
        verify: check the rules of the IR after every pass.

    Raises:
        UsageError: no namespace, or nothing to make.
        Everything that `generate` does.
    """
    if request.namespace is None:
        raise UsageError(
            "--namespace: name your copy, such as acme: copies of one namespace cannot differ in "
            "one process"
        )
    if not (request.targets or request.archs or request.modules or request.recipes):
        upgrade = command_line("upgrade", request.out)
        raise UsageError(
            "say what to vendor: --target <target>, or --arch, --module and --recipe"
            + (
                f"; to bring what is there up to date: {upgrade}"
                if find_bundles(request.out)
                else ""
            )
        )
    done = generate(request, verify=verify)
    package = request.out / "__init__.py"
    if not done.refused and not package.exists() and _holds_only_bundles(request.out):
        package.write_text(PACKAGE, encoding="utf-8")
    return done


def _holds_only_bundles(folder: Path) -> bool:
    return {*folder.iterdir()} <= {*find_bundles(folder), folder / MUTEX_NAME}
