"""Kinds of steps: what each promises, held against references, kernels and every plan."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import fusegen
from fusegen.checks.load import load
from fusegen.emit.reference.cell import reference_context
from fusegen.ir.buffers import Buffer
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.shapes import Shape
from fusegen.ir.step import AttributeRef, Step
from fusegen.ir.words import AttributeType
from fusegen.math import Derivations
from fusegen.passes.backward import write_backward
from fusegen.passes.draft import NotPossible
from fusegen.passes.expand import expand
from fusegen.passes.kernels import choose_kernels
from fusegen.passes.math import derive_math
from fusegen.passes.pipeline import resolve_module
from fusegen.publish.paths import builtin_specs, builtin_templates
from fusegen.spec.offers import words_of
from fusegen.steps import BY_NAME, STEPS, copies_memory, definition, is_gemm, reads_decoded
from fusegen.steps.copies import Formats
from fusegen.steps.definition import AttributeDef, Reference, StepDef, Trait
from fusegen.steps.launch import Launch, Origin
from fusegen.steps.sizes import bound, with_sizes

PACKAGE = Path(fusegen.__file__).parent
SPECS = load([builtin_specs(), Path(__file__).parents[1] / "chains" / "specs"])
ARCHS = ("cpu", "sm_90a")
REFERENCE = {
    "cross_entropy": "_cross_entropy.py",
    "dropout": "_dropout.py",
    "fp32_weight": "_fp32_weight.py",
    "norms": "_norms.py",
    "quantized": "_quantize.py",
    "rotary": "_rotary.py",
    "router": "_router.py",
    "routing": "_routing.py",
    "softmax": "_softmax.py",
    "statistics": "_statistics.py",
    "steps": "_steps.py",
    "sums": "_sums.py",
}
"""Files of the reference by the names under which others import them."""
COPIES = re.compile(r"(.+)_(scale|amax)|amax_history|scale|rng_state|like")
"""Slots that come with an operand, or that outlive the call: a function takes them within it."""


WITH_OPTIONS = (("grouped_mlp", "fp8_delayed"), ("router", "bf16"))


@cache
def functions() -> dict[str, set[str]]:
    """Parameters of the reference's functions."""
    found = {}
    for word, name in REFERENCE.items():
        path = builtin_templates() / "static" / "reference" / name
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                arguments = (*node.args.args, *node.args.kwonlyargs)
                found[f"{word}.{node.name}"] = {argument.arg for argument in arguments}
    return found


@cache
def plans() -> tuple[ModulePlan, ...]:
    """Every module and recipe without options, and some modules with each option."""
    found = []
    for arch in ARCHS:
        for module in SPECS.modules.values():
            words = words_of(module, SPECS.ops)
            for recipe in SPECS.recipes:
                own = words if (module.name, recipe) in WITH_OPTIONS else ()
                for options in ((), *((word,) for word in own)):
                    try:
                        cell = Cell(module.name, recipe, options)
                        found.append(resolve_module(SPECS, cell, arch))
                    except NotPossible:
                        continue
    return tuple(found)


def steps() -> Iterator[tuple[ModulePlan, Step]]:
    for plan in plans():
        yield from ((view, step) for view, program in plan.ops for step in program.steps)
        yield from ((plan, step) for step in plan.exact)


def names(kind: StepDef) -> list[str]:
    """Functions of the reference that a kind names."""
    kinds = kind.kinds or (None,)
    twins = (False, True) if kind.reference and kind.reference.of_copies else (False,)
    return [kind.function(each, of_copies=twin) for each in kinds for twin in twins]


def named(of: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(of, STEPS, ids=lambda kind: kind.name)


@named("kind")
def test_the_reference_has_it_or_needs_no_function(kind: StepDef) -> None:
    alone = kind.traits & {Trait.PRINTED, Trait.COPIES_MEMORY}
    merged = kind.parts or Trait.LOOPS in kind.traits
    assert sum((bool(alone), bool(merged), kind.reference is not None)) == 1
    for name in names(kind) if kind.reference else ():
        assert name in functions()


@named("kind")
def test_the_reference_takes_its_operands(kind: StepDef) -> None:
    if kind.reference is None:
        with pytest.raises(ValueError, match=f"no function for {kind.name}"):
            kind.function()
        return
    assert {*kind.operands} <= kind.reference.slots
    for each, rule in kind.shapes.items():
        if Trait.QUANTIZES not in kind.traits:
            scalars = {attribute.name for attribute in kind.attributes_of(each)}
            taken = functions()[kind.function(each)] - {"dtype"}
            assert taken == {*rule} - {*kind.results} | scalars
    own = {slot for slot in kind.reference.slots if not COPIES.fullmatch(slot)}
    declared = {slot for rule in kind.shapes.values() for slot in rule}
    assert own <= declared or kind.of_passes


@named("kind")
def test_what_it_declares_is_in_a_rule(kind: StepDef) -> None:
    """But for a result that is added to what memory holds, which passes alone ask for."""
    assert {*kind.shapes} in (set(), {*kind.kinds} or {None})
    declared = {slot for rule in kind.shapes.values() for slot in rule}
    assert {*kind.slots, *kind.results} - {"accumulate"} == declared or kind.of_passes
    assert {*kind.dtypes} <= declared
    assert {*kind.indices} <= {*kind.slots}
    assert {*kind.indices.values()} <= {*kind.sizes}
    for each in (kind.inverse, kind.counted):
        assert {*each} | {*each.values()} <= {*kind.slots}
        assert {*each.values()} <= {*kind.indices}
    names = {each for rule in kind.shapes.values() for v in rule.values() for each in v.split()}
    symbols = {each.removesuffix("...") for each in names if "/" not in each}
    assert {each.partition("/")[0] for each in names if "/" in each} <= symbols
    assert {*kind.sizes.values()} - {""} <= symbols


@named("kind")
def test_kernels_of_sm_90a_implement_it_or_none_is_needed(kind: StepDef) -> None:
    implemented = {name for f in SPECS.archs["sm_90a"].kernels.values() for name in f.implements}
    needs_none = bool(kind.traits & {Trait.COPIES_MEMORY, Trait.LOOPS})
    assert (kind.name in implemented) != needs_none
    assert (kind.launch is None) == needs_none


@pytest.mark.slow
def test_some_plan_has_each() -> None:
    assert {step.primitive for _, step in steps()} == {*BY_NAME}


@named("kind")
def test_parts_are_kinds(kind: StepDef) -> None:
    assert {name for row in kind.parts for name in row} <= {*BY_NAME}


@pytest.mark.slow
def test_parts_of_every_plan_are_those_of_their_kind() -> None:
    for _, step in steps():
        kind = definition(step.primitive)
        if Trait.LOOPS in kind.traits:
            assert all(definition(part.primitive).launch for part in step.parts)
        elif step.parts:
            repeated = len(step.parts) if Trait.JOINS in kind.traits else 1
            parts = tuple(part.primitive for part in step.parts)
            assert parts in [row * repeated for row in kind.parts]


@pytest.mark.parametrize("trait", Trait)
def test_every_trait_is_of_a_kind(trait: Trait) -> None:
    assert any(trait in kind.traits for kind in STEPS)


def test_names_are_looked_up() -> None:
    assert [definition(kind.name) for kind in STEPS] == [*STEPS]
    assert len(BY_NAME) == len(STEPS)
    with pytest.raises(KeyError, match=r"no step 'gem'; there are gemm, grouped_gemm, .*"):
        definition("gem")


def operand(plan: ModulePlan, step: Step, slot: str, buffer: str) -> Buffer:
    """An operand, or the tensor that it is a quantised copy of."""
    if step.copies and slot in ("a", "b"):
        return plan.buffer(step.copies[slot == "b"].original)
    return plan.buffer(buffer)


@pytest.mark.slow
def test_rules_give_the_shapes_of_every_plan() -> None:
    """Quantised and decoded operands count as the tensors that they were made from."""
    seen = set()
    for plan, step in steps():
        kind = definition(step.primitive)
        if not kind.shapes or (Trait.QUANTIZES in kind.traits and step.copies):
            continue
        rule = kind.shapes[step.kind]
        own = {o.slot: operand(plan, step, o.slot, o.buffer) for o in step.inputs if o.slot in rule}
        shapes = {slot: buffer.shape for slot, buffer in own.items()}
        found = bound(rule, shapes)
        names = [name.removesuffix("...") for name in rule["out"].split()]
        if {*names} <= {*found}:
            result = Shape(None, tuple(size for name in names for size in found[name]))
            assert result == plan.buffer(step.out).shape.fixed()
        else:  # dimensions of its own: the verifier counts elements, or their sizes are formulas
            assert copies_memory(step) or kind.equal
        if kind.equal:
            shapes |= {o.slot: plan.buffer(o.buffer).shape for o in step.outputs}
        for slot, buffer in own.items():
            assert buffer.dtype in kind.types(slot), (step.primitive, slot)
        if step.sizes:  # those of the exact forward are told nothing
            assert with_sizes(step, shapes).flops == step.flops
        seen.add((step.primitive, step.kind))
    wanted = {(kind.name, each) for kind in STEPS for each in kind.shapes}
    assert wanted - seen <= {("quantize", None)}


@named("kind")
def test_results_follow_from_a_rule(kind: StepDef) -> None:
    """Of dimensions, of copies, or the expression's own; what changes states alone has none.

    That of a GEMM with an epilogue is its last part's.
    """
    own = Trait.PRINTED in kind.traits or (kind.parts and Trait.GEMM in kind.traits)
    assert not kind.results or kind.shapes or kind.infer or own


@pytest.mark.slow
def test_rules_of_copies_say_all_results_of_every_plan() -> None:
    found = set()
    for plan, step in steps():
        kind = definition(step.primitive)
        if kind.infer:
            found.add(kind.name)
            formats = Formats(dict(plan.quantizations), plan.layout)
            stored = kind.infer(step, {each.name: each for each in plan.buffers}, formats)
            own = {result.buffer for result in step.pointwise.results} if step.pointwise else set()
            if step.chunks:  # what parts give they say themselves
                own |= {name for part in step.parts for name in part.writes}
            slots = {operand.slot for operand in step.outputs if operand.buffer not in own}
            assert slots <= stored.keys(), (plan.cell, step.primitive)
    assert found == {kind.name for kind in STEPS if kind.infer}


def test_an_operand_of_another_shape_is_refused() -> None:
    rule = BY_NAME["gemm"].shapes["fprop"]
    shapes = {"a": Shape.parse(["T", "K"]), "b": Shape.parse(["N", "H"])}
    with pytest.raises(ValueError, match=r"b is \[N, H\], expected \[N, K\]"):
        bound(rule, shapes)


TYPES = {
    Origin.OPERAND: "const void*",
    Origin.FLOAT_OPERAND: "const float*",
    Origin.INTEGER_OPERAND: "const int64_t*",
    Origin.RESULT: "void*",
    Origin.FLOAT_RESULT: "float*",
    Origin.INTEGER_RESULT: "int64_t*",
    Origin.LENGTH: "int64_t",
    Origin.CLEARS: "bool",
    Origin.SIZE: "int64_t",
    Origin.PITCH: "int64_t",
    Origin.TOKEN_PITCH: "int64_t",
    Origin.ALIGNMENT: "int64_t",
    Origin.MULTIPROCESSORS: "int",
}
"""What a field of each source is in C++."""


@cache
def members(struct: str) -> list[tuple[str, str]]:
    """Type and name of each field of a struct of the device code, in order."""
    headers = (builtin_templates() / "static" / "csrc").rglob("*.h*")
    text = "\n".join(path.read_text(encoding="utf-8") for path in headers)
    body = re.search(rf"struct {struct} {{(.*?)\n}};", text, re.DOTALL)
    assert body, struct
    return re.findall(r"^  ([\w:<>, ]+\*?) (\w+)(?: = [^;]*)?;", body[1], re.MULTILINE)


def places(struct: str) -> dict[str, str]:
    """Type of each field of a struct, and of the structs in it behind a dot, by name."""
    found = {}
    for cpp, name in members(struct):
        found[name] = cpp
        if cpp.endswith(("Arguments", "Copy", "State")):
            found |= {f"{name}.{inner}": each for inner, each in places(cpp).items()}
    return found


def launches() -> dict[str, Launch]:
    """Every launch of a plan by its struct."""
    found = {}
    for _, step in steps():
        stated = definition(step.primitive).launch
        if stated is not None:
            found[stated(step).arguments] = stated(step)
    return found


@pytest.mark.slow
def test_launches_are_of_the_structs_of_the_device_code() -> None:
    """Fields by position, or by name where they are assigned, have the types of the struct."""
    assert len(launches()) == 37
    for launch in launches().values():
        own = members(launch.arguments)
        if launch.base:
            assert own.pop(0)[0] == launch.base.arguments
        named = places(launch.arguments)
        for position, field in enumerate(launch.fields):
            if field.origin in TYPES:
                found = named[field.name] if launch.assigned else own[position][0]
                assert found == TYPES[field.origin], (launch.arguments, field)
            if field.origin in (Origin.KIND, Origin.WORD):  # the field says which enumeration
                assert named[field.name] == field.of


SCALARS = {
    AttributeType.FLOAT: "float",
    AttributeType.INT: "int64_t",
    AttributeType.BOOL: "bool",
}
"""What a field of an attribute of each type is in C++."""


@pytest.mark.slow
def test_attributes_of_launches_have_the_types_of_the_struct() -> None:
    """Narrowing to float is said by a cast; all that a kind has reaches its kernel."""
    found = set()
    for _, step in steps():
        kind = definition(step.primitive)
        launch = kind.launch(step) if kind.launch and kind.attributes else None
        if launch is None:
            continue
        types = {attribute.name: attribute.type for attribute in kind.attributes}
        named = places(launch.arguments)
        told = [field for field in launch.fields if field.origin is Origin.ATTRIBUTE]
        words = {field.name for field in launch.fields if field.origin is Origin.WORD}
        known = {*types} - {*kind.equal.values()}  # a size that is an attribute says it
        reached = {field.of for field in told} | words
        assert reached in ({*types}, known, set())  # others say more than a number
        for field in told:
            assert named[field.name] == SCALARS[types[field.of]], (launch.arguments, field)
        found |= {step.primitive} if told else set()
    wanted = {"softmax", "softmax_grad", "cross_entropy", "cross_entropy_grad", "routing_plan"}
    assert wanted | {"rotary", "rotary_qkv", "rotary_qkv_grad"} <= found


@pytest.mark.slow
def test_gemms_of_copies_read_them_or_what_they_decode_to() -> None:
    found = {reads_decoded(step) for _, step in steps() if is_gemm(step) and step.copies}
    assert found == {False, True}
    assert not any(reads_decoded(step) for _, step in steps() if not is_gemm(step))
    assert any(copies_memory(step) for _, step in steps()) is any(
        step.primitive == "snapshot" for _, step in steps()
    )


# ---- attributes


@pytest.mark.slow
def test_steps_are_told_what_their_expression_or_kind_reads() -> None:
    found = 0
    for plan, step in steps():
        kind = definition(step.primitive)
        declared = tuple(each.name for each in kind.attributes_of(step.kind))
        own = step.pointwise.attributes if step.pointwise else declared
        assert tuple(name for name, _ in step.attributes) == own
        scalars = {attribute.name for attribute in plan.attributes}
        assert {v.name for _, v in step.attributes if isinstance(v, AttributeRef)} <= scalars
        found += len(step.attributes)
    assert found


OP = """\
edition: 2
op: toy
summary: y = factor x
dims: {T: tokens, K: inner}
inputs: {x: {shape: [T..., K]}}
outputs: {y: {shape: [T..., K]}}
attributes: {scale: {type: float, default: 3.0}}
forward:
  - {step: rescale, a: x, factor: scale, out: y}
backward:
  - {step: rescale, a: dy, factor: 2.0, out: dx}
"""
MODULE = """\
edition: 2
module: toy
class: Toy
chain: [{op: toy, as: first, out: h}, {op: toy, as: second}]
summary: twice
dims: {T: tokens, K: inner}
inputs: {x: {shape: [T..., K]}}
"""


def test_attributes_of_a_kind_reach_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scalar of the op is an argument under the module's name; a number stands as it is."""
    kind = StepDef(
        "rescale",
        operands=("a",),
        attributes=(AttributeDef("factor", AttributeType.FLOAT),),
        shapes={None: {"a": "T... K", "out": "T... K"}},
        reference=Reference("steps.rescale", frozenset(("a",))),
    )
    monkeypatch.setitem(BY_NAME, kind.name, kind)
    for folder, text in (("ops", OP), ("modules", MODULE)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "toy.yaml").write_text(text, encoding="utf-8")
    plan = resolve_module(load([builtin_specs(), tmp_path]), Cell("toy", "bf16"), "cpu")
    assert [attribute.name for attribute in plan.attributes] == ["first_scale", "second_scale"]
    calls = [[step.call for step in program.steps] for program in reference_context(plan).programs]
    assert calls == [
        ["steps.rescale(x, factor=first_scale)", "steps.rescale(h, factor=second_scale)"],
        ["steps.rescale(dy, factor=2.0)", "steps.rescale(dh, factor=2.0)"],
    ]


def test_an_expression_without_its_scalars_is_refused() -> None:
    """What a pass leaves out is said where kernels are chosen, not in a launcher that reads it."""
    draft = derive_math(
        write_backward(expand(SPECS.modules["clamped_swiglu"], SPECS.ops)), Derivations(None)
    )
    lost = replace(draft, forward=tuple(replace(s, attributes=()) for s in draft.forward))
    with pytest.raises(NotPossible, match=r"pointwise is given \[\], its expression reads \['"):
        choose_kernels(lost, SPECS.archs["cpu"], SPECS.recipes["bf16"])


# ---- who may name a kind

GENERIC = ("ir", "math", "passes", "emit", "publish", "build", "tuning")
WORDS = re.compile(r"primitive\s*(?:is|is not|==|!=|in|not in)\s*(?P<what>[^\n]*)")
ALLOWED = {
    "passes/fusions.py": {"step.step and touched == ({*reads}, {*writes})"},
    "passes/rewrite.py": {"match.step or match.kind not in (None, step.kind):"},
}
"""Comparisons of one plan's or spec's word with another's, which name no kind."""


def test_generic_code_compares_with_no_name() -> None:
    kinds = "|".join(kind.name.upper() for kind in STEPS)
    compared = re.compile(rf"(?:==|!=|\bis|\bin|\bcase)\s+\(?(?:{kinds})\b(?!\.flops)")
    slots = ("add", "statistics")  # which kinds of steps have for names, too
    quoted = re.compile("|".join(rf'"{kind.name}"' for kind in STEPS if kind.name not in slots))
    for path in (path for room in GENERIC for path in (PACKAGE / room).rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix()
        found = {match["what"] for match in WORDS.finditer(text)}
        assert found <= ALLOWED.get(name, set()), name
        assert not compared.search(text), name
        assert not re.search(rf"(?:==|!=|\bin)\s+\(?(?:{quoted.pattern})", text), name
