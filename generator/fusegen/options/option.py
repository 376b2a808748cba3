"""What an option of a generated module is: its choices, and where it can be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scope:
    """What every step of a module runs in: given the step's name before, and left after it.

    Attributes:
        python: ``templates/static/reference/_<python>.py`` has ``step(name, *, runs=True)``, a
            context manager of the reference; ``runs`` says whether the step does.
        cpp: ``templates/static/csrc/fusegen/host/<cpp>.h`` has a class, named by the same words in
            capitals (``step_log``: ``StepLog``), which launchers make of the step's name.
    """

    python: str
    cpp: str

    @property
    def cpp_class(self) -> str:
        """The name of the class."""
        return "".join(word.capitalize() for word in self.cpp.split("_"))


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of an option.

    Attributes:
        word: what people write, and what stands in the names of cells.
        summary: one line.
        scope: what every step runs in where it is chosen; None for nothing.
        applies_to: why a module that has the option cannot have this choice, or None; None in its
            place where every such module can.
    """

    word: str
    summary: str
    scope: Scope | None = None
    applies_to: Callable[[ModuleFacts], str | None] | None = None


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """What decides which options a module has.

    Attributes:
        ops: names of its ops, in the order of the chain.
        quantizes: an op makes quantised copies, of its own or for its GEMMs.
        gemms: an op multiplies matrices.
        chained_gemms: so do several of them.
        weights: an operand of a GEMM is a parameter.
        weight_gradients: a GEMM gives the gradient of a parameter.
        grouped_bias: a grouped GEMM adds a bias.
        grouped_weights: an operand of a grouped GEMM is a parameter.
        plain_weights: a GEMM whose rows are in no groups has a parameter.
        halves: an expression reads the halves of a row, as gated activations do.
        activated_gemms: an activation reads what a GEMM gives.
        gathered_gemms: a GEMM reads rows of tokens that the op before it gathers.
        first_of_gemms: GEMMs of the first op, and no other op, read the first input.
        last_of_gemms: a GEMM of the last op gives the one output.
        adds_around_gemms: ops before the first GEMM, and behind the last, move rows and add them
            up, and do nothing else to them.
        given_groups: a GEMM's rows are in groups whose sizes the module is given.
        gives_rows: its one output is a tensor of rows, of the module's own type, and not read again
            by the backward.
        inner_activations: an op of the chain reads what an expression or a norm before it gives.
        chunks: an op has a chunk of the rows of a tensor at a time.
        fp32_products: a GEMM of a parameter that no recipe quantises gives fp32.
    """

    ops: tuple[str, ...]
    quantizes: bool = False
    gemms: bool = False
    chained_gemms: bool = False
    weights: bool = False
    weight_gradients: bool = False
    grouped_bias: bool = False
    grouped_weights: bool = False
    plain_weights: bool = False
    halves: bool = False
    activated_gemms: bool = False
    gathered_gemms: bool = False
    first_of_gemms: bool = False
    last_of_gemms: bool = False
    adds_around_gemms: bool = False
    given_groups: bool = False
    gives_rows: bool = False
    inner_activations: bool = False
    chunks: bool = False
    fp32_products: bool = False


@dataclass(frozen=True, slots=True)
class RecipeFacts:
    """What decides which options have something to choose under a recipe.

    Attributes:
        name: of the recipe.
        quantizes: it names a role.
        weights: it quantises weights.
        history: it keeps amaxes of a role from step to step.
        input_bits: of an element of a GEMM's input that it quantises; 0 where it leaves that alone.
    """

    name: str
    quantizes: bool = False
    weights: bool = False
    history: bool = False
    input_bits: int = 0


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Two choices that no module has together, in either order, and why."""

    word: str
    other: str
    reason: str


def in_every_module(facts: ModuleFacts) -> str | None:
    """No reason against any module."""
    return None


def under_every_recipe(facts: RecipeFacts) -> str | None:
    """No reason against any recipe."""
    return None


@dataclass(frozen=True, slots=True)
class Option:
    """What is decided when a module is generated.

    Attributes:
        name: what ``without`` of a module and ``options`` of a fusion call it.
        summary: what it decides, in one line.
        choices: the first is the default, which no cell is named after.
        applies_to: why a module cannot have it, or None.
        applies_under: why it has nothing to choose under a recipe, or None.
        excludes: choices that its own may not be combined with.
    """

    name: str
    summary: str
    choices: tuple[Choice, ...]
    applies_to: Callable[[ModuleFacts], str | None] = in_every_module
    applies_under: Callable[[RecipeFacts], str | None] = under_every_recipe
    excludes: tuple[Exclusion, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The words of all choices, the default first."""
        return tuple(choice.word for choice in self.choices)

    @property
    def default(self) -> str:
        """The word of the first choice."""
        return self.choices[0].word

    @property
    def further(self) -> tuple[str, ...]:
        """The words of the choices that cells are named after."""
        return self.words[1:]
