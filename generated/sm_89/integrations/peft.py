"""LoRA of PEFT on linear layers of this bundle, dense and grouped, and on parts of its experts.

    from <this package>.integrations.peft import fuse, prepare

    config = LoraConfig(r=8, target_modules=["proj", "experts.fc1", "experts.fc2"])
    model = get_peft_model(model, prepare(model, config))
    ...
    model = fuse(model.merge_and_unload())

    config = prepare(model, LoraConfig.from_pretrained(folder))  # or adapters that were saved
    model = PeftModel.from_pretrained(model, folder, config=config)

y = layer(x) + B A x: the layer runs as it does without, quantised where its recipe says so, and
adapters multiply in the type of x.  A layer of groups has an A and a B for each.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

try:
    from peft import LoraConfig
    from peft.tuners import lora
    from peft.tuners.tuners_utils import check_target_module_exists
except ImportError as error:
    raise ImportError(f"adapters: needs peft 0.21 or newer: {error}") from error

from .. import _library
from ._adapters import FUSED, LINEARS, PRODUCTS

_PACKAGE = __name__.rpartition(".integrations.")[0]


def prepare(model: nn.Module, config: LoraConfig) -> LoraConfig:
    """Make a configuration know the model's linear layers that are of this bundle.

    Experts whose parts it targets are replaced by `UnfusedExperts`: adapters of the first layer are
    added in front of the activation, where a fused op has no tensor.

    Args:
        model: that is to get adapters, or has some.
        config: with ``target_modules``.

    Returns:
        the configuration.  What it was told here is not saved with it.

    Raises:
        TypeError: a target is of this bundle and no linear layer; nothing has changed.
        RuntimeError: experts cannot run as their parts; nothing has changed.
    """
    targets = [name for name in _names(model) if config.target_modules and _is_target(config, name)]
    fused: dict[str, nn.Module] = {}
    for name in targets:
        path = name.rpartition(".")[0]
        holder = model.get_submodule(path)
        if _cell(holder) in FUSED:
            fused[path] = holder
        else:
            _check_target(model, name)
    for path, experts in fused.items():
        _check_experts(experts, path)
    for path, experts in fused.items():
        _replace(model, path, UnfusedExperts(experts))
    for module in model.modules():
        cell = _cell(module)
        if cell in LINEARS:
            adapted = LoraGroupedLinear if LINEARS[cell].grouped else LoraLinear
            config._register_custom_module({type(module): adapted})
    return config


def fuse(model: nn.Module) -> nn.Module:
    """Put fused experts back in the place of `UnfusedExperts`, with their weights and states.

    Args:
        model: without adapters on experts: after ``merge_and_unload()`` or ``unload()``.

    Returns:
        the model.

    Raises:
        RuntimeError: experts have adapters still.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, UnfusedExperts):
            _replace(model, name, module.fused())
    return model


class LoraLinear(lora.Linear):
    """A linear layer of this bundle with adapters."""

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **more: Any
    ) -> None:
        if config.fan_in_fan_out:
            raise ValueError(f"{_cell(base_layer)}: expected fan_in_fan_out=False, got True")
        reads = config.use_dora or config.init_lora_weights not in (True, False, "gaussian")
        if reads and _held_quantized(base_layer):
            raise ValueError(
                f"{_cell(base_layer)}: expected adapters that do not read the weight, which is "
                "held quantised, got use_dora or "
                f"init_lora_weights={config.init_lora_weights!r}"
            )
        super().__init__(base_layer, adapter_name, config=config, **more)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        layer: Any = module
        return layer.in_features, layer.out_features

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the weight; copies of it are quantised anew.

        Raises:
            RuntimeError: the module has no weight to add to, because it is held quantised.
        """
        base = self.get_base_layer()
        if _held_quantized(base):
            raise RuntimeError(
                f"{_cell(base)}: expected a weight to merge adapters into, but it is held "
                "quantised; merge into a module generated without quantized_weights"
            )
        super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
        _quantize_anew(base)

    def unmerge(self) -> None:
        """Take merged adapters out of the weight again, up to its rounding."""
        super().unmerge()
        _quantize_anew(self.get_base_layer())


class LoraGroupedLinear(LoraLinear):
    """A grouped linear layer with adapters: A [G, r, inputs] and B [G, outputs, r].

    Their products are grouped GEMMs of this bundle, by the same sizes on the device, so rows past
    the last group get nothing and give nothing.
    """

    @property
    def lora_variants(self) -> dict[tuple[str, ...], None]:
        """Plain LoRA alone: PEFT's variants multiply by matrices."""
        return {(): None}

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **more: Any
    ) -> None:
        """Make the matrices of an adapter.

        Raises:
            ValueError: the configuration asks for what only a matrix has.
        """
        base = cast(Any, self.get_base_layer())
        init = config.init_lora_weights
        if config.lora_bias or init not in (True, False, "gaussian"):
            raise ValueError(
                f"{_cell(base)}: expected lora_bias=False and init_lora_weights True, False or "
                f"'gaussian' on a grouped layer, got {config.lora_bias} and {init!r}"
            )
        plain = copy.copy(config)
        plain.init_lora_weights = False
        super().update_layer(adapter_name, r, lora_alpha, plain, **more)
        products, groups = _products(), base.weight.shape[0]
        self._multiply: Callable[..., Tensor] = getattr(products, LINEARS[PRODUCTS].function)
        grouped = getattr(products, LINEARS[PRODUCTS].class_name)
        self.lora_A[adapter_name] = grouped(groups, self.in_features, r)
        self.lora_B[adapter_name] = grouped(groups, r, self.out_features)
        self.reset_lora_parameters(adapter_name, init)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    @torch.no_grad()
    def reset_lora_parameters(self, adapter_name: str, init_lora_weights: bool | str) -> None:
        """As PEFT fills matrices, each by its own number of inputs."""
        a, b = (cast(Any, each[adapter_name]) for each in (self.lora_A, self.lora_B))
        a.reset_parameters()
        if init_lora_weights == "gaussian":
            nn.init.normal_(a.weight, std=1 / self.r[adapter_name])
        if init_lora_weights is False:
            b.reset_parameters()
        else:
            nn.init.zeros_(b.weight)

    def forward(
        self, x: Tensor, split_sizes: Tensor, adapter_names: list[str] | None = None
    ) -> Tensor:
        """The layer's forward, plus what active adapters add.

        Args:
            x: [T, inputs].
            split_sizes: [G] integers.

        Returns:
            [T, outputs].

        Raises:
            ValueError: rows are to have adapters of their own.
        """
        if adapter_names is not None:
            raise ValueError(
                f"{_cell(self.get_base_layer())}: expected one set of adapters for all rows, got "
                "adapter_names; call the model once for each"
            )
        if self.disable_adapters and self.merged:
            self.unmerge()
        y: Tensor = self.base_layer(x, split_sizes)
        if self.disable_adapters or self.merged:
            return y
        sizes = _library.widened(split_sizes, torch.int64)
        for name in self.active_adapters:
            if name in self.lora_A:
                y = y + self.scaling[name] * self._product(name, x.to(y.dtype), sizes)
        return y

    def _product(self, name: str, x: Tensor, split_sizes: Tensor) -> Tensor:
        a, b = (each[name].weight.to(x.dtype) for each in (self.lora_A, self.lora_B))
        low = self._multiply(self.lora_dropout[name](x), a, split_sizes)
        return self._multiply(low, b, split_sizes)


class UnfusedExperts(nn.Module):
    """Experts of this bundle as three modules: two grouped layers, the activation between them.

    Parameters, states of layers and their names are those of the fused experts, which it keeps.
    """

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        cell = FUSED[_cell(fused)]
        self._fused = (fused,)  # in a tuple it is no submodule
        self._parts = cell.parts
        first, between, last = cell.parts
        self.add_module(first, _layer(fused.get_submodule(first), cell.linear))
        scalars = {keyword: getattr(fused, name) for keyword, name in cell.scalars}
        activation = importlib.import_module(f"{_PACKAGE}.{cell.activation}")
        self.add_module(between, getattr(activation, cell.activation_class)(**scalars))
        self.add_module(last, _layer(fused.get_submodule(last), cell.linear))
        self.train(fused.training)

    def forward(self, x: Tensor, split_sizes: Tensor, probs: Tensor) -> Tensor:
        """As of the fused experts; what is in between is rounded to the type of x."""
        first, between, last = (self.get_submodule(name) for name in self._parts)
        a = between(first(x, split_sizes), probs)
        return cast(Tensor, last(a, split_sizes))

    def fused(self) -> nn.Module:
        """The fused experts, with these weights and states.

        Raises:
            RuntimeError: a layer has adapters.
        """
        (fused,) = self._fused
        for name in (self._parts[0], self._parts[2]):
            part, own = cast(Any, fused.get_submodule(name)), cast(Any, self.get_submodule(name))
            if isinstance(own, lora.LoraLayer):
                raise RuntimeError(
                    f"{_cell(fused)}: {name}: expected a layer without adapters, got some; fuse "
                    "after merge_and_unload() or unload()"
                )
            part.weight, part.bias = own.weight, own.bias
            fused.to(own.weight.device)
            _copy_states(own, part)
        return fused.train(self.training)


def _layer(part: nn.Module, cell: str) -> nn.Module:
    """A grouped layer with the parameters and states of a part."""
    weight, bias = part.get_parameter("weight"), cast("nn.Parameter | None", part.bias)
    groups, outputs, inputs = weight.shape
    made = getattr(importlib.import_module(f"{_PACKAGE}.{cell}"), LINEARS[cell].class_name)
    layer: Any = made(
        groups, inputs, outputs, bias=bias is not None, device=weight.device, dtype=weight.dtype
    )
    layer.weight, layer.bias = weight, bias
    _copy_states(part, layer)
    return cast(nn.Module, layer)


def _copy_states(source: nn.Module, target: nn.Module) -> None:
    """What the recipe keeps of a layer, by the names that both have for it.

    Random state is that of a whole module, and each goes on with its own.
    """
    found, kept = source.state_dict(), target.state_dict()
    parameters = {name for name, _ in source.named_parameters()}
    states = {name: t for name, t in found.items() if name in kept and name not in parameters}
    target.load_state_dict({**kept, **states})


def _check_experts(experts: nn.Module, path: str) -> None:
    """Raise where `UnfusedExperts` cannot stand in the place of experts."""
    name = _cell(experts)
    cell = FUSED[name]
    if not path:
        raise RuntimeError(
            f"{name}: expected experts inside a model, where others can stand in their place, got "
            "the model itself; put them into one: torch.nn.Sequential(experts)"
        )
    if not (cell.linear and cell.activation and PRODUCTS):
        raise RuntimeError(
            f"{name}: {path}: adapters of its layers need, in {_library.FOLDER}, cells of one "
            f"grouped GEMM in {cell.recipe} and without quantisation, and of the activation "
            f"{cell.formula}; add them, for SwiGLU: fusegen generate --module grouped_linear "
            f"--module scaled_swiglu --recipe bf16 --recipe {cell.recipe}; or put adapters on its "
            "parameters: LoraConfig(target_parameters=[...])"
        )
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    if any(getattr(each, kind) for each in experts.modules() for kind in hooks):
        raise RuntimeError(
            f"{name}: {path}: expected experts without hooks, which the layers that stand in their "
            "place would not have, got some; register hooks and wrap after prepare()"
        )


def _check_target(model: nn.Module, name: str) -> None:
    module = model.get_submodule(name)
    cell = _cell(module)
    if cell and cell not in LINEARS:
        layers = [f"{name}.{layer}" for layer, _ in module.named_children() if cell in FUSED]
        raise TypeError(
            f"{name}: expected a linear layer as a target, got {type(module).__name__} of {cell}; "
            + (f"name {' and '.join(layers)}, or " if layers else "")
            + "put adapters on its parameters: LoraConfig(target_parameters=[...])"
        )


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    holder, _, name = path.rpartition(".")
    setattr(model.get_submodule(holder), name, module)


def _names(model: nn.Module) -> Iterator[str]:
    return (name for name, _ in model.named_modules() if name)


def _is_target(config: LoraConfig, name: str) -> bool:
    return bool(check_target_module_exists(config, name))


def _cell(module: nn.Module) -> str:
    """The cell of this bundle that a module is of; empty where it is of none."""
    for each in type(module).__mro__:  # wrappers may derive a class
        package, _, name = each.__module__.rpartition(".")
        if package == _PACKAGE and "__" in name:
            return name
    return ""


def _held_quantized(layer: nn.Module) -> bool:
    return LINEARS[_cell(layer)].held_quantized


def _quantize_anew(layer: nn.Module) -> None:
    refresh = getattr(layer, "refresh_weights", None)
    if refresh is not None:
        refresh()


def _products() -> Any:
    """The module of the cell that multiplies by adapters of groups.

    Raises:
        RuntimeError: the bundle has none.
    """
    if not PRODUCTS:
        raise RuntimeError(
            f"adapters of groups: expected a cell of one grouped GEMM without quantisation in "
            f"{_library.FOLDER}, got none; add it: fusegen generate --module grouped_linear "
            "--recipe bf16"
        )
    return importlib.import_module(f"{_PACKAGE}.{PRODUCTS}")
