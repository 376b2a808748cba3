"""Tensors of a module: what its programs read, write and keep between calls."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .dtypes import DType, bits
from .quantization import Role
from .shapes import Const, Expr, Shape, align, mul
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
        drawn: an input of random bits, which the module draws where its caller gives none.
        chunk: rows of the outermost dimension that kernels have in memory at a time, at most; None
            for all.
    """

    name: str
    dtype: DType
    shape: Shape
    role: Role | None = None
    optional: bool = False
    drawn: bool = False
    chunk: int | None = None


def size_in_bytes(buffer: Buffer) -> Expr:
    """Bytes of a buffer; shapes of formats below a byte count bytes."""
    return mul(Const(max(bits(buffer.dtype), 8) // 8), buffer.shape.elements)


_VECTOR_LOAD = 16


def is_vector(buffer: Buffer) -> bool:
    """Whether it is fp32 numbers of one dimension, which kernels read one by one."""
    return buffer.dtype is DType.FLOAT32 and len(buffer.shape.flat) == 1


def padded_bytes(buffer: Buffer) -> Expr:
    """What a buffer takes of a tensor of bytes, so that the next one is aligned for kernels.

    Sizes of codes and of scales of blocks are multiples of that as a rule: then no byte is left
    that nobody writes.
    """
    size = size_in_bytes(buffer)
    return size if is_vector(buffer) else align(size, _VECTOR_LOAD)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the module.

    Attributes:
        buffer: name of its buffer and function argument.
        path: name in the state dict.
        init: how it is filled.
        fan_in: number of inputs per output, which sets the bound of a uniform fill.
        quantized: the module has its copies alone; in its place stands a tensor without memory.
        per_group: the module has a parameter for each index of the first dimension; their names
            are the path and that index.
    """

    buffer: str
    path: str
    init: Init
    fan_in: Expr
    quantized: bool = False
    per_group: bool = False


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
    """Buffers that lie in one tensor, which ops take, change or give in their place.

    Attributes:
        buffer: of the tensor, also the function's argument: fp32 ``[rows, E]``, or bytes ``[n]``
            where parts are of several types or shapes, vectors of fp32 last.
        parts: the buffers, one behind the other.  As rows, ``[n, E]`` is n rows, ``[E]`` is one;
            E is the number of groups, or of numbers in a record.
    """

    buffer: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Attribute:
    """A scalar keyword of the module's function.

    Attributes:
        name: of the keyword.
        type: of its value.
        default: where the caller says nothing.
        range: least and largest value; None for any.
        in_eval: what the module calls the function with outside training; None for its own.
    """

    name: str
    type: AttributeType
    default: float | int | bool | str
    range: tuple[float, float] | None = None
    in_eval: float | None = None
