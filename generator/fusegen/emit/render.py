"""Plans to texts: one jinja environment, one frozen context per template."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.bccache
import jinja2.sandbox

from ..spec import files
from .fileset import RenderError

_MISTAKES = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
"""What an expression of a template may raise, besides jinja's own errors."""

_CONTEXT = re.compile(r"<# context: (\w+) #>\n")


class Renderer:
    """Renders templates of layered folders; a later folder may add templates, not replace them.

    Templates may come from others, so they run in jinja's sandbox: no attribute that begins with an
    underscore, nothing changed in place.

    Args:
        folders: of templates.
        compiled: where templates are kept as Python's byte code, keyed by their text; the output
            does not depend on it.  None compiles them anew every time, 9 ms each.

    Raises:
        RenderError: two folders hold a template of one name.
    """

    def __init__(self, folders: Iterable[Path], compiled: Path | None = None) -> None:
        self.folders = tuple(folders)
        self.files = _layer(self.folders)
        self._environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            loader=jinja2.FunctionLoader(self._load),
            undefined=jinja2.StrictUndefined,
            block_start_string="<%",
            block_end_string="%>",
            variable_start_string="${",
            variable_end_string="}",
            comment_start_string="<#",
            comment_end_string="#>",
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=_is_html,
            bytecode_cache=_byte_code(compiled),
        )

    def _load(self, name: str) -> str | None:
        return read(self.files[name]) if name in self.files else None

    def render(self, name: str, context: Any) -> str:
        """The template with ``c`` bound to the context, whose type its first line must name.

        Raises:
            RenderError: no such template, another context type, or a name that does not exist.
        """
        if name not in self.files:
            raise RenderError(f"there is no template {name!r}")
        declared = _CONTEXT.match(read(self.files[name]))
        kind = type(context).__name__
        if declared is None or declared[1] != kind:
            found = declared[1] if declared else "none"
            raise RenderError(f"template {name}: declares context {found}, is given {kind}")
        try:
            return self._environment.get_template(name).render(c=context)
        except jinja2.TemplateError as error:
            line = f":{error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise RenderError(f"template {name}{line}: {error.message}") from error
        except _MISTAKES as error:
            raise RenderError(f"template {name}: {type(error).__name__}: {error}") from error

    def static(self, folder: str) -> Mapping[str, str]:
        """Files below ``static/<folder>``, to be copied byte for byte, by path relative to it."""
        prefix = f"static/{folder}/"
        return {
            name.removeprefix(prefix): read(path)
            for name, path in self.files.items()
            if name.startswith(prefix)
        }


def _is_html(name: str | None) -> bool:
    """Whether what a template prints is text of HTML, which jinja escapes.

    Byte code that is kept has this in it, so nothing but the name may decide it.
    """
    return name is not None and name.endswith(".html.j2")


def _byte_code(folder: Path | None) -> jinja2.BytecodeCache | None:
    """jinja's cache in a folder; none where the folder cannot be made."""
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return _ByteCode(str(folder))


class _ByteCode(jinja2.FileSystemBytecodeCache):
    """What cannot be kept, on a full disk or in a folder of somebody else's, is compiled anew.

    Loading byte code runs it, so a file that others can have written is not loaded.
    """

    def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        """Load one template, if it was kept by this user."""
        # As super() does, but what is checked is what is read.
        with suppress(OSError), open(self._get_cache_filename(bucket), "rb") as file:
            if _is_ours(os.fstat(file.fileno())):
                bucket.load_bytecode(file)

    def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        """Keep one template."""
        with suppress(OSError):
            super().dump_bytecode(bucket)


def _is_ours(status: os.stat_result) -> bool:
    """Whether this user alone may write to a file. Windows keeps caches in the user's folder."""
    return os.name == "nt" or (status.st_uid == os.getuid() and not status.st_mode & 0o022)


@cache
def read(path: Path) -> str:
    """A template's text, read once.

    Raises:
        RenderError: it is not UTF-8.
    """
    try:
        # As read_text does: a template may have been checked out with other line ends.
        return io.StringIO(files.read(path).decode("utf-8"), newline=None).read()
    except UnicodeDecodeError as error:
        raise RenderError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8") from None


_CACHES = frozenset({"__pycache__", ".ruff_cache", ".mypy_cache", ".pytest_cache"})
"""Folders that tools leave where they look at templates."""


def _layer(folders: Iterable[Path]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise RenderError(f"{folder}: there is no such template folder")
        for path in sorted(folder.rglob("*")):
            if not path.is_file() or not _CACHES.isdisjoint(path.relative_to(folder).parts):
                continue
            name = path.relative_to(folder).as_posix()
            if name in files:
                raise RenderError(
                    f"template {name!r} is in {files[name].parent} and in {path.parent}; rename one"
                )
            files[name] = path
    return dict(sorted(files.items()))
