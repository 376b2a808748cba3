"""Rendering refuses what it should, and templates only say what their context has."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import marshal
import os
import pickle
import pkgutil
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union

import jinja2
import pytest
from jinja2 import nodes

import fusegen
from fusegen.checks.load import load
from fusegen.emit.bundle import imported, render_bundle
from fusegen.emit.fileset import RenderError
from fusegen.emit.render import Renderer, _layer
from fusegen.ir.naming import Cell
from fusegen.passes.pipeline import resolve
from fusegen.publish.paths import builtin_specs, builtin_templates

FOLDER = builtin_templates()
TEMPLATES = sorted(FOLDER.rglob("*.j2"))
CONTEXT = re.compile(r"<# context: (\w+) #>\n")
LONGEST = 200
SYNTAX = jinja2.Environment(
    block_start_string="<%",
    block_end_string="%>",
    variable_start_string="${",
    variable_end_string="}",
    comment_start_string="<#",
    comment_end_string="#>",
)


def label(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix()


def dataclasses_of_the_program() -> dict[str, type[Any]]:
    """Every dataclass by name."""
    found = {}
    for info in pkgutil.walk_packages(fusegen.__path__, "fusegen."):
        if info.name.endswith(("__main__", "demo_model")):
            continue
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(value, type) and dataclasses.is_dataclass(value):
                found[value.__name__] = value
    return found


CLASSES = dataclasses_of_the_program()


# Rendering


@dataclasses.dataclass(frozen=True)
class Greeting:
    """A context of a toy template."""

    name: str
    marks: list[int] = dataclasses.field(default_factory=list)


def renderer(tmp_path: Path, text: str, compiled: Path | None = None) -> Renderer:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "hello.txt.j2").write_text(text, encoding="utf-8")
    return Renderer([tmp_path / "t"], compiled)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "full"])
def test_byte_code_that_cannot_be_kept_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    if not kept:
        monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    made = renderer(tmp_path, "<# context: Greeting #>\nhi\n", tmp_path / "compiled")
    assert made.render("hello.txt.j2", Greeting("you")) == "hi\n"
    assert any((tmp_path / "compiled").iterdir()) == kept


def plant(folder: Path, mode: int) -> None:
    """Put byte code that says something else into a cache, as somebody may who can write there."""
    code = compile(
        "name, blocks, debug_info = None, {}, ''\ndef root(context): yield 'planted'",
        "x",
        "exec",
    )
    (kept,) = folder.iterdir()
    data = kept.read_bytes()
    head = len(jinja2.bccache.bc_magic)
    source = pickle.dumps(pickle.loads(data[head:]), 2)
    assert data[head:].startswith(source)
    kept.unlink()
    kept.write_bytes(data[: head + len(source)] + marshal.dumps(code))
    kept.chmod(mode)


@pytest.mark.parametrize(("mode", "loaded"), [(0o600, True), (0o620, False), (0o602, False)])
def test_byte_code_that_others_may_write_is_not_run(
    tmp_path: Path, mode: int, loaded: bool
) -> None:
    text, folder = "<# context: Greeting #>\nhi\n", tmp_path / "compiled"
    assert renderer(tmp_path, text, folder).render("hello.txt.j2", Greeting("you")) == "hi\n"
    plant(folder, mode)
    said = Renderer([tmp_path / "t"], folder).render("hello.txt.j2", Greeting("you"))
    assert said == ("planted" if loaded else "hi\n")


def test_byte_code_of_another_user_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, folder = "<# context: Greeting #>\nhi\n", tmp_path / "compiled"
    assert renderer(tmp_path, text, folder).render("hello.txt.j2", Greeting("you")) == "hi\n"
    plant(folder, 0o600)
    user = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: user + 1)
    assert Renderer([tmp_path / "t"], folder).render("hello.txt.j2", Greeting("you")) == "hi\n"


def test_a_template_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "hello.txt.j2").write_bytes(b"<# context: Greeting #>\n\xff\n")
    with pytest.raises(RenderError, match=r"hello.txt.j2: byte 24 is not UTF-8"):
        Renderer([tmp_path / "t"]).render("hello.txt.j2", Greeting("you"))


def test_render(tmp_path: Path) -> None:
    text = "<# context: Greeting #>\n<% for c2 in [c] %>\nhello {{ {% ${ c2.name }\n<% endfor %>\n"
    assert renderer(tmp_path, text).render("hello.txt.j2", Greeting("you")) == "hello {{ {% you\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<# context: Greeting #>\n${ c.nam }\n", "hello.txt.j2.*has no attribute 'nam'"),
        ("<# context: Greeting #>\n${ d.name }\n", "hello.txt.j2.*'d' is undefined"),
        ("<# context: Greeting #>\n<% if c.x %>\n<% endif %>\n", "hello.txt.j2.*'x'"),
        ("<# context: Greeting #>\n\n<% for %>\n", "hello.txt.j2:3: "),
        ("<# context: Other #>\n", "declares context Other, is given Greeting"),
        ("hello ${ c.name }\n", "declares context none, is given Greeting"),
        ("\n<# context: Greeting #>\n", "declares context none, is given Greeting"),
        ("<# context: Greeting #>\n${ c.__class__ }\n", "access to attribute '__class__' of 'Gre"),
        ("<# context: Greeting #>\n${ c|attr('__init__') }\n", "attribute '__init__' .* is unsafe"),
        ("<# context: Greeting #>\n${ [c]|map(attribute='__doc__')|join }\n", "'__doc__'"),
        ("<# context: Greeting #>\n${ '{0.__class__}'.format(c) }\n", "access to attribute"),
        ("<# context: Greeting #>\n${ c.marks.append(1) }\n", "attribute 'append' .* is unsafe"),
        ("<# context: Greeting #>\n${ range(9999999) }\n", "OverflowError: Range too big"),
        ("<# context: Greeting #>\n${ 1 / 0 }\n", "hello.txt.j2: ZeroDivisionError"),
        ("<# context: Greeting #>\n${ c.name + 1 }\n", "hello.txt.j2: TypeError"),
    ],
)
def test_what_cannot_be_rendered_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RenderError, match=message):
        renderer(tmp_path, text).render("hello.txt.j2", Greeting("you"))


def test_what_goes_into_html_is_escaped(tmp_path: Path) -> None:
    text = "<# context: Greeting #>\n<b>${ c.name }</b>\n"
    for kind in ("html", "txt"):
        (tmp_path / f"hello.{kind}.j2").write_text(text, encoding="utf-8")
    made = Renderer([tmp_path])
    said = {kind: made.render(f"hello.{kind}.j2", Greeting("<&\"'>")) for kind in ("html", "txt")}
    assert said == {"html": "<b>&lt;&amp;&#34;&#39;&gt;</b>\n", "txt": "<b><&\"'></b>\n"}


def test_unknown_template(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match=r"there is no template 'bye.txt.j2'"):
        renderer(tmp_path, "").render("bye.txt.j2", Greeting("you"))


def test_folders_may_add_but_not_replace(tmp_path: Path) -> None:
    text = "<# context: Greeting #>\n${ c.name }\n"
    for folder, name in (("a", "one.j2"), ("b", "two.j2"), ("c", "one.j2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text, encoding="utf-8")
    both = Renderer([tmp_path / "a", tmp_path / "b"])
    assert both.render("two.j2", Greeting("you")) == "you\n"
    with pytest.raises(RenderError) as error:
        Renderer([tmp_path / "a", tmp_path / "c"])
    assert all(word in str(error.value) for word in ("one.j2", str(tmp_path / "a"), "rename one"))
    with pytest.raises(RenderError, match="there is no such template folder"):
        Renderer([tmp_path / "nowhere"])


# Rules of our templates


@pytest.mark.parametrize("path", TEMPLATES, ids=label)
def test_the_first_line_names_a_context_that_exists(path: Path) -> None:
    declared = CONTEXT.match(path.read_text(encoding="utf-8"))
    assert declared, f"{label(path)}: write <# context: Class #> into the first line"
    assert declared[1] in CLASSES


@pytest.mark.parametrize("path", TEMPLATES, ids=label)
def test_a_template_is_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST, f"{label(path)} has {lines} lines; split it"


@pytest.mark.parametrize("path", TEMPLATES, ids=label)
def test_device_code_stands_in_static_files(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\basm\b|__global__|__shared__", text)


@pytest.mark.parametrize("path", TEMPLATES, ids=label)
def test_branches_look_at_one_field(path: Path) -> None:
    """Loop and branch on named fields; conditions are decided where the context is made."""
    tree = SYNTAX.parse(path.read_text(encoding="utf-8"))
    tests = [branch.test for branch in tree.find_all(nodes.If)]
    tests += [branch.test for branch in tree.find_all(nodes.CondExpr)]
    for test in tests:
        field = test.node if isinstance(test, nodes.Not) else test
        assert isinstance(field, nodes.Getattr | nodes.Name), f"{label(path)}:{test.lineno}"
    for loop in tree.find_all(nodes.For):
        items = loop.iter.items if isinstance(loop.iter, nodes.Tuple) else [loop.iter]
        fields = all(isinstance(item, nodes.Getattr | nodes.Name) for item in items)
        assert fields and loop.test is None, f"{label(path)}:{loop.lineno}"
    computed = (nodes.Add, nodes.Sub, nodes.Mul, nodes.And, nodes.Or, nodes.Compare, nodes.Call)
    assert not list(tree.find_all(computed)), label(path)


@pytest.mark.parametrize("path", TEMPLATES, ids=label)
def test_every_attribute_exists(path: Path) -> None:
    """Follow ``c.rows`` and ``row.name`` through the annotations of the context classes."""
    text = path.read_text(encoding="utf-8")
    declared = CONTEXT.match(text)
    assert declared
    known = {"c": CLASSES[declared[1]], **_set_for(path)}
    wrong = list(_wrong(SYNTAX.parse(text), known))
    assert not wrong, f"{label(path)}: {', '.join(wrong)}"


OF_EVERY_KIND = (
    "grouped_linear",
    "grouped_mlp",
    "linear",
    "quantize",
    "rms_norm_linear",
    "scaled_swiglu",
    "silu",
    "swiglu",
)
"""Modules, one of those that differ in their activation."""
ADDING_FILES = ("debug", "reduced_amax", "scaled_bias")
"""Options with templates or kernels of their own."""
NUMERICS = Path(__file__).parents[1] / "numerics" / "specs"
DECODED = "fp8_free_1x64"
"""A recipe that no matrix instruction reads."""
INCLUDE = re.compile(r'<% include "(.+)" %>')


@pytest.mark.parametrize("cache", [".ruff_cache", "__pycache__"])
def test_what_tools_leave_beside_templates_is_none(tmp_path: Path, cache: str) -> None:
    (tmp_path / "static" / cache).mkdir(parents=True)
    (tmp_path / "static" / cache / "entry").write_text("")
    (tmp_path / "static" / "file.py").write_text("")
    assert [*_layer([tmp_path])] == ["static/file.py"]


@pytest.mark.slow
def test_every_template_and_static_file_is_used() -> None:
    """Rendering modules of every kind for all archs reads every template and copies every file."""
    used: set[str] = set()

    class Recorder(Renderer):
        def render(self, name: str, context: Any) -> str:
            self.read(name)
            return super().render(name, context)

        def read(self, name: str) -> None:
            used.add(name)
            for included in INCLUDE.findall(self.files[name].read_text(encoding="utf-8")):
                self.read(included)

        def static(self, folder: str) -> Any:
            found = super().static(folder)
            used.update(f"static/{folder}/{name}" for name in found)
            return found

    recorder = Recorder([FOLDER])
    specs, recipes = load([builtin_specs(), NUMERICS]), load([builtin_specs()]).recipes
    cells = [Cell(module, recipe) for module in OF_EVERY_KIND for recipe in recipes]
    cells += [Cell("grouped_linear", r, (o,)) for r in recipes for o in ADDING_FILES]
    cells += [Cell("linear", DECODED), *(Cell("moe_layer", r) for r in ("bf16", "fp8_delayed"))]
    for name, arch in specs.archs.items():
        plans = resolve(specs, name, cells).modules
        render_bundle(plans, arch, f"fusegen_{name}", recorder)
    recorder.read("report/page.html.j2")  # tests/unit/test_report.py renders it
    recorder.read("bundle/_devices.py.j2")  # tests/unit/test_fat.py renders it
    files = {label(path) for path in FOLDER.rglob("*") if path.is_file()}
    assert {name for name in files if "__pycache__" not in name} == used


def _set_for(path: Path) -> dict[str, None]:
    """Names that the templates which include one set for it."""
    texts = [each.read_text(encoding="utf-8") for each in TEMPLATES]
    trees = [SYNTAX.parse(text) for text in texts if label(path) in INCLUDE.findall(text)]
    return {node.target.name: None for tree in trees for node in tree.find_all(nodes.Assign)}


def _wrong(node: nodes.Node, types_of: dict[str, Any]) -> Iterator[str]:
    """Attribute paths below a node that the annotations do not have."""
    if isinstance(node, nodes.For):
        yield from _wrong(node.iter, types_of)
        item = _iterated(node.iter, types_of)
        inner = {**types_of, "loop": None, **_targets(node.target, item)}
        for child in (*node.body, *node.else_):
            yield from _wrong(child, inner)
        return
    if isinstance(node, nodes.Getattr):
        owner = _type(node.node, types_of)
        if owner is not None and _attribute(owner, node.attr) is MISSING:
            yield f"{getattr(owner, '__name__', owner)} has no {node.attr} (line {node.lineno})"
    if isinstance(node, nodes.Name) and node.ctx == "load" and node.name not in types_of:
        yield f"unknown name {node.name} (line {node.lineno})"
    for child in node.iter_child_nodes():
        yield from _wrong(child, types_of)


MISSING = object()


def _type(node: nodes.Node, types_of: dict[str, Any]) -> Any:
    """The type of an expression, None where it is not known."""
    if isinstance(node, nodes.Name):
        return types_of.get(node.name)
    if isinstance(node, nodes.Getattr):
        owner = _type(node.node, types_of)
        found = None if owner is None else _attribute(owner, node.attr)
        return None if found is MISSING else found
    return None


def _attribute(owner: Any, name: str) -> Any:
    """The type of an attribute of a type, MISSING where there is none."""
    owner = _plain(owner)
    if dataclasses.is_dataclass(owner):
        hints = typing.get_type_hints(owner)
        if name in hints:
            return hints[name]
    member = getattr(owner, name, MISSING)
    if member is MISSING:
        return MISSING
    if isinstance(member, property) and member.fget:
        return typing.get_type_hints(member.fget).get("return")
    return None


def _plain(hint: Any) -> Any:
    """An annotation without ``| None``."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        inner = [each for each in typing.get_args(hint) if each is not type(None)]
        return inner[0] if len(inner) == 1 else None
    return hint


def _element(hint: Any) -> Any:
    """What iterating over an annotated value gives."""
    arguments = typing.get_args(_plain(hint))
    return arguments[0] if arguments else None


def _iterated(node: nodes.Node, types_of: dict[str, Any]) -> Any:
    """What one round of a loop gets; a tuple of fields has the type of its first."""
    if isinstance(node, nodes.Tuple):
        return _type(node.items[0], types_of)
    return _element(_type(node, types_of))


def _targets(target: nodes.Node, item: Any) -> dict[str, Any]:
    if isinstance(target, nodes.Name):
        return {target.name: item}
    assert isinstance(target, nodes.Tuple)
    parts = typing.get_args(item) or (None,) * len(target.items)
    names = [part.name for part in target.items if isinstance(part, nodes.Name)]
    return dict(zip(names, parts, strict=True))


def test_the_walk_finds_what_is_wrong() -> None:
    text = "${ c.name }<% for x in c.nothing %>${ x.y }<% endfor %>${ z }"
    assert list(_wrong(SYNTAX.parse(text), {"c": Greeting})) == [
        "Greeting has no nothing (line 1)",
        "unknown name z (line 1)",
    ]


@pytest.mark.parametrize("folder", ["integrations", "reference", "runtime", "sharding"])
def test_imports_of_static_files_are_found(folder: str) -> None:
    """What a bundle has of a folder is what its files import, or it could not be imported."""
    for path, text in Renderer([FOLDER]).static(folder).items():
        if not path.endswith(".py"):
            continue
        neighbours = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ImportFrom) and node.level
        ]
        names = {n for node in neighbours for n in ([node.module] if node.module else _names(node))}
        assert names == {*imported(text)}, path


def _names(node: ast.ImportFrom) -> list[str]:
    return [alias.name for alias in node.names]
