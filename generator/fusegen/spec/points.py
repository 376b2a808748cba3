"""Points of kernels: configurations of the families that there are, in their own terms."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from ..families.family import Config
from ..families.registry import CONFIGS


class _OfAnyFamily:
    """A value of any type of configuration; which one a family has is checked with its spec."""

    def __get_pydantic_core_schema__(
        self, annotated: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        union = handler.generate_schema(functools.reduce(operator.or_, CONFIGS))
        return core_schema.no_info_wrap_validator_function(_of_likeliest, union)


def _of_likeliest(value: object, of_any: core_schema.ValidatorFunctionWrapHandler) -> Config:
    """A point of the type that most of its keys are of, so that problems are told of that alone."""
    if not isinstance(value, Mapping):
        found: Config = of_any(value)
        return found
    return _adapter(max(CONFIGS, key=lambda each: len(_keys(each) & {*value}))).validate_python(
        value
    )


def _keys(config: Any) -> set[object]:
    return {each.name for each in fields(config)}


@functools.cache
def _adapter(config: type[Config]) -> TypeAdapter[Config]:
    return TypeAdapter(config)


Point = Annotated[Config, _OfAnyFamily()]
_ADAPTER: TypeAdapter[Config] = TypeAdapter(Point)


def point_of(value: object) -> Config:
    """The point that a value of a spec says.  Raises ValueError where it is none."""
    return _ADAPTER.validate_python(value)


def as_spec(point: Config) -> dict[str, Any]:
    """Inverse of ``point_of``: fields in their order, of plain types."""
    found: dict[str, Any] = _ADAPTER.dump_python(point, mode="json")
    return found


def parse_point(name: str) -> Config:
    """The point of a name.

    Raises:
        ValueError: no family has such a configuration.
    """
    problems = []
    for config in CONFIGS:
        try:
            return config.parse(name)
        except ValueError as error:
            problems.append(str(error))
    raise ValueError("; ".join(problems))
