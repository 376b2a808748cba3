"""Modules: an op or a chain of them, under one class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..ir.fields import STRICT
from .fields import ClassName, Edition, ExprField, Line, Name, Scalar, Symbol
from .op import TensorSpec


class OptionName(str, Enum):
    """What a module may offer to be decided at generation time."""

    MAIN_GRAD = "main_grad"
    DELAY_WGRAD = "delay_wgrad"
    WEIGHT_CACHE = "weight_cache"
    SCALE_BIAS = "scale_bias"
    GLU_INTERLEAVE = "glu_interleave"
    SAVE = "save"
    BACKWARD_PRECISION = "backward_precision"
    QUANTIZED_INPUT = "quantized_input"
    QUANTIZED_OUTPUT = "quantized_output"
    OUTPUT_DTYPE = "output_dtype"
    PARAMETER_PER_GROUP = "parameter_per_group"
    TENSOR_PARALLEL = "tensor_parallel"
    SEQUENCE_PARALLEL = "sequence_parallel"
    AMAX_REDUCTION = "amax_reduction"
    DEBUG = "debug"
    RANGES = "ranges"


class MainGrad(str, Enum):
    """Where a product leaves the gradient of a weight: in fp32 where the type is not named."""

    RETURNED = "returned_grad"
    ADD = "add_to_main_grad"
    WRITE = "write_main_grad"
    ADD_16 = "add_to_16_bit_main_grad"
    WRITE_16 = "write_16_bit_main_grad"

    @property
    def adds(self) -> bool:
        """Whether to what is there."""
        return self in (MainGrad.ADD, MainGrad.ADD_16)

    @property
    def narrow(self) -> bool:
        """Whether in the type of the weight."""
        return self in (MainGrad.ADD_16, MainGrad.WRITE_16)


class BackwardPrecision(str, Enum):
    """What the products of a backward read."""

    QUANTIZED = "quantized_backward"
    HIGH = "high_precision_backward"
    DEQUANTIZED = "dequantized_backward"


@dataclass(frozen=True, slots=True, config=STRICT)
class ChainItem:
    """One op of a module.

    Attributes:
        op: name of the op.
        as_: prefix of its parameters; needed where the chain has more than one op.
        with_: op input -> tensor of the module; the first input defaults to the result before it,
            the others to the module input of the same name.
        out: name of its result; the last item's results are the module's outputs.
        dims: op dimension -> expression in the module's dimensions; defaults to the same symbol.
        attributes: values that replace the op's defaults.
    """

    op: Name
    as_: Annotated[Name | None, Field(alias="as")] = None
    with_: Annotated[Mapping[Name, Name], Field(alias="with", default_factory=dict)] = field(
        default_factory=dict
    )
    out: Name | None = None
    dims: Mapping[Symbol, ExprField] = field(default_factory=dict)
    attributes: Mapping[Name, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, config=STRICT)
class ModuleSpec:
    """What a user asks for by name: one op, or a chain of them.

    Attributes:
        class_: name of the generated ``nn.Module``.
        op: the one op; its summary, dims and inputs are the module's.
        chain: or several ops in a row; then summary, dims and inputs stand here.
        options: choices the module offers at generation time; the first is the default.
    """

    edition: Edition
    module: Name
    class_: Annotated[ClassName, Field(alias="class")]
    op: Name | None = None
    summary: Line | None = None
    dims: Mapping[Symbol, Name] = field(default_factory=dict)
    inputs: Mapping[Name, TensorSpec] = field(default_factory=dict)
    chain: tuple[ChainItem, ...] = ()
    options: Mapping[OptionName, tuple[Name, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.module
