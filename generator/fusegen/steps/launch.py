"""Launches as data: the argument struct of a kernel, and where each of its fields comes from.

How a value is written in C++ is the launcher printer's part; here stands only which one it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Origin(str, Enum):
    """Where the value of a field comes from.

    Of the step: the address of an OPERAND or a RESULT in a slot, as ``float*`` or ``int64_t*``
    where its name says so; the outermost dimension of a result (LENGTH), or of an operand, as the
    tensor has it where an op is given one (ROWS); whether rows that no group has are written
    (CLEARS); a SIZE or an ATTRIBUTE by name; its KIND, or a
    WORD that is the value of the attribute of the field's name, as an enumerator.  Of the copy in a
    slot: bytes from row to row (PITCH), and scales from one block of columns to the next where
    those of tokens are neighbours (TOKEN_PITCH).
    Of the architecture: the ALIGNMENT of where groups start.  Of the device: the number of its
    MULTIPROCESSORS.  Of the op: what it knows of the rows of an operand that may come after the
    call (ARRIVING); empty where all are there.

    The others stand for several fields, which carry their own names: operands, results, scalars and
    extents of an EXPRESSION; what the expressions of a GEMM's result read besides it (EPILOGUE);
    the groups past which its results are zero (ROW_GROUPS); how and where a step quantises
    (QUANTIZATION); both, of the PARTS of a merged step, or of a PRODUCT that goes on to codes; how
    many parts a step joins, and what each is launched with alone (EACH_PART); how the scales of a
    copy lie (SCALE_STRIDES), and how those of a group are found (LINE_GROUPS); a history and the
    scale that follows from it (DELAYED_STATE).
    """

    OPERAND = "operand"
    FLOAT_OPERAND = "float_operand"
    INTEGER_OPERAND = "integer_operand"
    RESULT = "result"
    FLOAT_RESULT = "float_result"
    INTEGER_RESULT = "integer_result"
    LENGTH = "length"
    ROWS = "rows"
    CLEARS = "clears"
    SIZE = "size"
    ATTRIBUTE = "attribute"
    KIND = "kind"
    WORD = "word"
    PITCH = "pitch"
    TOKEN_PITCH = "token_pitch"
    ALIGNMENT = "alignment"
    MULTIPROCESSORS = "multiprocessors"
    ARRIVING = "arriving"
    EXPRESSION = "expression"
    EPILOGUE = "epilogue"
    ROW_GROUPS = "row_groups"
    QUANTIZATION = "quantization"
    PARTS = "parts"
    PRODUCT = "product"
    EACH_PART = "each_part"
    SCALE_STRIDES = "scale_strides"
    LINE_GROUPS = "line_groups"
    DELAYED_STATE = "delayed_state"


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an argument struct.

    Attributes:
        name: of the field where fields are assigned; where they are given in order, for people.
        origin: where its value comes from.
        of: slot, size, attribute or enumeration that the origin is about; empty where it is about
            the whole step.
        optional: left out where the step has nothing in the slot, and null before fields that are
            not; others are null then.
    """

    name: str
    origin: Origin
    of: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """The arguments of a kernel.

    Attributes:
        arguments: name of the struct.
        header: that declares it.
        fields: in order.
        base: the struct that it begins with.
        assigned: whether fields are assigned one by one, since most of them have a default.
        typed_by: slot of the result whose type chooses the kernel; empty for the module's own.
    """

    arguments: str
    header: str
    fields: tuple[Field, ...]
    base: Launch | None = None
    assigned: bool = False
    typed_by: str = ""


def sizes(*names: str) -> tuple[Field, ...]:
    """Fields that have the names of the sizes they hold."""
    return tuple(Field(name, Origin.SIZE, name) for name in names)


GROUP_SIZES = Field("group_sizes", Origin.INTEGER_OPERAND, "groups")
"""Rows of each group; null without groups."""
MULTIPROCESSORS = Field("multiprocessors", Origin.MULTIPROCESSORS)
