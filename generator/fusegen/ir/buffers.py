"""Tensors of a module: what its programs read, write and keep between calls."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .dtypes import DType
from .quantization import Role
from .shapes import Expr, Shape
from .words import AttributeType, Init


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor of a plan.

    Attributes:
        name: identifier in every language.
        dtype: element type; ``io`` is known at run time.
        shape: row-major.
        role: what a recipe quantises it as.
        optional: may be absent.
    """

    name: str
    dtype: DType
    shape: Shape
    role: Role | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the module.

    Attributes:
        buffer: name of its buffer and function argument.
        path: name in the state dict.
        init: how it is filled.
        fan_in: number of inputs per output, which sets the bound of a uniform fill.
        quantized: the module has its copies alone; in its place stands a tensor without memory.
    """

    buffer: str
    path: str
    init: Init
    fan_in: Expr
    quantized: bool = False


class StateFill(str, Enum):
    """What a state tensor starts as.

    SEED is a random seed and an offset of 0; COPY is a copy of a weight, which the program
    ``refresh`` makes, so that a state dict that has the weight has no need of it.  RECORD is zeros
    that steps write over for people alone: every call may do so, and no state dict needs it.
    """

    ZEROS = "zeros"
    ONES = "ones"
    SEED = "seed"
    COPY = "copy"
    RECORD = "record"


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that a module keeps between calls and an op changes in place.

    Attributes:
        buffer: name of its buffer and function argument.
        path: name in the state dict.
        fill: what it starts as.
    """

    buffer: str
    path: str
    fill: StateFill


@dataclass(frozen=True, slots=True)
class JoinedTensor:
    """Buffers that lie as rows of one tensor, which ops take, change or give in their place.

    Attributes:
        buffer: of the tensor: fp32 ``[rows, E]``, also the function's argument.
        parts: the buffers, one behind the other: ``[n, E]`` is n rows, ``[E]`` is one;
            E is the number of groups, or of numbers in a record.
    """

    buffer: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Attribute:
    """A scalar keyword of the module's function."""

    name: str
    type: AttributeType
    default: float | int | bool | str
