"""Typed conditions on sizes: one object that prints to C++, Python and English, and evaluates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Comparison(str, Enum):
    """Comparisons as they are spelled in specs."""

    LT = "lt"
    LE = "le"
    GT = "gt"
    GE = "ge"
    EQ = "eq"
    MULTIPLE_OF = "multiple_of"


class SizeVariable(str, Enum):
    """What a selection rule may ask about: sizes a launch knows on the host."""

    TOKENS = "tokens"
    GROUPS = "groups"
    MEAN_GROUP_TOKENS = "mean_group_tokens"
    ROWS = "rows"
    COLUMNS = "columns"
    K = "k"
    TILES = "tiles"
    SMS = "sms"


_SIGN = {
    Comparison.LT: "<",
    Comparison.LE: "<=",
    Comparison.GT: ">",
    Comparison.GE: ">=",
    Comparison.EQ: "==",
}


@dataclass(frozen=True, slots=True)
class Condition:
    """``variable comparison value``, such as mean_group_tokens < 512."""

    variable: SizeVariable
    comparison: Comparison
    value: int

    def __str__(self) -> str:
        if self.comparison is Comparison.MULTIPLE_OF:
            return f"{self.variable.value} % {self.value} == 0"
        return f"{self.variable.value} {_SIGN[self.comparison]} {self.value}"

    def holds(self, sizes: Mapping[SizeVariable, int]) -> bool:
        """Whether the condition is true of the given sizes."""
        size, value = sizes[self.variable], self.value
        match self.comparison:
            case Comparison.LT:
                return size < value
            case Comparison.LE:
                return size <= value
            case Comparison.GT:
                return size > value
            case Comparison.GE:
                return size >= value
            case Comparison.EQ:
                return size == value
            case Comparison.MULTIPLE_OF:
                return size % value == 0


@dataclass(frozen=True, slots=True)
class Predicate:
    """All of some conditions; empty is always true."""

    conditions: tuple[Condition, ...]

    def __str__(self) -> str:
        return " and ".join(str(condition) for condition in self.conditions) or "always"

    def holds(self, sizes: Mapping[SizeVariable, int]) -> bool:
        """Whether every condition is true of the given sizes."""
        return all(condition.holds(sizes) for condition in self.conditions)

    def to_cpp(self) -> str:
        """A C++ expression over local variables named as the size variables are."""
        return " && ".join(str(condition) for condition in self.conditions) or "true"


def parse_predicate(when: Mapping[str, Mapping[str, int]]) -> Predicate:
    """Read ``{mean_group_tokens: {ge: 64, lt: 512}}``.

    Raises:
        ValueError: an unknown variable or comparison, or a value that cannot be meant.
    """
    conditions = []
    for variable, comparisons in when.items():
        for comparison, value in comparisons.items():
            if value < 0 or (comparison == "multiple_of" and value == 0):
                raise ValueError(f"{variable} {comparison} {value}: sizes are not negative")
            conditions.append(Condition(SizeVariable(variable), Comparison(comparison), value))
    return Predicate(tuple(conditions))
