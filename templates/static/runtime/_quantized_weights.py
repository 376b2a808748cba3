"""Weights that a module has as quantised copies alone: what stands in their place, and state dicts.

In a weight's place stands a parameter of its shape and type that holds one element, NaN, expanded:
gradients, hooks and `main_grad` are those of any parameter, and whoever reads it notices.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import _library
from .reference import _quantize as quantized

_KEPT = re.compile(r"(.*\.)?((input|weight|grad_output)_(amax_history|scale)|rng_state)")
"""What recipes keep between steps, by the names that all modules have for it."""


@dataclass(frozen=True)
class Weight:
    """A weight, where its copies are, and what else quantising it changes.

    Attributes:
        argument: of the function `refresh_weights`.
        path: of what stands in its place.
        rowwise: paths of codes, scales and, where the format has them, amaxes of the rowwise copy.
        copies: paths of all buffers of its copies, by argument.
        state: path and first value of what the recipe keeps of it between refreshes, by argument;
            without a value, as for random state, that of the module goes on.
    """

    argument: str
    path: str
    rowwise: tuple[str, ...]
    copies: Mapping[str, str]
    state: Mapping[str, tuple[str, float | None]]


@dataclass(frozen=True)
class Held:
    """What a module is made of whose weights are quantised.

    Attributes:
        cell: for messages.
        weights: all of them.
        quantization, layout: of the copies.
        refresh: the function `refresh_weights`.
    """

    cell: str
    weights: tuple[Weight, ...]
    quantization: quantized.Quantization
    layout: quantized.Layout
    refresh: Callable[..., None]

    @property
    def copies(self) -> tuple[str, ...]:
        """Paths of all copies."""
        return tuple(path for weight in self.weights for path in weight.copies.values())


def placeholder(
    shape: Sequence[int], device: torch.device | str | None, dtype: torch.dtype | None
) -> Tensor:
    """What stands in a weight's place: NaN of a shape that holds one element."""
    return torch.full((), math.nan, device=device, dtype=dtype).expand(shape)


def empty_weight(weight: Tensor) -> Tensor:
    """Memory for what a placeholder stands for."""
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


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
    expected, got = f"expected a floating-point tensor {[*stands.shape]}", [*weight.shape]
    if weight.shape != stands.shape or not weight.is_floating_point():
        raise RuntimeError(f"{cell}: {name}: {expected}, got {weight.dtype} {got}")
    if weight.device != stands.device:
        raise RuntimeError(
            f"{cell}: {name}: {expected} on {stands.device}, got one on {weight.device}; move it there"
        )
    return weight.to(stands.dtype)


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(weight: Tensor, dtype: torch.dtype) -> Tensor:
        return placeholder(weight.shape, weight.device, dtype)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx, dy):
        return dy.to(ctx.dtype), None


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """What autocast makes of a placeholder: one of another type, where `to` would allocate all."""
    return weight if weight.dtype == dtype else _Cast.apply(weight, dtype)


class QuantizedWeights(nn.Module):
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
                *amax,
                layout=self.held.layout,
            )
        )

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> QuantizedWeights:
        """As in `nn.Module`, but placeholders stay so, and a cast leaves copies in their formats."""
        places = {id(self.get_parameter(weight.path)) for weight in self.held.weights}
        spare = _library.sparing_copies(self, self.held.copies, fn)

        def move(tensor: Tensor) -> Tensor:
            if id(tensor) not in places:
                return spare(tensor)
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
    """Make a state of copies of one that has weights, before it is loaded."""
    held = layer.held
    layer._placeholder_keys = tuple(prefix + weight.path for weight in held.weights)
    found = [weight for weight in held.weights if prefix + weight.path in state]
    if not found:
        return
    for weight in found:
        if prefix + next(iter(weight.copies.values())) in state:
            errors.append(
                f"{held.cell}: {prefix}{weight.path}: expected a weight or its copies, got both; "
                "leave one of them out"
            )
    masters = {weight.argument: state.pop(prefix + weight.path) for weight in found}
    own = {prefix + name: buffer for name, buffer in layer.named_buffers()}
    for key in [key for key in state if key.startswith(prefix) and key not in own]:
        if _KEPT.fullmatch(key[len(prefix) :]):
            del state[key]  # of the recipe that the state comes from
    try:
        loaded = {prefix + name: tensor for name, tensor in _quantized(layer, masters, state, prefix)}
    except RuntimeError as error:
        errors.append(str(error))
        loaded = {}
    state.update(loaded)
    for key, buffer in own.items():  # what the recipe keeps between steps goes on
        copied = key.removeprefix(prefix) in held.copies
        if not buffer.is_meta and (errors or not copied):
            state.setdefault(key, buffer)


def _quantized(
    layer: QuantizedWeights, masters: dict[str, Tensor], state: Mapping[str, Tensor], prefix: str
) -> Iterator[tuple[str, Tensor]]:
    """Copies of weights, and what else quantising them gives, with their paths.

    Delayed scaling quantises by the scale in the state; where there is none, by that which follows
    from these weights.
    """
    held = layer.held
    weights: dict[str, Tensor] = {}
    fresh: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    lacking: set[str] = set()
    for weight in held.weights:
        stands = layer.get_parameter(weight.path)
        master = masters.get(weight.argument)
        device = stands.device
        if master is not None and stands.is_meta:
            device = master.device  # loaded with `assign=True`
        if device != stands.device:
            stands = _parameter(stands, device)
        weights[weight.argument] = (
            stands if master is None else given(held.cell, weight.path, master.to(device), stands)
        )
        for argument, path in weight.copies.items():
            fresh[argument] = torch.empty_like(layer.get_buffer(path), device=device)
        for argument, (path, fill) in weight.state.items():
            known = state.get(prefix + path, layer.get_buffer(path) if fill is None else None)
            if known is None:
                lacking.add(argument)
                kept[argument] = torch.full_like(layer.get_buffer(path), fill, device=device)
            else:
                kept[argument] = known.to(device, copy=True)
    moves = {"update_state": False} if kept else {}
    if lacking:
        first = {argument: tensor.clone() for argument, tensor in kept.items()}
        held.refresh(**weights, **fresh, **first, update_state=True)
        kept |= {argument: first[argument] for argument in lacking}
    held.refresh(**weights, **fresh, **kept, **moves)
    for weight in held.weights:
        if weight.argument in masters:
            yield from ((path, fresh[argument]) for argument, path in weight.copies.items())
            yield from ((path, kept[argument]) for argument, (path, _) in weight.state.items())


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
            new.__dict__.update(old.__dict__)
            setattr(layer.get_submodule(holder), name, new)
