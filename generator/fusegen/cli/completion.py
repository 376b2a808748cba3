"""Completion of values in a shell: names of specs, options, passes and benchmarks.

click's own machinery asks these while a line is typed, so they never raise and print nothing:
specs that are wrong, a folder that is not there, are as if there were none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from ..spec.load import SpecSet

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
"""What click takes as `shell_complete`."""

NATIVE = {"native": "that of the visible GPU"}


def words(known: Callable[[click.Context], Mapping[str, str]]) -> Complete:
    """Completes words, each with what shells show beside it; those given already are left out."""

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        repeated = getattr(param, "multiple", False)
        given = {*_given(ctx, param.name or "")} if repeated else set()
        return [
            CompletionItem(word, help=summary)
            for word, summary in known(ctx).items()
            if word.startswith(incomplete) and word not in given
        ]

    return complete


def specs_of(folder: str, further: Mapping[str, str] | None = None) -> Complete:
    """Completes names of the specs in a folder such as `modules`, and a few further words."""

    def known(ctx: click.Context) -> Mapping[str, str]:
        specs: Mapping[str, Any] = getattr(_specs(ctx), folder, {})
        return {name: _summary(each) for name, each in specs.items()} | {**(further or {})}

    return words(known)


def choices(known: Iterable[str]) -> Complete:
    """Completes a few words that are known without loading anything."""
    return words(lambda _: dict.fromkeys(known, ""))


def _specs(ctx: click.Context) -> SpecSet | None:
    """The built-in specs and those of the folders that the line has named so far."""
    # Late, as all here: help completes nothing.
    from ..publish.folders import Folders, load_specs
    from ..spec.diagnostics import SpecError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return load_specs(Folders(tuple(_given(ctx, "specs"))))
        except SpecError:
            return None


def _given(ctx: click.Context, name: str) -> tuple[Any, ...]:
    """What the line says of a parameter so far.

    Behind an option whose value is being typed click gives arguments no names, and leaves them to
    ``ctx.args``.
    """
    names = [each.name for each in ctx.command.params if isinstance(each, click.Argument)]
    value = ctx.params.get(name)
    if value is None and name in names:
        return tuple(ctx.args[names.index(name) :][:1])
    if value is None:
        return ()
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _summary(spec: Any) -> str:
    return spec.summary or ""  # a module of one op may leave it to the op


def _options(ctx: click.Context) -> Mapping[str, str]:
    """Choices that the modules on the line offer, or any where none is named."""
    from ..options import OPTIONS
    from ..spec.offers import not_offered

    found = {choice.word: choice.summary for option in OPTIONS for choice in option.choices}
    specs = _specs(ctx)
    named = (*_given(ctx, "modules"), *_given(ctx, "module"))
    modules = [specs.modules[name] for name in named if specs and name in specs.modules]
    return {
        word: summary
        for word, summary in found.items()
        if specs is None or all(not_offered(word, each, specs.ops) is None for each in modules)
    }


def _passes(_: click.Context) -> Mapping[str, str]:
    from ..passes.pipeline import PASSES

    return {each.name: each.summary for each in PASSES}


def _origins(ctx: click.Context) -> Mapping[str, str]:
    """Specs of the kind that `new` starts."""
    from ..spec.kinds import SpecKind

    specs = _specs(ctx)
    kind = next((each for each in SpecKind if (each.key,) == _given(ctx, "kind")), None)
    if specs is None or kind is None:
        return {}
    return {name: _summary(each) for name, each in specs.of(kind).items()}


def _benchmarks(_: click.Context) -> Mapping[str, str]:
    from ..commands import bench
    from ..spec.usage import UsageError

    try:
        return dict.fromkeys(bench.find().names, "")
    except (bench.BenchError, UsageError):
        return {}


def _families(_: click.Context) -> Mapping[str, str]:
    from ..families.registry import FAMILIES

    return {each.name: "" for each in FAMILIES}


def _gpus(_: click.Context) -> Mapping[str, str]:
    from ..families.gpus import GPUS

    return {gpu.name: f"{gpu.bandwidth / 1e9:.0f} GB/s" for gpu in GPUS}


target, module, recipe = (specs_of(kind) for kind in ("targets", "modules", "recipes"))
arch = specs_of("archs", {**NATIVE, "all": "one bundle that chooses by device"})
fusion = specs_of("fusions")
option = words(_options)
pass_ = words(_passes)
origin = words(_origins)
benchmark = words(_benchmarks)
family = words(_families)
gpu = words(_gpus)
