"""Every derived name, each from one function whose result can be read back."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .dtypes import IO_DTYPES, DType
from .kernel import GemmKind
from .names import prefixed

UPDATE_STATE = "update_state"
"""Name of the flag that lets an op without gradients move on what delayed scaling keeps."""

QUANTIZE_INPUT = "quantize_input"
"""Name of the program, and of the function, that makes the copies of a module's first input."""

SPLIT_SIZES = "split_sizes"
"""Keyword of the public function `quantize` for the rows per group, and that of its ops."""

_DERIVED = re.compile(
    r"need_d.+|rng_state|(?:forward|backward|refresh|quantize_input)_state(?:_\d+)?|.+_(?:rowwise|columnwise)(?:_.+)?"
    r"|(?:.+_)?(?:input|weight|(?:grad_)?output)_(?:amax_history|scale)"
    r"|.+_(?:dequantized|decoded|used|padded_sizes|row_sums|row_partials|partials|statistics)"
    r"|.+_(?:partial|row|column)_amax|.+_(?:main_grad|dummy_grad)"
    r"|d.+_(?:partial_[0-9]+|total|terms)"
)
"""Names that passes and printers make of others; ``gradient`` has a rule of its own."""

_PART = r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*"


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One generated module: ``<module>__<recipe>[__<option>...]``.

    Attributes:
        module: name of the module spec.
        recipe: name of the recipe spec.
        options: choices made at generation time, in the order of the registry.
    """

    module: str
    recipe: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "__".join((self.module, self.recipe, *self.options))

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Inverse of ``str``.  Raises ValueError for text that no cell prints."""
        parts = text.split("__")
        if len(parts) < 2 or not all(re.fullmatch(_PART, part) for part in parts):
            raise ValueError(f"{text!r} is not <module>__<recipe>[__<option>...]")
        return cls(parts[0], parts[1], tuple(parts[2:]))


@dataclass(frozen=True, slots=True, order=True)
class GemmUnit:
    """Name of the unit of a GEMM, such as ``gemm_sm90_fprop_pingpong_64x256x64_2x1``.

    The first part is the family; a point is a word and numbers behind it.  Quantised operands put
    their variant before the point:
    ``gemm_fp8_sm90_dgrad_e5m2_e4m3_tensor_split_...``.
    """

    family: str
    kind: GemmKind
    point: str
    variant: str = ""

    @property
    def stem(self) -> str:
        """The name without the point, which units of one kernel set share: the set's name."""
        return "_".join((self.family, self.kind.value, *([self.variant] if self.variant else [])))

    def __str__(self) -> str:
        return f"{self.stem}_{self.point}"

    @classmethod
    def parse(cls, text: str) -> GemmUnit:
        """Inverse of ``str``.  Raises ValueError for text that no unit prints."""
        kinds = "|".join(kind.value for kind in GemmKind)
        match = re.fullmatch(rf"(\w+)_({kinds})(?:_(\w+))?_([a-z]+(?:_\d+(?:x\d+)*)+)", text)
        if not match:
            raise ValueError(f"{text!r} is not <family>_<kind>[_<variant>]_<point>")
        return cls(match[1], GemmKind(match[2]), match[4], match[3] or "")


@dataclass(frozen=True, slots=True, order=True)
class GemmKernel:
    """Name of a unit's kernel for an element type: ``gemm_sm90_fprop_bfloat16_pingpong_...``.

    The type is the result's; it stands before the point.
    """

    unit: GemmUnit
    dtype: DType

    def __str__(self) -> str:
        return f"{self.unit.stem}_{self.dtype.value}_{self.unit.point}"

    @classmethod
    def parse(cls, text: str) -> GemmKernel:
        """Inverse of ``str``.  Raises ValueError for text that no kernel prints."""
        dtypes = "|".join(dtype.value for dtype in IO_DTYPES)
        match = re.fullmatch(rf"(\w+)_({dtypes})_(\w+)", text)
        if not match:
            raise ValueError(f"{text!r} is not <family>_<kind>[_<variant>]_<dtype>_<point>")
        return cls(GemmUnit.parse(f"{match[1]}_{match[3]}"), DType(match[2]))


@dataclass(frozen=True, slots=True, order=True)
class ElementKernel:
    """Name of a unit's kernel for an element type, where no point follows: ``<base>_<dtype>``.

    The base is the unit's name, such as ``group_sum`` or ``pointwise_<op>_<direction>``.
    """

    base: str
    dtype: DType

    def __str__(self) -> str:
        return f"{self.base}_{self.dtype.value}"

    @classmethod
    def parse(cls, text: str) -> ElementKernel:
        """Inverse of ``str``.  Raises ValueError for text that no kernel prints."""
        base, _, dtype = text.rpartition("_")
        if not re.fullmatch(_PART, base):
            raise ValueError(f"{text!r} is not <base>_<dtype>")
        return cls(base, DType(dtype))


def default_namespace(prefix: str, arch: str) -> str:
    """Namespace of a bundle's ops: ``<prefix>_<arch>``."""
    return f"{prefix}_{arch}"


def is_derived(name: str) -> bool:
    """Whether a name is one that is made of another's, so that no spec can have it."""
    return _DERIVED.fullmatch(name) is not None


def gradient(tensor: str) -> str:
    """Name of the gradient of a tensor."""
    return prefixed("d", tensor)


def partial_gradient(name: str, number: int) -> str:
    """Name of a gradient by way of one of the ops that read the tensor, counted from 1."""
    return f"{name}_partial_{number}"


def total_gradient(name: str) -> str:
    """Name of the sum of the gradient that comes in for an output and those of its readers."""
    return f"{name}_total"


def terms_of(name: str) -> str:
    """Name of what the gradient of an operand that all rows share is the column sum of."""
    return f"{name}_terms"


def need(tensor: str) -> str:
    """Name of the flag that asks for the gradient of a tensor."""
    return prefixed("need_d", tensor)


def main_grad(parameter: str) -> str:
    """Name of the buffer of the caller's that a parameter's gradient goes to."""
    return f"{parameter}_main_grad"


def parameter_argument(path: str) -> str:
    """``fc1.weight`` of a state dict as a function argument: ``fc1_weight``."""
    return path.replace(".", "_")


def camel(snake: str) -> str:
    """``grouped_linear`` -> ``GroupedLinear``."""
    return "".join(part.capitalize() for part in snake.split("_"))
