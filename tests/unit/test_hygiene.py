"""Names of specs are theirs to choose: any that loads generates the same numbers."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from plans import SPECS, stand_for_others

from fusegen.checks.load import load
from fusegen.checks.names import (
    CONSTRUCTOR_KEYWORDS,
    FILE_WORDS,
    MODULE_ATTRIBUTES,
    taken_by_class,
)
from fusegen.emit.bundle import render_bundle
from fusegen.emit.fileset import ArtifactKind, FileSet, RenderError
from fusegen.emit.hygiene import settle
from fusegen.emit.polish import polish
from fusegen.emit.render import Renderer
from fusegen.ir.names import MARK
from fusegen.ir.naming import Cell
from fusegen.passes.pipeline import resolve
from fusegen.publish.paths import builtin_specs, builtin_templates
from fusegen.spec.diagnostics import SpecError
from fusegen.spec.load import SpecSet

RENDERER = Renderer([builtin_templates()])
NUMBERS = itertools.count()

Renaming = Mapping[str, str]


def renamed_op(op: dict[str, Any], names: Renaming) -> dict[str, Any]:
    """An op with other names for symbols, keywords, tensors, halves and scalars."""

    def new(name: str) -> str:
        if name in names:
            return names[name]
        return f"d{names[name[1:]]}" if name[:1] == "d" and name[1:] in names else name

    def text(value: str) -> str:
        return re.sub(r"[A-Za-z]\w*", lambda m: new(m[0]), value)

    def tensor(spec: dict[str, Any]) -> dict[str, Any]:
        shape = [text(dim) if isinstance(dim, str) else dim for dim in spec["shape"]]
        changed = {**spec, "shape": shape}
        if "halves" in spec:
            changed["halves"] = [new(name) for name in spec["halves"]]
        if "init_if" in spec:
            changed["init_if"] = {new(name): init for name, init in spec["init_if"].items()}
        return changed

    changed = dict(op)
    changed["dims"] = {new(symbol): new(word) for symbol, word in op["dims"].items()}
    for section in ("inputs", "outputs", "parameters", "internal"):
        if isinstance(named := op.get(section), list):  # a module's outputs
            changed[section] = list(map(new, named))
        elif named is not None:
            changed[section] = {new(name): tensor(spec) for name, spec in named.items()}
    if "attributes" in op:
        changed["attributes"] = {new(name): spec for name, spec in op["attributes"].items()}
    if "pointwise" in op:
        changed["pointwise"] = {new(name): text(line) for name, line in op["pointwise"].items()}
    for section in ("forward", "backward"):
        if section in op:
            changed[section] = [
                {slot: v if slot in ("step", "kind") else new(v) for slot, v in step.items()}
                for step in op[section]
            ]
    return changed


def renamed_module(module: dict[str, Any], names: Renaming) -> dict[str, Any]:
    """A module in the names of its renamed ops, and with other names of its own."""
    changed = renamed_op({"dims": {}, **module}, names) if "chain" in module else dict(module)
    if "chain" in module:
        changed["chain"] = [renamed_item(item, names) for item in module["chain"]]
    if "variants" in module:
        changed["variants"] = {
            name: renamed_variant(variant, names) for name, variant in module["variants"].items()
        }
    if "attributes" in module:
        changed["attributes"] = {names.get(k, k): v for k, v in module["attributes"].items()}
    return changed


def renamed_variant(variant: dict[str, Any], names: Renaming) -> dict[str, Any]:
    """What a variant says otherwise, of items or of an op's attributes."""
    changed = dict(variant)
    if "chain" in variant:
        changed["chain"] = renamed_items(variant["chain"], names)
    if "attributes" in variant:
        changed["attributes"] = {names.get(k, k): v for k, v in variant["attributes"].items()}
    return changed


def renamed_items(items: dict[str, Any], names: Renaming) -> dict[str, Any]:
    """What a variant says otherwise, by the items it says it of."""
    return {names.get(name, name): renamed_item(item, names) for name, item in items.items()}


def renamed_item(item: dict[str, Any], names: Renaming) -> dict[str, Any]:
    changed = dict(item)
    for key in ("as", "out"):
        given = item.get(key)
        if isinstance(given, dict):
            changed[key] = {names.get(k, k): names.get(v, v) for k, v in given.items()}
        elif key in item:
            changed[key] = names.get(given, given)
    if "with" in item:
        changed["with"] = {names.get(k, k): names.get(v, v) for k, v in item["with"].items()}
    if "attributes" in item:
        changed["attributes"] = {names.get(k, k): v for k, v in item["attributes"].items()}
    if "dims" in item:
        changed["dims"] = {
            names.get(symbol, symbol): re.sub(
                r"[A-Za-z]\w*", lambda m: names.get(m[0], m[0]), str(expr)
            )
            for symbol, expr in item["dims"].items()
        }
    return changed


def contents(kind: str) -> dict[str, dict[str, Any]]:
    folder = builtin_specs() / kind
    return {p.stem: yaml.safe_load(p.read_text("utf-8")) for p in sorted(folder.glob("*.yaml"))}


def used_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Every name and every symbol of the built-in ops and modules."""
    names: dict[str, None] = {}
    for spec in (*contents("ops").values(), *contents("modules").values()):
        for section in ("inputs", "outputs", "parameters", "internal", "attributes", "dims"):
            names |= dict.fromkeys(spec.get(section, ()))
        names |= dict.fromkeys(spec.get("dims", {}).values())
        for tensor in spec.get("inputs", {}).values():
            names |= dict.fromkeys(tensor.get("halves", ()))
        for item in spec.get("chain", ()):
            own = [item[key] for key in ("as", "out") if key in item]
            given = (each.values() if isinstance(each, dict) else (each,) for each in own)
            names |= dict.fromkeys(name for each in given for name in each)
    return (
        tuple(name for name in names if name[0].islower()),
        tuple(name for name in names if name[0].isupper()),
    )


NAMES, SYMBOLS = used_names()


def write(folder: Path, names: Renaming) -> SpecSet:
    """All specs with other names, loaded and so validated."""
    for kind in ("recipes", "archs", "fusions", "targets"):
        (folder / kind).mkdir(parents=True)
        for path in (builtin_specs() / kind).glob("*.yaml"):
            (folder / kind / path.name).write_bytes(path.read_bytes())
    for kind, rename in (("ops", renamed_op), ("modules", renamed_module)):
        (folder / kind).mkdir()
        for name, content in contents(kind).items():
            text = yaml.safe_dump(rename(content, names), sort_keys=False)
            (folder / kind / f"{name}.yaml").write_text(text, encoding="utf-8")
    return load([folder])


def bundle(specs: SpecSet, arch: str, cells: list[Cell], namespace: str) -> FileSet:
    plans = resolve(specs, arch, cells).modules
    assert [plan.cell for plan in plans] == sorted(map(str, cells))
    return polish(render_bundle(plans, specs.archs[arch], namespace, RENDERER))


def place(files: FileSet, folder: Path) -> str:
    """A bundle's Python in an importable folder; the package's name."""
    name = f"bundle_{next(NUMBERS)}"
    for path, artifact in files.items():
        if path.endswith(".py"):
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_bytes(artifact.data)
    return name


def numbers(package: str, cell: Cell) -> list[torch.Tensor | None]:
    """What a module gives for the inputs of its generated tests, in the order of its plan."""
    tests: ModuleType = importlib.import_module(f"{package}.tests.test_{cell}")
    tensors = tests.make_inputs(torch.bfloat16, "cpu")
    y, gradients = tests.run(tensors, tests.make_dy(tensors))
    return [y, *gradients.values()]


RECIPES = ("bf16", "fp8_delayed")
CELLS = [
    Cell("scaled_clamped_qgeglu", "bf16"),
    Cell("grouped_mlp", "fp8_delayed"),
    Cell("grouped_linear", "nvfp4", ("delayed_wgrad",)),
    Cell("grouped_linear", "bf16", ("add_to_main_grad",)),
    Cell("grouped_linear", "fp8_block", ("cached_weights",)),
    Cell("quantize", "fp8_delayed"),
]
RUNNING = [cell for cell in CELLS if cell.module != "quantize"]


@cache
def words_of_text() -> tuple[list[str], list[str]]:
    """Every word of the cells' generated files that a spec may use: names, and symbols."""
    words: set[str] = set()
    for arch in ("cpu", "sm_90a"):
        for path, artifact in bundle(SPECS, arch, CELLS, "words").items():
            if "__" in path or "/kernels/" in path:
                words |= set(re.findall(r"\w+", artifact.text))
    names = [w for w in words if re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", w) and len(w) <= 24]
    symbols = [w for w in words if re.fullmatch(r"[A-Z][A-Za-z0-9]{0,7}", w)]
    return (
        sorted(w for w in names if not taken_by_class(w) and w not in CONSTRUCTOR_KEYWORDS),
        sorted({*symbols, "NULL", "EOF", "B0"} - {"I", "O", "None", "True", "False"}),
    )


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("packages")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def expected(packages: Path) -> dict[Cell, list[torch.Tensor | None]]:
    package = place(bundle(SPECS, "cpu", CELLS, "expected"), packages)
    return {cell: numbers(package, cell) for cell in RUNNING}


@pytest.mark.slow
@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),  # an example takes seconds: to find a smaller one takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    words=st.lists(
        st.deferred(lambda: st.sampled_from(words_of_text()[0])),
        min_size=len(NAMES),
        max_size=len(NAMES),
        unique=True,
    ),
    capitals=st.lists(
        st.deferred(lambda: st.sampled_from(words_of_text()[1])),
        min_size=len(SYMBOLS),
        max_size=len(SYMBOLS),
        unique=True,
    ),
)
def test_words_of_the_text_are_names_like_others(
    words: list[str],
    capitals: list[str],
    tmp_path_factory: pytest.TempPathFactory,
    packages: Path,
    expected: dict[Cell, list[torch.Tensor | None]],
) -> None:
    names = {**dict(zip(NAMES, words, strict=True)), **dict(zip(SYMBOLS, capitals, strict=True))}
    try:
        specs = write(tmp_path_factory.mktemp("specs"), names)
    except SpecError as refused:  # two words may make a third that is taken: `need`, `dispatch`
        assume(not all("; choose another" in problem.message for problem in refused.problems))
        raise
    bundle(specs, "sm_90a", CELLS, "hopper")
    package = place(bundle(specs, "cpu", CELLS, f"renamed_{next(NUMBERS)}"), packages)
    for cell, values in expected.items():
        for got, value in zip(numbers(package, cell), values, strict=True):
            assert torch.equal(got, value), (cell, names)
    module = importlib.import_module(f"{package}.scaled_clamped_qgeglu__bf16")
    keywords = list(inspect.signature(module.scaled_clamped_qgeglu).parameters)
    assert keywords == [names[n] for n in ("x", "scales", "limit", "alpha", "offset")]


@pytest.mark.slow
@settings(
    max_examples=1,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    names=st.lists(
        st.from_regex(r"[a-z]{1,5}(_[a-z0-9]{1,4})?z", fullmatch=True),
        min_size=len(NAMES),
        max_size=len(NAMES),
        unique=True,
    ),
    symbols=st.lists(
        st.from_regex(r"[A-HJ-NP-Z][a-z]{0,4}", fullmatch=True),
        min_size=len(SYMBOLS),
        max_size=len(SYMBOLS),
        unique=True,
    ),
)
def test_modules_of_every_form_generate_under_any_names(
    names: list[str], symbols: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    renaming = {**dict(zip(NAMES, names, strict=True)), **dict(zip(SYMBOLS, symbols, strict=True))}
    try:
        specs = write(tmp_path_factory.mktemp("specs"), renaming)
    except SpecError as error:  # a reserved word, or a name and its gradient
        assert re.search(r"reserved|gradient|attribute|argument", str(error))
        return
    cells = [Cell(name, recipe) for name in stand_for_others() for recipe in RECIPES]
    for arch in ("cpu", "sm_90a"):
        known = {plan.cell for plan in resolve(SPECS, arch, cells).modules}
        bundle(specs, arch, [cell for cell in cells if str(cell) in known], "renamed")


def test_operands_of_an_op_may_be_called_what_others_are(tmp_path: Path, packages: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "crossed.yaml").write_text(
        "edition: 2\nmodule: crossed\nclass: Crossed\nsummary: Names of an op, crossed\n"
        "dims: {T: tokens, D: width}\n"
        "inputs: {scales: {shape: [T, 2 * D]}, gate: {shape: [T], dtype: float32}}\n"
        "chain: [{op: scaled_clamped_qgeglu, with: {x: scales, scales: gate}}]\n",
        encoding="utf-8",
    )
    specs = load([builtin_specs(), tmp_path])
    cells = [Cell("crossed", "bf16"), Cell("scaled_clamped_qgeglu", "bf16")]
    package = place(bundle(specs, "cpu", cells, "crossed"), packages)
    crossed, straight = (numbers(package, cell) for cell in cells)
    assert all(torch.equal(a, b) for a, b in zip(crossed, straight, strict=True))


def test_words_yield_to_names_in_python() -> None:
    m = MARK
    text = (
        "import torch\n\n\n"
        f"def f({m}x, {m}grad, {m}torch):\n"
        "    grad = torch.is_grad_enabled()\n"
        f"    return {m}x if grad else {m}grad * {m}torch\n"
    )
    settled = settle(text, ArtifactKind.PYTHON)
    assert "def f(x, grad, torch):" in settled
    assert "import torch\ntorch_ = torch\n" in settled
    assert "grad_ = torch_.is_grad_enabled()" in settled
    assert "return x if grad_ else grad * torch" in settled


def test_names_yield_to_words_in_cpp() -> None:
    m = MARK
    text = (
        f'int f(int {m}rows, int {m}NULL) {{ check("{m}rows"); return rows({m}rows) + {m}NULL; }}'
    )
    assert settle(text, ArtifactKind.CUDA) == (
        'int f(int rows_, int NULL_) { check("rows"); return rows(rows_) + NULL_; }'
    )


def test_two_arguments_of_one_name_are_refused() -> None:
    with pytest.raises(RenderError, match="two arguments are called 'device'"):
        settle(f"def f({MARK}device, device=None): pass\n", ArtifactKind.PYTHON)


def test_attributes_of_modules_are_those_of_pytorch() -> None:
    module = torch.nn.Module()
    public = {name for name in dir(module) if re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name)}
    assert public <= MODULE_ATTRIBUTES


def test_words_of_generated_files_are_known() -> None:
    """What a file has at its top, imports and builtins, besides its own function and class."""
    for path, artifact in bundle(SPECS, "cpu", CELLS, "words").items():
        cell = path.removesuffix(".py")
        if cell not in map(str, CELLS):
            continue
        tree = ast.parse(artifact.text)
        bound = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                bound |= {alias.asname or alias.name for alias in node.names}
        read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        builtin = {name for name in read if hasattr(builtins, name)}
        module = Cell.parse(cell).module
        own = {module, SPECS.modules[module].class_, "annotations", "CELL", "quantize"}
        unknown = {w for w in bound | builtin if not w.startswith("_")} - FILE_WORDS - own
        assert not {w for w in unknown if not w.endswith("Error")}, path


def test_macros_of_the_standard_headers_are_known() -> None:
    headers = "cassert cctype cerrno cmath cstdint cstdio cstdlib cstring string tuple optional"
    text = "".join(f"#include <{name}>\n" for name in (*headers.split(), "pthread.h"))
    command = ["g++", "-std=c++17", "-x", "c++", "-dM", "-E", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    macros = set(re.findall(r"^#define ([A-Za-z]\w*)(?:\s|$)", done.stdout, re.MULTILINE))
    names = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*|[A-Z][A-Za-z0-9]{0,7}")
    taken = {name for name in macros if names.fullmatch(name)}
    assert taken
    for name in taken:
        text = settle(f"int f(int {MARK}{name});", ArtifactKind.CUDA)
        assert text == f"int f(int {name}_);"
