"""A cell's two ops beside its reference, on any device, under any recipe.

Arguments are found by the names that the reference gives its parameters, so that nothing here
repeats what a recipe saves or keeps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import bundles
import gpu_support as support
import torch
from torch import Tensor

Tensors = Mapping[str, Tensor | None]
NEED = "need_d"


@dataclass(frozen=True)
class Outcome:
    """What both programs gave.

    Attributes:
        y: result.
        kept: what the forward left for the backward besides its arguments.
        gradients: by parameter or input; empty tensors stand for what nobody asked for.
        states: after both programs, by name.
    """

    y: Tensor
    kept: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]
    states: dict[str, Tensor] = field(default_factory=dict)


class Programs:
    """Forward and backward of one cell."""

    def __init__(self, bundle: ModuleType, cell: str) -> None:
        self.cell = cell
        self.tests: Any = bundles.load_cell(bundle, f"tests.test_{cell}")
        self.reference: Any = bundles.load_cell(bundle, f"reference.{cell}")
        self.module: Any = bundles.load_cell(bundle, cell)
        self._bundle = bundle

    def _op(self, direction: str) -> Callable[..., Any]:
        """The one op of a direction."""
        return support.op_of(self._bundle, f"{self.cell}_{direction}")

    def inputs(
        self, dtype: torch.dtype, splits: list[int] | None, sizes: Mapping[str, int]
    ) -> dict[str, Tensor]:
        """Arguments and fresh state, the same numbers for the same sizes."""
        words = {} if splits is None else {"splits": splits}
        made: dict[str, Tensor] = self.tests.make_inputs(
            dtype, bundles.DEVICE, sizes=dict(sizes), **words
        )
        return made

    def step(self, case: support.Case, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs of a case, and dy."""
        sizes = {"T": case.tokens, "E": case.groups, "K": case.k, "N": case.n}
        tensors = self.inputs(dtype, list(case.splits), sizes)
        return tensors, support.randn((case.tokens, case.n), dtype, 9)

    def states(self, tensors: Tensors) -> dict[str, Tensor]:
        """Copies of what the ops change in place."""
        found = {name: tensors[name] for name in self.tests.STATES}
        return {name: tensor.clone() for name, tensor in found.items() if tensor is not None}

    def compiled(
        self, tensors: Tensors, dy: Tensor, needs: Collection[str] | None = None
    ) -> Outcome:
        """The ops as they are dispatched; state is copied before."""
        states = self.states(tensors)
        forward, backward = self._op("forward"), self._op("backward")
        results = _tuple(forward(*self._arguments("forward", {**tensors, **states}, needs)))
        given = self._for_backward({**tensors, **states}, dy, results)
        gradients = backward(*self._arguments("backward", given, needs))
        return Outcome(results[0], results[1:], _tuple(gradients), states)

    def plain(self, tensors: Tensors, dy: Tensor) -> Outcome:
        """The reference, in plain PyTorch on the same device; all gradients."""
        states = self.states(tensors)
        results = self._reference("forward", {**tensors, **states}, states)
        given = self._for_backward({**tensors, **states}, dy, results)
        gradients = self._reference("backward", given, states)
        return Outcome(results[0], results[1:], gradients, states)

    def call(self, direction: str, tensors: Tensors, needs: Collection[str]) -> Callable[[], Any]:
        """One op, ready to run again and again."""
        arguments = self._arguments(direction, tensors, needs)
        op = self._op(direction)
        return lambda: op(*arguments)

    def gradient(self, name: str, tensors: Tensors, dy: Tensor) -> Tensor:
        """One gradient alone, of a step from the state as it is; that state is copied before."""
        kept = self.backward_tensors({**tensors, **self.states(tensors)}, dy)
        results = _tuple(self.call("backward", kept, {name})())
        flags = [flag for flag in self._names("backward") if flag.startswith(NEED)]
        found = results[flags.index(f"{NEED}{name}")]
        assert found is not None
        return found

    def add_gradient(self, total: Tensor, tensors: Tensors, dy: Tensor) -> Tensor:
        """The same of the weight, of a cell that adds it to `total`; returns that."""
        given = {**tensors, **self.states(tensors), "weight_main_grad": total}
        self.call("backward", self.backward_tensors(given, dy), {"weight"})()
        return total

    def backward_tensors(self, tensors: Tensors, dy: Tensor) -> dict[str, Tensor | None]:
        """What the backward reads, after one forward."""
        results = _tuple(self._op("forward")(*self._arguments("forward", tensors, None)))
        return self._for_backward(tensors, dy, results)

    def _names(self, direction: str) -> list[str]:
        return list(inspect.signature(getattr(self.reference, direction)).parameters)

    def _arguments(
        self, direction: str, tensors: Tensors, needs: Collection[str] | None
    ) -> list[Any]:
        """Tensors by name, then flags: all of them, or those of the gradients in `needs`."""
        return [
            (needs is None or name.removeprefix(NEED) in needs)
            if name.startswith(NEED)
            else tensors[name]
            for name in self._names(direction)
            if name.startswith(NEED) or name in tensors
        ]

    def _for_backward(
        self, tensors: Tensors, dy: Tensor, results: tuple[Tensor | None, ...]
    ) -> dict[str, Tensor | None]:
        """The backward's tensors by name: results that are kept come in the order it has them."""
        names = [name for name in self._names("backward") if not name.startswith(NEED)]
        kept = [name for name in names if name not in tensors and name != "dy"]
        # An op that changes state returns a tensor of shape [0] for what nobody asked for.
        there = (None if each is not None and each.shape == (0,) else each for each in results[1:])
        given = {**tensors, "dy": dy, **dict(zip(kept, there, strict=True))}
        return {name: given[name] for name in names}

    def _reference(
        self, direction: str, tensors: Tensors, states: dict[str, Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Results of a reference; the new values of what it changes come last."""
        results = _tuple(
            getattr(self.reference, direction)(*self._arguments(direction, tensors, None))
        )
        changed = [name for name in self._names(direction) if name in states]
        for name, value in zip(changed, results[len(results) - len(changed) :], strict=True):
            assert value is not None
            states[name].copy_(value)
        return results[: len(results) - len(changed)]


def _tuple(results: Any) -> tuple[Tensor | None, ...]:
    return results if isinstance(results, tuple) else (results,)
