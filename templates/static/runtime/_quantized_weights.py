"""Weights that a module has as quantised copies alone: what stands in their place, and state dicts.

In a weight's place stands a parameter of its shape and type that holds one element, NaN, expanded:
gradients, hooks and `main_grad` are those of any parameter, and whoever reads it notices.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import _parts
from ._quantized_tensors import is_placeholder, placeholder
from .reference import _quantize as quantized

_HIGH = (torch.bfloat16, torch.float16, torch.float32)
_KEPT = re.compile(r"(.*\.)?((input|weight|(grad_)?output)_(amax_history|scale)|rng_state)")
"""What recipes keep between steps, by the names that all modules have for it."""


@dataclass(frozen=True)
class Weight:
    """A weight, where its copies are, and what else quantising it changes.

    Attributes:
        argument: of the function `refresh_weights`.
        path: of what stands in its place.
        rowwise: paths of codes, scales and, where the format has them, amaxes of the rowwise copy.
        copies: paths of all buffers of its copies, by argument.
        state: first value of what the recipe keeps of it between refreshes, by path; without one,
            as for random state, that of the module goes on.
        records: paths of statistics, by argument.
    """

    argument: str
    path: str
    rowwise: tuple[str, ...]
    copies: Mapping[str, str]
    state: Mapping[str, float | None]
    records: Mapping[str, str]


@dataclass(frozen=True)
class Held:
    """What a module is made of whose weights are quantised.

    Attributes:
        cell: for messages.
        weights: all of them.
        kept: arguments of `refresh` that hold what the recipe keeps between refreshes.
        quantization, layout: of the copies.
        refresh: the function `refresh_weights`.
    """

    cell: str
    weights: tuple[Weight, ...]
    kept: tuple[str, ...]
    quantization: quantized.Quantization
    layout: quantized.Layout
    refresh: Callable[..., None]

    @property
    def copies(self) -> tuple[str, ...]:
        """Paths of all copies."""
        return tuple(path for weight in self.weights for path in weight.copies.values())


def empty_weight(weight: Tensor) -> Tensor:
    """Memory for what a placeholder stands for."""
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _refuse_to_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Fused optimisers would write past the one element that a placeholder has.

    Raises:
        RuntimeError: one with a gradient is among the optimiser's parameters.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and is_placeholder(parameter):
                raise RuntimeError(
                    f"{type(optimizer).__name__}: a parameter {[*parameter.shape]} has no memory "
                    "to step on: its weight is held quantised; hand the optimiser a master of it, "
                    "and `refresh_weights` the master after each step"
                )


register_optimizer_step_pre_hook(_refuse_to_step)


def stand_in(cell: str, name: str, weight: Tensor) -> Tensor:
    """What stands in a weight's place; another tensor's values would not be used.

    Raises:
        RuntimeError: a wrapper or functional_call put another one there.
    """
    if weight.numel() > 1 and not is_placeholder(weight):
        raise RuntimeError(
            f"{cell}: {name}: expected the module's own parameter, which has no values, got "
            "another tensor, whose values would not be used; wrappers that make weights "
            "(parametrize, PEFT, FSDP) and functional_call need a module generated without "
            "quantized_weights"
        )
    return weight


def given(cell: str, name: str, weight: Tensor, stands: Tensor) -> Tensor:
    """A weight in high precision, in the type of the module.

    Args:
        cell: for messages.
        name: of the argument.
        weight: bfloat16, float16 or float32.
        stands: what stands in its place in the module.

    Raises:
        RuntimeError: it is not of the module's shape or device, or of another type.
    """
    expected = f"{cell}: {name}: expected"
    if weight.dtype not in _HIGH:
        raise RuntimeError(
            f"{expected} dtype bfloat16, float16 or float32, got {str(weight.dtype)[6:]}"
        )
    if weight.shape != stands.shape:
        raise RuntimeError(f"{expected} shape {[*stands.shape]}, got {[*weight.shape]}")
    if weight.device != stands.device:
        raise RuntimeError(
            f"{expected} device {stands.device}, as its copies, got {weight.device}; move it there"
        )
    return weight.to(stands.dtype)


class QuantizedWeights(_parts.KeepsBuffers):
    """A module whose weights are copies in the recipe's format alone.

    Attributes:
        held: what it is made of.
    """

    held: ClassVar[Held]

    def __init__(self) -> None:
        super().__init__()
        self._placeholder_keys: tuple[str, ...] = ()
        self.register_state_dict_post_hook(_without_placeholders)
        self.register_load_state_dict_pre_hook(_quantize_given)
        self.register_load_state_dict_post_hook(_after_load)

    def dequantized_state_dict(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Parameters as a module of any recipe has them, weights in high precision among them.

        What the recipe keeps between steps is left out: amax histories, their scales, random state.
        Another module that keeps such state loads this with `strict=False`, and goes on with its
        own; one of quantised weights does so by itself.

        Args:
            dtype: of the weights, of which every value is rounded to it.

        Returns:
            Weights as their rowwise copies stand for; other parameters, detached and not copied.
        """
        weights = {weight.path: weight for weight in self.held.weights}
        return {
            name: self._dequantized(weights[name]).to(dtype)
            if name in weights
            else parameter.detach()
            for name, parameter in self.named_parameters()
        }

    def _dequantized(self, weight: Weight) -> Tensor:
        q = self.held.quantization
        data, scale, *amax = (self.get_buffer(path) for path in weight.rowwise)
        return quantized.dequantize(
            quantized.Operand(
                data.view(quantized.DTYPES[q.format]),
                scale.view(quantized.DTYPES[q.scale_dtype]),
                q,
                tuple(self.get_parameter(weight.path).shape),
                amax[0] if amax else None,
                layout=self.held.layout,
            )
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedWeights:
        """As in `KeepsBuffers`, and placeholders stay so."""
        parameters = [self.get_parameter(weight.path) for weight in self.held.weights]
        places = {id(parameter): parameter for parameter in parameters}  # alive, as in there

        def move(tensor: Tensor) -> Tensor:
            if id(tensor) not in places:
                return fn(tensor)
            element = fn(tensor.detach()[(0,) * tensor.dim()])
            return element.fill_(math.nan).expand(tensor.shape)  # `to_empty` leaves any number

        super()._apply(move, recurse)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeights:
        """As of any module; a parameter's own would allocate what a placeholder stands for."""
        for weight in self.held.weights:
            old = self.get_parameter(weight.path)
            memo[id(old)] = _parameter(old, old.device)
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__dict__, memo))
        return new


def _parameter(old: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Another placeholder like one, on a device."""
    stands = placeholder(old.shape, device, old.dtype)
    return nn.Parameter(stands, requires_grad=old.requires_grad)


def _without_placeholders(
    layer: QuantizedWeights, state: dict[str, Any], prefix: str, _: object
) -> None:
    for weight in layer.held.weights:
        state.pop(prefix + weight.path, None)


def _quantize_given(
    layer: QuantizedWeights,
    state: dict[str, Any],
    prefix: str,
    metadata: object,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Turn weights of a state that is about to be loaded into copies."""
    held = layer.held
    layer._placeholder_keys = tuple(prefix + weight.path for weight in held.weights)
    found = [weight for weight in held.weights if prefix + weight.path in state]
    masters = {weight.argument: state.pop(prefix + weight.path) for weight in found}
    if not found:
        return
    parameters = dict(layer.named_parameters())
    own = {prefix + n: buffer for n, buffer in layer.state_dict().items() if n not in parameters}
    _drop_foreign(state, prefix, own.keys())
    replaced = {prefix + path for weight in found for path in weight.copies.values()}
    try:
        if replaced & state.keys():
            raise RuntimeError(
                f"{held.cell}: {found[0].path}: expected a weight or its copies, got both; leave "
                "one of them out of the state"
            )
        state |= {prefix + path: made for path, made in _quantized(layer, masters, state, prefix)}
    except RuntimeError as error:
        errors.append(str(error))
    # Copies of other weights are missed; what the recipe keeps between steps goes on.
    copies = {prefix + path for path in held.copies} - replaced
    for key, buffer in own.items():
        if key not in copies and not buffer.is_meta:
            state.setdefault(key, buffer)


def _drop_foreign(state: dict[str, Any], prefix: str, own: Iterable[str]) -> None:
    """Leave out what only the recipe keeps between steps that a state comes from."""
    for key in [key for key in state if key.startswith(prefix) and key not in own]:
        if _KEPT.fullmatch(key[len(prefix) :]):
            del state[key]


def _quantized(
    layer: QuantizedWeights, masters: Mapping[str, Tensor], state: Mapping[str, Tensor], prefix: str
) -> Iterator[tuple[str, Tensor]]:
    """Copies of weights, and what else quantising them gives, with their paths.

    Delayed scaling quantises by the scale in the state; where there is none, by that which follows
    from these weights.
    """
    held = layer.held
    device = layer.get_parameter(held.weights[0].path).device
    if device.type == "meta":  # loaded with `assign=True`
        device = next(iter(masters.values())).device
    weights: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}
    tensors = {n: torch.empty_like(layer.get_buffer(n), device=device) for n in held.kept}
    kept = _states_in(layer, tensors)
    records: dict[str, Tensor] = {}
    lacking: list[str] = []
    for weight in held.weights:
        stands = _parameter(layer.get_parameter(weight.path), device)
        master = masters.get(weight.argument, stands)
        weights[weight.argument] = given(held.cell, weight.path, master.to(device), stands)
        for argument, path in weight.copies.items():
            copies[argument] = torch.empty_like(layer.get_buffer(path), device=device)
        for argument, path in weight.records.items():
            records[argument] = torch.zeros_like(layer.get_buffer(path), device=device)
        for path, first in weight.state.items():
            known = state.get(prefix + path, layer.get_buffer(path) if first is None else first)
            lacking += [] if isinstance(known, Tensor) else [path]
            kept[path].copy_(known) if isinstance(known, Tensor) else kept[path].fill_(known)
    if lacking:
        moved = {argument: tensor.clone() for argument, tensor in tensors.items()}
        held.refresh(**weights, **copies, **moved, **records, update_state=True)
        after = _states_in(layer, moved)
        for path in lacking:
            kept[path].copy_(after[path])
    updates = {"update_state": False} if kept else {}
    held.refresh(**weights, **copies, **tensors, **records, **updates)
    for weight in held.weights:
        if weight.argument in masters:
            yield from ((path, copies[argument]) for argument, path in weight.copies.items())
            yield from ((path, kept[path]) for path in weight.state)


def _states_in(layer: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the recipe keeps, by path, in tensors like the layer's buffers of these names."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found |= _parts.states_in(layer, name, tensor) or {name: tensor}
    return found


def _after_load(layer: QuantizedWeights, keys: Any) -> None:
    """No state has placeholders; they are where the copies are."""
    for key in layer._placeholder_keys:
        if key in keys.missing_keys:
            keys.missing_keys.remove(key)
    for weight in layer.held.weights:
        old = layer.get_parameter(weight.path)
        device = layer.get_buffer(weight.rowwise[0]).device
        if old.device != device:
            holder, _, name = weight.path.rpartition(".")
            new = _parameter(old, device)
            vars(new).update(vars(old))
            setattr(layer.get_submodule(holder), name, new)
