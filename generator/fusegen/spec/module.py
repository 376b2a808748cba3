"""Modules: an op or a chain of them, under one class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from ..ir.fields import STRICT
from .fields import (
    ClassName,
    Edition,
    ExprField,
    Line,
    Name,
    OptionName,
    Scalar,
    ShapeField,
    Symbol,
    problem_at,
)
from .op import TensorSpec


@dataclass(frozen=True, slots=True, config=STRICT)
class ChainItem:
    """One op of a module.

    Attributes:
        op: name of the op.
        as_: prefix of its parameters; needed where the chain has more than one op.
        with_: op input -> module input or earlier result; the first input defaults to the first
            result of the op before it, the others to what has their own name.
        out: name of its first result, or of several by the op's names for them.
        dims: op dimension -> expression in the module's dimensions; defaults to the same symbol.
        attributes: values that replace the op's defaults.
        shape: of its result, for an op that leaves it open.
        recompute: whether the backward makes its results again, of what they were made from,
            instead of the forward saving them.
    """

    op: Name
    as_: Annotated[Name | None, Field(alias="as")] = None
    with_: Annotated[Mapping[Name, Name], Field(alias="with", default_factory=dict)] = field(
        default_factory=dict
    )
    out: Name | Mapping[Name, Name] | None = None
    dims: Mapping[Symbol, ExprField] = field(default_factory=dict)
    attributes: Mapping[Name, Scalar] = field(default_factory=dict)
    shape: ShapeField | None = None
    recompute: bool = False


@dataclass(frozen=True, slots=True, config=STRICT)
class ItemChange:
    """What a variant says otherwise of one op of the chain.

    Attributes:
        op: another op.
        with_: further or other tensors of its inputs.
        dims: further or other dimensions.
        attributes: further or other values.
        shape: another shape of its result.
    """

    op: Name | None = None
    with_: Annotated[Mapping[Name, Name], Field(alias="with", default_factory=dict)] = field(
        default_factory=dict
    )
    dims: Mapping[Symbol, ExprField] = field(default_factory=dict)
    attributes: Mapping[Name, Scalar] = field(default_factory=dict)
    shape: ShapeField | None = None

    def applied(self, item: ChainItem) -> ChainItem:
        """The item with what is said otherwise."""
        keywords: dict[str, Any] = {"as": item.as_, "with": {**item.with_, **self.with_}}
        return ChainItem(
            op=self.op or item.op,
            out=item.out,
            dims={**item.dims, **self.dims},
            attributes={**item.attributes, **self.attributes},
            shape=self.shape or item.shape,
            recompute=item.recompute,
            **keywords,
        )


@dataclass(frozen=True, slots=True, config=STRICT)
class VariantSpec:
    """A further module of the same spec: the same chain with other ops or sizes in it.

    Attributes:
        class_: name of the generated ``nn.Module``.
        summary: of the variant.
        chain: what it says otherwise, by the ``as`` of the ops of the chain.
        attributes: further or other values, of a module of one op.
    """

    class_: Annotated[ClassName, Field(alias="class")]
    summary: Line
    chain: Mapping[Name, ItemChange] = field(default_factory=dict)
    attributes: Mapping[Name, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, config=STRICT)
class ModuleSpec:
    """What a user asks for by name: one op, or a chain of them.

    A module has every option that applies to its ops; see ``offers``.

    Attributes:
        class_: name of the generated ``nn.Module``.
        op: the one op; its summary, dims and inputs are the module's.
        attributes: values that replace those of the one op; the module may have a summary then.
        dims: symbols of the shapes, each with the keyword it has in a constructor.
        inputs: of a chain, in the order of the generated function.
        chain: several ops in a row in place of ``op``; then summary, dims and inputs stand here.
        outputs: results of the chain that the module returns, in this order; where none is named,
            those of the last op.
        without: options that apply, and that the module does not have all the same.
        variants: further modules by name, each the same chain but for what it says otherwise.
    """

    edition: Edition
    module: Name
    class_: Annotated[ClassName, Field(alias="class")]
    op: Name | None = None
    attributes: Mapping[Name, Scalar] = field(default_factory=dict)
    summary: Line | None = None
    dims: Mapping[Symbol, Name] = field(default_factory=dict)
    inputs: Mapping[Name, TensorSpec] = field(default_factory=dict)
    chain: tuple[ChainItem, ...] = ()
    outputs: tuple[Name, ...] = ()
    without: tuple[OptionName, ...] = ()
    variants: Mapping[Name, VariantSpec] = field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _has_no_list_of_options(cls, value: Any) -> Any:
        if isinstance(value, dict) and "options" in value:
            raise problem_at(
                "options",
                "modules inherit every option that applies to them (`fusegen list options`);"
                " remove 'options', and name what this module is not to have, such as"
                " without: [debug]",
                "options",
            )
        return value

    @property
    def name(self) -> str:
        return self.module

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of its ops, in order."""
        return tuple(item.op for item in self.chain) or (self.op or "",)

    def variant(self, name: str) -> ModuleSpec:
        """The module that one of its variants is."""
        said = self.variants[name]
        unchanged = ItemChange()
        chain = tuple(
            said.chain.get(item.as_ or "", unchanged).applied(item) for item in self.chain
        )
        keywords: dict[str, Any] = {"class": said.class_}
        return ModuleSpec(
            edition=self.edition,
            module=name,
            op=self.op,
            attributes={**self.attributes, **said.attributes},
            summary=said.summary,
            dims=self.dims,
            inputs=self.inputs,
            chain=chain,
            outputs=self.outputs,
            without=self.without,
            **keywords,
        )
