"""What checks of several kinds of specs share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ..ir.dtypes import INTEGERS, DType
from ..ir.shapes import LARGEST, Const, Shape
from ..spec.diagnostics import Problem, did_you_mean
from ..spec.load import Source
from ..spec.op import AttributeSpec, OpSpec, TensorSpec
from ..steps import definition

_KEPT = (DType.IO, DType.FLOAT32, *INTEGERS)


def unknown(
    source: Source, what: str, word: str, known: Iterable[str], *path: str | int
) -> Iterator[Problem]:
    """A problem where a word is not among the known ones."""
    choices = list(known)
    if word not in choices:
        yield source.problem(f"unknown {what} {word!r}{did_you_mean(word, choices)}", *path)


def check_symbols(dims: Mapping[str, str], source: Source) -> Iterator[Problem]:
    """Dimensions have a keyword and a symbol of their own."""
    words = list(dims.values())
    for symbol, word in dims.items():
        if words.count(word) > 1:
            yield source.problem(
                f"two dimensions have the keyword {word!r}; rename one", "dims", symbol
            )
        if symbol in ("I", "O"):
            yield source.problem(
                f"symbol {symbol!r} reads like a digit, and linters refuse it; use another letter",
                "dims",
                symbol,
            )


def check_dimensions(shape: Shape, source: Source, *path: str | int) -> Iterator[Problem]:
    """Only what a step gives may be one number without any dimension."""
    if not shape.flat:
        yield source.problem("expected one dimension at least, such as [T...], got []", *path)


def said_of_integer(tensor: TensorSpec, source: Source, *path: str | int) -> Iterator[Problem]:
    """A problem where a spec says of integers what holds for all of them."""
    if tensor.dtype in INTEGERS and (*path, "differentiable") in source.places:
        yield source.problem(
            f"no gradient flows into {tensor.dtype.value}; remove 'differentiable'",
            *path,
            "differentiable",
        )


def fits(attribute: AttributeSpec, value: object) -> bool:
    """Whether a value is of an attribute's type."""
    return attribute.type.holds(value)


def range_problem(attribute: AttributeSpec, value: object) -> str:
    """What is wrong with a number of the right type; empty where nothing is."""
    if attribute.range is None:
        return ""
    least, largest = attribute.range
    if isinstance(value, int | float) and least <= value <= largest:
        return ""
    return f"expected a number from {least:g} to {largest:g}, got {value!r}"


def count_problem(op: OpSpec, name: str, value: object) -> str:
    """What is wrong with a number that shapes of the op hold; empty where nothing is."""
    if name not in op.counts or (isinstance(value, int) and 1 <= value <= LARGEST):
        return ""
    return f"shapes hold {name!r}: expected a number from 1 to {LARGEST}, got {value!r}"


def fixed_problem(op: OpSpec, name: str, value: object) -> str:
    """What is wrong with a value that launches of the op are printed with; empty where nothing."""
    for step in (*op.forward, *op.backward):
        for kind in definition(step.primitive).attributes_of(step.kind):
            reason = kind.unfit(value) if dict(step.attributes).get(kind.name) == name else ""
            if reason:
                return f"{name!r} of {step.primitive}: {reason}"
    return ""


def check_drawn(inputs: Mapping[str, TensorSpec], source: Source) -> Iterator[Problem]:
    """What modules draw is int64 numbers of a known count; a call may leave it out."""
    last = ""
    for name, tensor in inputs.items():
        if last and not tensor.drawn:
            yield source.problem(
                f"{last!r} is drawn and may be left out of a call; put {name!r} before it",
                "inputs",
                name,
            )
        if not tensor.drawn:
            continue
        last = name
        sized = all(isinstance(dim, Const) for dim in tensor.shape.dims) and tensor.shape.dims
        if tensor.dtype is not DType.INT64 or len(tensor.shape.flat) != 1 or not sized:
            yield source.problem(
                f"{name!r} is drawn: expected dtype int64 and one dimension such as [2], got"
                f" {tensor.dtype.value} {tensor.shape}",
                "inputs",
                name,
                "drawn",
            )


def check_optional_last(
    inputs: Mapping[str, TensorSpec], name: str, source: Source
) -> Iterator[Problem]:
    """What a call may leave out stands behind the inputs that it gives."""
    names = [*inputs]
    for later in names[names.index(name) + 1 :]:
        if not (inputs[later].optional or inputs[later].drawn):
            yield source.problem(
                f"{name!r} may be left out of a call; put {later!r} before it", "inputs", later
            )
            return


def check_order(
    results: Mapping[str, tuple[TensorSpec, tuple[str | int, ...]]], source: Source
) -> Iterator[Problem]:
    """What a function returns without a gradient stands behind all that has one.

    Args:
        results: by name, each with its place.
    """
    integers = ""
    for name, (tensor, path) in results.items():
        if tensor.dtype in INTEGERS:
            integers = integers or name
        elif integers:
            yield source.problem(
                f"{integers!r} has no gradient, as it is of integers; put {name!r} before it", *path
            )


OWN_TYPE_FIRST = "the first input tells the module's own type"


def check_input_types(
    inputs: Mapping[str, TensorSpec], source: Source, *, any_first: bool = False
) -> Iterator[Problem]:
    """The first input of a module, or of an op of expressions, tells what ``io`` is.

    Args:
        any_first: whether the first one may have any type, as that of an op of steps: a chain may
            have the op behind others.
    """
    for index, (name, tensor) in enumerate(inputs.items()):
        reason = "" if index or any_first else OWN_TYPE_FIRST
        yield from check_type("inputs", name, tensor, reason, source)


def check_type(
    section: str, name: str, tensor: TensorSpec, reason: str, source: Source
) -> Iterator[Problem]:
    """A type that nothing is printed for.

    Args:
        reason: why the tensor has the module's own type; empty where it may have another.
    """
    if tensor.dtype not in _KEPT:
        reason = "16 bits are the module's own type, and recipes quantise by role"
    elif tensor.role:
        reason = reason or "what has a role is of the module's own type"
    if reason and tensor.dtype is not DType.IO:
        yield source.problem(
            f"expected dtype io for {name!r}, got {tensor.dtype.value}: {reason}",
            section,
            name,
            "dtype",
        )
