"""Specs that nobody would write: every one is refused with places, or planned, or has a reason."""

from __future__ import annotations

import copy
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from plans import SPECS as BUILTIN

from fusegen.checks import check
from fusegen.emit.bundle import render_bundle
from fusegen.emit.polish import polish
from fusegen.ir.naming import Cell
from fusegen.passes.pipeline import resolve
from fusegen.publish.inputs import Inputs
from fusegen.publish.paths import builtin_specs
from fusegen.spec.diagnostics import Problem, SpecError
from fusegen.spec.kinds import SpecKind
from fusegen.spec.load import SpecSet, parse_spec

FILES = [(kind, p) for kind in SpecKind for p in sorted((builtin_specs() / kind.folder).iterdir())]
TEXTS = {path: yaml.safe_load(path.read_text(encoding="utf-8")) for _, path in FILES}
ODD: tuple[object, ...] = (
    None, True, 0, -1, 1, 7, 2**31, 2**63, 10**40, 0.5, float("inf"), float("nan"), "", "\n", "é",
    "T...", "...", "2 * D", "D // 0", "ceildiv(D, 0)", "9" * 199, "x" * 300, "x", "dx", "y",
    "all", "io", "float32", "bfloat16", "e4m3", "int64", "class", "lambda", '"""', "\\", "x / 0",
    "x ** 999", [], {}, [[]], [1, 2, 3], ["T"] * 7, {"a": 1}, {"x": {}}, "fast", "split_128",
)  # fmt: skip


def with_spec(
    tmp_path: Path, kind: SpecKind, name: str, text: str
) -> tuple[SpecSet, list[Problem]]:
    """The built-in specs with one more, or one other; and what is wrong with it."""
    path = tmp_path / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        spec, source = parse_spec(kind, path, path.name)
    except SpecError as error:
        return BUILTIN, list(error.problems)
    of = {each.folder: dict(BUILTIN.of(each)) for each in SpecKind}
    of[kind.folder][spec.name] = spec
    specs = SpecSet(**of, sources={**BUILTIN.sources, (kind, spec.name): source})  # type: ignore[arg-type]
    return specs, [problem for _, problem in check(specs, complete=True)]


def places(node: Any) -> list[tuple[Any, ...]]:
    """Paths to everything in a spec."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if _is_list(node) else ()
    return [p for key in keys for p in ((key,), *((key, *rest) for rest in places(node[key])))]


def _is_list(node: Any) -> bool:
    return isinstance(node, list)


def _get(node: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        node = node[part]
    return node


def mutated(spec: Any, rng: random.Random) -> Any:
    spec = copy.deepcopy(spec)
    for _ in range(rng.choice((1, 1, 2, 4))):
        found = places(spec)
        if not found:
            break
        path = rng.choice(found)
        parent, key = _get(spec, path[:-1]), path[-1]
        other = copy.deepcopy(_get(spec, rng.choice(found)))
        match rng.randrange(4):
            case 0:
                parent[key] = copy.deepcopy(rng.choice(ODD))
            case 1:
                parent[key] = other
            case 2:
                del parent[key]
            case _ if isinstance(parent, dict):
                parent[str(rng.choice(ODD))] = parent.pop(key)
            case _:
                parent.insert(key, other)
    return spec


@pytest.mark.slow
@pytest.mark.parametrize("kind", SpecKind, ids=lambda kind: kind.folder)
def test_every_change_of_a_spec_is_refused_or_planned(tmp_path: Path, kind: SpecKind) -> None:
    rng = random.Random(kind.folder)
    refused = 0
    for _ in range(120):
        path = rng.choice([path for each, path in FILES if each is kind])
        spec = mutated(TEXTS[path], rng)
        text = yaml.safe_dump(spec, sort_keys=False)
        specs, problems = with_spec(tmp_path, kind, path.stem, text)
        for problem in problems:
            assert problem.loc.line >= 1 and problem.loc.column >= 1
            assert problem.message
        refused += bool(problems)
        if not problems:
            arch = "sm_90a" if kind is not SpecKind.ARCHS else path.stem
            module = path.stem if kind is SpecKind.MODULES else "grouped_mlp"
            recipe = path.stem if kind is SpecKind.RECIPES else "fp8_block"
            cells = [Cell(module, recipe), Cell("linear", recipe), Cell("swiglu", recipe)]
            plan = resolve(specs, arch, cells)
            assert len(plan.modules) + len(plan.unsupported) == len(set(cells))
    assert refused > 20


# Modules of more than people write


def rendered(
    tmp_path: Path, kind: SpecKind, text: str, recipe: str, *, module: str = "toy"
) -> None:
    """Everything of a cell is printed, and ruff finds nothing wrong with it."""
    specs, problems = with_spec(tmp_path, kind, "toy", text)
    assert not problems, problems
    if kind is SpecKind.OPS:
        text = "edition: 2\nmodule: toy\nclass: Toy\nop: toy\n"
        own = tmp_path / "modules"
        own.mkdir()
        (own / "toy.yaml").write_text(text, encoding="utf-8")
        spec, source = parse_spec(SpecKind.MODULES, own / "toy.yaml", "modules/toy.yaml")
        modules = {**specs.modules, "toy": spec}
        sources = {**specs.sources, (SpecKind.MODULES, "toy"): source}
        of = {each.folder: dict(specs.of(each)) for each in SpecKind} | {"modules": modules}
        specs = SpecSet(**of, sources=sources)  # type: ignore[arg-type]
    for arch in ("cpu", "sm_90a"):
        (plan,) = resolve(specs, arch, [Cell(module, recipe)]).modules
        files = render_bundle((plan,), specs.archs[arch], "toy", Inputs().renderer(()))
        polish(files)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed"])
def test_a_chain_of_seven_dimensions_and_sixty_states(tmp_path: Path, recipe: str) -> None:
    """Delayed scaling changes six buffers of each of ten GEMMs: more than letters name."""
    sizes = "ABCDFGHKMNP"
    dims = ", ".join(f"{size}: size_{size.lower()}" for size in sizes)
    items = "".join(
        f"  - {{op: linear, as: fc{i}, dims: {{K: {a}, N: {b}}}"
        f"{', out: h' + str(i) if i < 9 else ''}}}\n"
        for i, (a, b) in enumerate(pairwise(sizes))
    )
    text = (
        f"edition: 2\nmodule: toy\nclass: Toy\nsummary: toy\ndims: {{T: tokens, {dims}}}\n"
        f"inputs: {{x: {{shape: [T..., A]}}}}\nchain:\n{items}"
    )
    rendered(tmp_path, SpecKind.MODULES, text, recipe)


def test_a_tensor_that_has_one_size_twice(tmp_path: Path) -> None:
    text = (
        "edition: 2\nop: toy\nsummary: toy\ndims: {T: rows, D: width}\n"
        "inputs: {x: {shape: [T, D, D]}, z: {shape: [T, D, D]}}\n"
        "outputs: {y: {shape: [T, D, D]}}\npointwise: {y: x * z}\n"
    )
    rendered(tmp_path, SpecKind.OPS, text, "bf16")


def test_a_size_with_brackets(tmp_path: Path) -> None:
    text = (
        "edition: 2\nop: toy\nsummary: toy\ndims: {T: rows, D: width}\n"
        "inputs: {x: {shape: [T..., 2 * (2 * D)], halves: [a, b]}}\n"
        "parameters: {w: {shape: [2 * D], broadcast: column, differentiable: false}}\n"
        "outputs: {y: {shape: [T..., 2 * D]}}\npointwise: {y: a * b * w}\n"
    )
    rendered(tmp_path, SpecKind.OPS, text, "bf16")


def test_an_identity_of_a_tensor_without_a_role(tmp_path: Path) -> None:
    text = (
        "edition: 2\nmodule: toy\nclass: Toy\nsummary: toy\ndims: {T: tokens, N: width}\n"
        "inputs: {x: {shape: [T, N]}}\nchain: [{op: quantize, as: q, dims: {K: N}}]\n"
    )
    rendered(tmp_path, SpecKind.MODULES, text, "fp8_block")
