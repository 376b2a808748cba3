"""What a pass is: a pure function from draft to draft, and what it may read besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..ir.naming import Cell
from ..math import Derivations
from ..spec.arch import ArchSpec
from ..spec.load import SpecSet
from ..spec.module import ModuleSpec
from ..spec.recipe import RecipeSpec
from .draft import Draft, Property


@dataclass(frozen=True, slots=True)
class Context:
    """All that passes may read besides the draft; the same for every one of them.

    Attributes:
        cell: what is made.
        specs: everything that names refer to.
        module, recipe, arch: those of the cell and the bundle.
        options: words of the choices that differ from the first one of their option.
        derivations: derived pointwise programs of earlier runs.
        fuel: fusions are applied no more than this often; None is no limit.
    """

    cell: Cell
    specs: SpecSet
    module: ModuleSpec
    recipe: RecipeSpec
    arch: ArchSpec
    options: tuple[str, ...]
    derivations: Derivations
    fuel: int | None = None

    def chosen(self, words: tuple[str, ...]) -> str | None:
        """The one of these words that is chosen, if any."""
        return next((word for word in words if word in self.options), None)

    @property
    def dims(self) -> Mapping[str, str]:
        """Symbols and keywords of the module; those of its op where it is a single one."""
        return self.module.dims or self.specs.ops[self.module.op or ""].dims


@dataclass(frozen=True, slots=True)
class Pass:
    """One step from specs to a plan.

    Attributes:
        name: what ``explain --after`` calls it.
        summary: one sentence for the list in the documentation.
        run: the draft after it, of the draft before it.
        needs: what has to hold of the draft before.
        gives: what holds of the draft after.
        before: what must not hold yet, because the pass would come too late.
        options: words of one choice; the pass runs only where one of them is chosen, and always
            where there are none.
    """

    name: str
    summary: str
    run: Callable[[Draft, Context], Draft]
    needs: frozenset[Property] = frozenset()
    gives: frozenset[Property] = frozenset()
    before: frozenset[Property] = frozenset()
    options: tuple[str, ...] = ()

    def applies(self, context: Context) -> bool:
        """Whether it runs for a cell."""
        return not self.options or context.chosen(self.options) is not None


Observer = Callable[[Pass, Draft, Draft], None]
"""Called after every pass with the pass and the draft before and after it."""
