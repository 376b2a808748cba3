"""Where the built-in specs and templates are: inside the wheel, or at the root of a checkout."""

from __future__ import annotations

from pathlib import Path

from ..spec.files import resolve

PACKAGE = Path(__file__).resolve().parents[1]
_CHECKOUT = PACKAGE.parents[1]

SPECS = "specs"
TEMPLATES = "templates"


class InstallationError(RuntimeError):
    """The installed fusegen lacks its own data; the message names the places and the remedy."""


def builtin_specs() -> Path:
    """The folder of the specs that come with fusegen.

    Raises:
        InstallationError: there is none.
    """
    return _builtin(SPECS)


def builtin_templates() -> Path:
    """The folder of the templates that come with fusegen.

    Raises:
        InstallationError: there is none.
    """
    return _builtin(TEMPLATES)


def _builtin(name: str) -> Path:
    places = (PACKAGE / "_data" / name, _CHECKOUT / name)
    for place in places:
        if place.is_dir():
            return place
    raise InstallationError(
        f"fusegen is installed without its {name}: neither {places[0]} nor {places[1]} exists; "
        "install it again: pip install --force-reinstall fusegen"
    )


def checkout() -> Path | None:
    """The root of the checkout this program runs from, or None where it runs from a wheel."""
    packed = (PACKAGE / "_data").is_dir()
    return None if packed or not (_CHECKOUT / SPECS).is_dir() else _CHECKOUT


def inside_checkout(folder: Path) -> bool:
    """Whether a folder lies in the checkout this program runs from."""
    root = checkout()
    return root is not None and resolve(folder).is_relative_to(root)
