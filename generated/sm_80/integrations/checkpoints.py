"""State dicts of PyTorch's, transformers' and TransformerEngine's layers as those of this bundle's.

    from <this package>.integrations import checkpoints

    prefix = "model.layers.0.mlp.experts."
    layer.load_state_dict(checkpoints.read(layer, state, checkpoints.EXPERTS, prefix))
    state |= checkpoints.write(layer, checkpoints.EXPERTS, prefix)

A `Layout` says where another library keeps each parameter; one of your own takes a few lines.
Values are only moved, so what is read and written again is the same, bit for bit.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import _library
from ._parameters import PARAMETERS, Parameters, cell_of

__all__ = [
    "DENSE",
    "EXPERTS",
    "FUSED_EXPERTS",
    "GPT_OSS_EXPERTS",
    "LINEARS",
    "MEGATRON_EXPERTS",
    "MIXTRAL_EXPERTS",
    "OWN",
    "TE_GROUPED_LINEAR",
    "TE_LAYER_NORM_LINEAR",
    "TE_LAYER_NORM_MLP",
    "TE_LINEAR",
    "TE_SINGLE_GROUPED_LINEAR",
    "UNGATED_EXPERTS",
    "UNGATED_FUSED_EXPERTS",
    "Layout",
    "Place",
    "read",
    "te_ops",
    "write",
]

GROUP = "{group}"
"""Stands for the number of an expert in the key of a tensor that each has one of."""

EXTRA = "_extra_state"
"""What TransformerEngine's modules keep besides parameters, as bytes."""


@dataclass(frozen=True)
class Place:
    """Where another library keeps a parameter.

    Attributes:
        keys: of the tensors whose rows, one after the other, are the parameter's: gate, then up.
            With ``{group}`` in it a key is of one tensor for each expert, without of one for all.
        transposed: a weight's rows are inputs, ``[K, N]``.
        block: rows of gate and up alternate in blocks of so many; 0 where gate is all before up.
    """

    keys: tuple[str, ...]
    transposed: bool = False
    block: int = 0


@dataclass(frozen=True)
class Layout:
    """How another library calls and lays out what modules of this bundle have.

    Attributes:
        name: for messages.
        places: by the parameter's path here; empty for the bundle's own names and layout.
        extra: prefixes of further ``_extra_state``; None where the library has none.
    """

    name: str
    places: Mapping[str, Place]
    extra: tuple[str, ...] | None = None


def _layout(
    name: str,
    keys: Mapping[str, str | tuple[str, ...]],
    extra: tuple[str, ...] | None = None,
) -> Layout:
    """One whose weights and biases have keys alike: ``fc1`` gives ``fc1.weight``, ``fc1.bias``.

    Args:
        name: of the layout.
        keys: by the part here, with ``*`` for ``weight`` and ``bias``.
        extra: as of the layout.
    """
    places = {}
    for part, given in keys.items():
        patterns = (given,) if isinstance(given, str) else given
        for kind in ("weight", "bias"):
            own = tuple(pattern.replace("*", kind) for pattern in patterns)
            places[f"{part}.{kind}" if part else kind] = Place(own)
    return Layout(name, places, extra)


OWN = Layout("this bundle's own", {})
"""One parameter for all experts, gate before up: what modules without options have."""

LINEARS = _layout("a list of torch.nn.Linear", {"": "{group}.*"})
"""Of `GroupedLinear`: an `nn.ModuleList` of `nn.Linear`.  A single `nn.Linear` is `OWN`."""

DENSE = _layout(
    "a gated MLP of transformers",
    {"fc1": ("gate_proj.*", "up_proj.*"), "fc2": "down_proj.*"},
)
"""Of `mlp_swiglu` and others with a gate: `LlamaMLP` and its like."""

EXPERTS = _layout(
    "experts by gate_proj, up_proj, down_proj",
    {"fc1": ("{group}.gate_proj.*", "{group}.up_proj.*"), "fc2": "{group}.down_proj.*"},
)
"""Checkpoints of Qwen, DeepSeek, OLMoE and others, and modules of transformers before 5."""

UNGATED_EXPERTS = _layout(
    "experts by up_proj, down_proj", {"fc1": "{group}.up_proj.*", "fc2": "{group}.down_proj.*"}
)
"""Checkpoints of Nemotron-H: experts without a gate."""

MIXTRAL_EXPERTS = _layout(
    "experts by w1, w3, w2",
    {"fc1": ("{group}.w1.*", "{group}.w3.*"), "fc2": "{group}.w2.*"},
)
"""Checkpoints of Mixtral and MiniMax: w1 is the gate, w3 is up, w2 is down."""

FUSED_EXPERTS = Layout(
    "experts by gate_up_proj, down_proj",
    {"fc1.weight": Place(("gate_up_proj",)), "fc2.weight": Place(("down_proj",))},
)
"""Modules of transformers 5: one tensor for all experts."""

UNGATED_FUSED_EXPERTS = Layout(
    "experts by up_proj, down_proj of all",
    {"fc1.weight": Place(("up_proj",)), "fc2.weight": Place(("down_proj",))},
)
"""Those without a gate: Nemotron-H."""

GPT_OSS_EXPERTS = Layout(
    "experts of gpt-oss",
    {
        "fc1.weight": Place(("gate_up_proj",), transposed=True, block=1),
        "fc1.bias": Place(("gate_up_proj_bias",), block=1),
        "fc2.weight": Place(("down_proj",), transposed=True),
        "fc2.bias": Place(("down_proj_bias",)),
    },
)
"""Weights with inputs as rows, gate and up by turns."""

TE_LINEAR = _layout("te.Linear", {"": "*"}, extra=())
"""TransformerEngine's `Linear`."""

TE_LAYER_NORM_LINEAR = _layout(
    "te.LayerNormLinear", {"norm": "layer_norm_*", "fc": "*", "qkv": "*"}, extra=()
)
"""Of `layer_norm_linear`, `rms_norm_linear`, `norm_qkv`; without ``zero_centered_gamma``."""

TE_LAYER_NORM_MLP = _layout(
    "te.LayerNormMLP", {"norm": "layer_norm_*", "fc1": "fc1_*", "fc2": "fc2_*"}, extra=()
)
"""Of `layer_norm_mlp`, `norm_mlp`, `norm_mlp_swiglu`; without ``zero_centered_gamma``."""

TE_GROUPED_LINEAR = _layout("te.GroupedLinear", {"": "*{group}"}, extra=())
"""Its parameters are one for each expert."""

TE_SINGLE_GROUPED_LINEAR = _layout("te.GroupedLinear of single parameters", {"": "*"}, extra=())
"""With ``single_grouped_weight`` and ``single_grouped_bias``."""

MEGATRON_EXPERTS = _layout(
    "experts of Megatron-LM by TransformerEngine",
    {"fc1": "linear_fc1.*{group}", "fc2": "linear_fc2.*{group}"},
    extra=(),
)
"""Its `TEGroupedMLP`: two of te.GroupedLinear."""


def te_ops(
    parts: Mapping[str, str],
    others: Iterable[str] = (),
    *,
    grouped: bool = False,
    block: int = 0,
) -> Layout:
    """The layout of a `te.ops.Sequential`, whose ops have their index as name.

    Args:
        parts: index of the op, by the part of the module here: ``{"fc1": "0", "fc2": "2"}``;
            ``norm`` is a norm, all others are linear.
        others: indices of the ops between, which have no parameters.
        grouped: linear ops are `te.ops.GroupedLinear` with a parameter for each expert.
        block: ``glu_interleave_size`` of the activation, which is after ``fc1``.
    """
    places = {}
    for part, op in parts.items():
        for number, kind in enumerate(("weight", "bias")):
            if part == "norm":
                key = f"{op}.{kind}"
            else:
                key = f"{op}.{kind}{GROUP}" if grouped else f"{op}.basic_ops.{number}.{kind}"
            places[f"{part}.{kind}"] = Place((key,), block=block if part == "fc1" else 0)
    return Layout("te.ops.Sequential", places, tuple(f"{other}." for other in others))


def read(
    layer: nn.Module, state: Mapping[str, Any], layout: Layout, prefix: str = ""
) -> dict[str, Tensor]:
    """What `layer.load_state_dict` takes, from a state dict of another library's.

    What a recipe keeps between steps is the layer's own: it goes on, or starts anew in a new layer.

    Args:
        layer: a module of this bundle; its parameters may be on ``meta``.
        state: with every key of the layer's under the prefix, and no others there; tensors of
            `transformer_engine` that are quantised are dequantised.
        layout: of the state.
        prefix: of the keys, with its last dot.

    Raises:
        RuntimeError: a key is missing, unexpected, or of another shape or type; the message names
            each, and what to do.
    """
    own = _Layer(layer, layout)
    problems = list(own.problems)
    given = {key: value for key, value in state.items() if key.startswith(prefix)}
    tensors = {}
    for parameter in own.parameters:
        found = {key: _taken(given, prefix + key, shape) for key, shape in own.parts_of(parameter)}
        problems += [value for value in found.values() if isinstance(value, str)]
        tensors[parameter.path] = found
    wanted = {prefix + key for found in tensors.values() for key in found}
    extras = [key for key in given.keys() - wanted if _is_extra(key, layout)]
    problems += _unexpected(own, sorted(given.keys() - wanted - {*extras}), layout, prefix)
    _refuse(f"{own.name}: from {layout.name}:", problems)
    _warn_of_extras(own.name, {key: given[key] for key in extras})
    result = own.state()
    for parameter in own.parameters:
        result |= own.split(parameter, own.joined(parameter, tensors[parameter.path]))
    return result


def write(layer: nn.Module, layout: Layout, prefix: str = "") -> dict[str, Tensor]:
    """A state dict of another library's, from a module of this bundle.

    What a recipe keeps between steps is left out; the other library starts it anew.

    Args:
        layer: whose weights, where they are held quantised, are dequantised.
        layout: of the result.
        prefix: of its keys, with the last dot.

    Returns:
        Contiguous tensors without gradients, some of which share the layer's memory.

    Raises:
        RuntimeError: the layout has no place for a parameter; the message says which.
    """
    own = _Layer(layer, layout)
    _refuse(f"{own.name}: to {layout.name}:", own.problems)
    result = {}
    for parameter in own.parameters:
        whole = own.whole(parameter)
        for (key, _), value in zip(
            own.parts_of(parameter), own.parts(parameter, whole), strict=True
        ):
            result[key] = value.detach().contiguous()
    if layout.extra is not None:
        owners = {key[: key.rindex(".") + 1] if "." in key else "" for key in result}
        empty = {f"{owner}{EXTRA}" for owner in (*owners, *layout.extra)}
        result |= {key: torch.empty(0, dtype=torch.uint8) for key in sorted(empty)}
    return {prefix + key: value for key, value in result.items()}


# ---- a layer of this bundle, as a layout sees it


@dataclass(frozen=True)
class _Parameter:
    """A parameter as modules without options have it.

    Attributes:
        path: of it there.
        shape: there.
        names: of what the layer has: one name, or one for each group.
        grouped: whether the first dimension is that of groups.
        place: in the layout.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    grouped: bool
    place: Place

    @property
    def rows(self) -> int:
        """The dimension of outputs."""
        return int(self.grouped)


class _Layer:
    """What is to be read or written of a layer."""

    def __init__(self, layer: Any, layout: Layout) -> None:
        cell = cell_of(layer)
        if not cell:
            raise RuntimeError(
                f"{type(layer).__name__}: expected a module with parameters of "
                f"{_library.FOLDER}, got one of {type(layer).__module__}; unwrap it, or give the "
                "layers of a model one by one"
            )
        self.layer = layer
        self.name = cell
        self.laid_out: Parameters = PARAMETERS[cell]
        self.problems: list[str] = []
        self.parameters = [*self._parameters(layout)]

    def _parameters(self, layout: Layout) -> Iterator[_Parameter]:
        named = dict(self.layer.named_parameters())
        paths: dict[str, list[str]] = {}
        for name in named:
            parted = (own for own in self.laid_out.grouped if _is_of_a_group(name, own))
            paths.setdefault(next(parted, name), []).append(name)
        for path, names in paths.items():
            shape = tuple(named[names[0]].shape)
            if names != [path]:
                shape = (len(names), *shape)
            grouped = path in self.laid_out.grouped
            place = layout.places.get(path) if layout.places else Place((path,))
            if place is None:
                known = ", ".join(layout.places)
                self.problems.append(
                    f"{path}: expected one of {known}, which the layout has places for; take "
                    "another layout, a module without bias, or add a Place"
                )
            elif problem := self._misfit(path, grouped, place):
                self.problems.append(problem)
            else:
                yield _Parameter(path, shape, tuple(names), grouped, place)

    def _misfit(self, path: str, grouped: bool, place: Place) -> str:
        if place.block and path not in self.laid_out.gated:
            return f"{path}: expected rows of gate and up, which alternate there, got no gate"
        if not grouped and any(GROUP in key for key in place.keys):
            return f"{path}: expected a parameter of groups, got one of a dense layer"
        return ""

    def state(self) -> dict[str, Tensor]:
        """What the layer keeps besides parameters.

        Raises:
            RuntimeError: it is on ``meta``, where it has no values.
        """
        quantized = hasattr(self.layer, "dequantized_state_dict")  # state is made with the weights
        names = dict(self.layer.named_parameters())
        found = {} if quantized else {**self.layer.state_dict()}
        kept = {key: value for key, value in found.items() if key not in names}
        if any(value.is_meta for value in kept.values()):
            raise RuntimeError(
                f"{self.name}: {next(iter(kept))}: expected what the recipe keeps, got a tensor on "
                "meta; call to_empty(device=...) and reset_parameters() first"
            )
        return kept

    def parts_of(self, parameter: _Parameter) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Keys of the layout without prefix, and shapes."""
        place, shape = parameter.place, list(parameter.shape)
        shape[parameter.rows] //= len(place.keys)
        for key in place.keys:
            own = shape[1:] if GROUP in key else shape
            if place.transposed:
                own = [*own[:-2], own[-1], own[-2]]
            groups = range(parameter.shape[0]) if GROUP in key else [0]
            yield from ((key.replace(GROUP, str(group)), tuple(own)) for group in groups)

    def joined(self, parameter: _Parameter, found: Mapping[str, Any]) -> Tensor:
        """The parameter from the tensors of the layout, in the order of this layer's rows."""
        place, tensors = parameter.place, iter(found.values())
        pieces = []
        for key in place.keys:
            if GROUP in key:
                each = torch.stack([next(tensors) for _ in range(parameter.shape[0])])
            else:
                each = next(tensors)
            pieces.append(each.mT if place.transposed else each)
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=parameter.rows)
        whole = _reordered(whole, parameter.rows, place.block, self._block(parameter))
        return whole.contiguous()

    def parts(self, parameter: _Parameter, whole: Tensor) -> Iterator[Tensor]:
        """The other way."""
        place = parameter.place
        whole = _reordered(whole, parameter.rows, self._block(parameter), place.block)
        for key, piece in zip(
            place.keys, whole.chunk(len(place.keys), dim=parameter.rows), strict=True
        ):
            each = piece.mT if place.transposed else piece
            yield from each.unbind(0) if GROUP in key else (each,)

    def _block(self, parameter: _Parameter) -> int:
        return self.laid_out.block if parameter.path in self.laid_out.gated else 0

    def whole(self, parameter: _Parameter) -> Tensor:
        """The parameter as modules without options have it, but for the order of its rows."""
        own = dict(self.layer.named_parameters())
        if hasattr(self.layer, "dequantized_state_dict"):
            own = self.layer.dequantized_state_dict(own[parameter.names[0]].dtype)
        tensors = [own[name].detach() for name in parameter.names]
        if any(type(tensor) is not Tensor for tensor in tensors):
            raise RuntimeError(
                f"{self.name}: {parameter.path}: expected a plain tensor, got "
                f"{type(own[parameter.names[0]]).__name__}; gather it first, as by full_tensor()"
            )
        return tensors[0] if parameter.names == (parameter.path,) else torch.stack(tensors)

    def split(self, parameter: _Parameter, whole: Tensor) -> dict[str, Tensor]:
        """The parameter by the names that the layer has."""
        if parameter.names == (parameter.path,):
            return {parameter.path: whole}
        return dict(zip(parameter.names, whole.unbind(0), strict=True))


def _is_of_a_group(name: str, path: str) -> bool:
    return name.startswith(path) and name[len(path) :].isdecimal()


def _reordered(whole: Tensor, rows: int, block: int, wanted: int) -> Tensor:
    """Rows of gate and up that alternate in blocks, or do not, in blocks of another size."""
    if block == wanted:
        return whole
    if block:
        whole = whole.unflatten(rows, (-1, 2, block)).transpose(rows, rows + 1)
        whole = whole.flatten(rows, rows + 2)
    if wanted:
        whole = whole.unflatten(rows, (2, -1, wanted)).transpose(rows, rows + 1)
        whole = whole.flatten(rows, rows + 2)
    return whole


# ---- what may be wrong with a state


_MOST = 20
"""Problems that an error names; a prefix that was forgotten makes thousands."""


def _refuse(what: str, problems: Sequence[str]) -> None:
    if problems:
        more = [f"and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
        raise RuntimeError("\n".join([what, *problems[:_MOST], *more]))


_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _taken(given: Mapping[str, Any], key: str, shape: Sequence[int]) -> Tensor | str:
    """A tensor of a state, or what is wrong with it."""
    if key not in given:
        close = difflib.get_close_matches(key, given, n=1)
        found = f"got {close[0]}" if close else f"got {len(given)} other keys under the prefix"
        return f"{key}: expected a tensor {[*shape]}, {found}; check prefix and layout"
    value = given[key]
    if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter):
        value = value.dequantize()
    if type(value) not in (Tensor, nn.Parameter):
        return f"{key}: expected a plain tensor, got {type(value).__name__}; gather or convert it"
    if value.dtype not in _TYPES:
        kind = str(value.dtype).removeprefix("torch.")
        return f"{key}: expected bfloat16, float16 or float32, got {kind}; dequantise it first"
    if value.shape != torch.Size(shape):
        return (
            f"{key}: expected shape {[*shape]}, got {[*value.shape]}; check the sizes of the "
            "module, or take another layout"
        )
    return value.detach()


def _unexpected(own: _Layer, keys: Sequence[str], layout: Layout, prefix: str) -> Iterator[str]:
    has_bias = any(parameter.path.endswith("bias") for parameter in own.parameters)
    for key in keys:
        remedy = "check prefix, layout and the number of groups"
        if "bias" in key[len(prefix) :] and not has_bias:
            remedy = "make the module with bias=True"
        yield f"{key}: expected no such key under {prefix!r}; {remedy}"


def _is_extra(key: str, layout: Layout) -> bool:
    return layout.extra is not None and key.rpartition(".")[2] == EXTRA


def _warn_of_extras(name: str, extras: Mapping[str, Any]) -> None:
    """Say of state that is not taken over that it is not."""
    full = [key for key, value in extras.items() if isinstance(value, Tensor) and value.numel()]
    if full:
        warnings.warn(
            f"{name}: {', '.join(full)}: pickles of TransformerEngine's, which are not read; amax "
            "histories and scales of delayed scaling start anew",
            stacklevel=3,
        )
