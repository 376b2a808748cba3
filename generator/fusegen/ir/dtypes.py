"""Element types of buffers: one row per type, every name a type has elsewhere in that row."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DType(str, Enum):
    """Element type of a buffer.

    ``io`` is the module's own type, bfloat16 or float16, known at run time from the first input.
    """

    IO = "io"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    INT64 = "int64"
    INT32 = "int32"
    UINT8 = "uint8"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    E2M1 = "e2m1"
    E8M0 = "e8m0"


@dataclass(frozen=True, slots=True)
class DTypeInfo:
    """What each language calls a type.

    Attributes:
        bits: storage bits per element.
        torch: attribute of the ``torch`` module.
        scalar_type: enumerator of the stable ABI's ``ScalarType``.
        cuda: element type in device code.
    """

    bits: int
    torch: str
    scalar_type: str
    cuda: str


_INFO = {
    DType.BFLOAT16: DTypeInfo(16, "bfloat16", "BFloat16", "__nv_bfloat16"),
    DType.FLOAT16: DTypeInfo(16, "float16", "Half", "__half"),
    DType.FLOAT32: DTypeInfo(32, "float32", "Float", "float"),
    DType.INT64: DTypeInfo(64, "int64", "Long", "int64_t"),
    DType.INT32: DTypeInfo(32, "int32", "Int", "int32_t"),
    DType.UINT8: DTypeInfo(8, "uint8", "Byte", "uint8_t"),
    DType.E4M3: DTypeInfo(8, "float8_e4m3fn", "Float8_e4m3fn", "__nv_fp8_e4m3"),
    DType.E5M2: DTypeInfo(8, "float8_e5m2", "Float8_e5m2", "__nv_fp8_e5m2"),
    DType.E2M1: DTypeInfo(4, "float4_e2m1fn_x2", "Float4_e2m1fn_x2", "uint8_t"),
    DType.E8M0: DTypeInfo(8, "float8_e8m0fnu", "Float8_e8m0fnu", "uint8_t"),
}

_LARGEST = {DType.E4M3: 448.0, DType.E5M2: 57344.0, DType.E2M1: 6.0}


def largest(dtype: DType) -> float:
    """The largest finite value of a format that tensors are quantised to."""
    return _LARGEST[dtype]


INTEGERS = (DType.INT64, DType.INT32, DType.UINT8)
"""Types into which no gradient flows."""

IO_DTYPES = (DType.BFLOAT16, DType.FLOAT16)
"""What ``io`` may stand for, in the order of preference of examples and tests."""


def info(dtype: DType) -> DTypeInfo:
    """The row of a concrete type.  ``io`` has none: it is a run-time choice among IO_DTYPES."""
    return _INFO[dtype]


def bits(dtype: DType) -> int:
    """Storage bits per element; ``io`` is always 16."""
    return 16 if dtype is DType.IO else _INFO[dtype].bits
