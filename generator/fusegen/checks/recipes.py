"""Recipes: every accumulation is stated, and what each role says goes together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..ir.dtypes import DType
from ..ir.kernel import GemmKind
from ..ir.quantization import (
    OPERANDS,
    Accumulation,
    AmaxSource,
    Extent,
    HadamardSpec,
    Orientation,
    QuantizationSpec,
    Role,
    Rounding,
    ScaleRounding,
    ScaleRule,
    ScaleSpec,
)
from ..spec.diagnostics import Problem
from ..spec.load import Source
from ..spec.recipe import RecipeSpec

_QUANTIZED = (DType.E4M3, DType.E5M2, DType.E2M1)

_STORED: Mapping[ScaleRule, tuple[DType, tuple[ScaleRounding, ...]]] = {
    ScaleRule.MAX_OVER_AMAX: (DType.FLOAT32, (ScaleRounding.NONE, ScaleRounding.POW2_DOWN)),
    ScaleRule.MX: (DType.E8M0, (ScaleRounding.POW2_UP, ScaleRounding.POW2_DOWN)),
    ScaleRule.NVFP4: (DType.E4M3, (ScaleRounding.NONE,)),
}
"""What each rule stores its scales in, and how it may round them (numerics documentation)."""

_TENSOR_SCALE = ScaleSpec(DType.FLOAT32, ScaleRule.NVFP4)
_HADAMARD = HadamardSpec(16, Orientation.COLUMNWISE)
_PER_TENSOR = (Extent.ALL, Extent.ALL)

Finding = tuple[bool, tuple[str, ...], str]


def check_recipe(recipe: RecipeSpec, source: Source) -> Iterator[Problem]:
    """Every problem of a recipe."""
    for kind in GemmKind:
        if kind not in recipe.gemm:
            yield source.problem(f"the accumulation of {kind.value} is missing", "gemm")
    yield from _check_gemms(recipe, source)
    for role, spec in recipe.roles.items():
        for found, path, message in (*_scale(spec.scale, spec), *_elements(spec)):
            if found:
                yield source.problem(message, "roles", role.value, *path)


def _check_gemms(recipe: RecipeSpec, source: Source) -> Iterator[Problem]:
    """What the two operands of a GEMM say goes together, and with its accumulation."""
    for kind, accumulation in recipe.gemm.items():
        named = {role for (each, _), (role, _) in OPERANDS.items() if each is kind} & {
            *recipe.roles
        }
        if not named and accumulation is not Accumulation.FP32:
            yield source.problem(
                f"{kind.value} reads nothing quantised, so that its sums are kept in fp32",
                "gemm",
                kind.value,
            )
    for role, spec in recipe.roles.items():
        others = [each for name, each in recipe.roles.items() if name is not role]
        if spec.tensor_scale and not all(each.tensor_scale for each in others):
            yield source.problem(
                "both operands of a GEMM have a tensor scale, or none: every role has one",
                "roles",
                role.value,
                "tensor_scale",
            )
        tokens = [each for name, each in recipe.roles.items() if name is not Role.WEIGHT]
        if spec.hadamard and (role is Role.WEIGHT or not all(each.hadamard for each in tokens)):
            yield source.problem(
                "a transform cancels in wgrad, where both operands have it: input and grad_output"
                " have one, weight has none",
                "roles",
                role.value,
                "hadamard",
            )


def _scale(scale: ScaleSpec, spec: QuantizationSpec) -> Iterator[Finding]:
    """Whether the fields of a scale go together."""
    dtype, rounds = _STORED[scale.rule]
    from_history = scale.source is AmaxSource.HISTORY
    by_maximum = scale.rule is ScaleRule.MAX_OVER_AMAX
    rule = f"rule {scale.rule.value!r}"
    words = " or ".join(word.value for word in rounds)
    yield scale.dtype is not dtype, ("scale", "dtype"), f"{rule} stores {dtype.value} scales"
    yield scale.round not in rounds, ("scale",), f"{rule} needs 'round' to be {words}"
    yield (
        scale.epsilon > 0 and not by_maximum,
        ("scale", "epsilon"),
        "an epsilon belongs to rule 'max_over_amax'; remove it",
    )
    yield (
        scale.margin > 0 and not from_history,
        ("scale", "margin"),
        "a margin belongs to a scale with a 'history'; remove it",
    )
    yield (
        from_history and not (by_maximum and spec.block == _PER_TENSOR),
        ("scale", "history"),
        "a history has one scale per tensor: block [all, all] and rule 'max_over_amax'",
    )


def _elements(spec: QuantizationSpec) -> Iterator[Finding]:
    """Whether format, tensor scale, rounding and transform go together."""
    formats = ", ".join(dtype.value for dtype in _QUANTIZED)
    four_bits = spec.format is DType.E2M1
    along = spec.block[1]
    yield (
        spec.format not in _QUANTIZED,
        ("format",),
        f"expected a format among {formats}, got {spec.format.value}",
    )
    yield (
        spec.scale.rule is ScaleRule.NVFP4 and not four_bits,
        ("format",),
        "rule 'nvfp4' quantises to e2m1",
    )
    yield (
        spec.tensor_scale not in (None, _TENSOR_SCALE),
        ("tensor_scale",),
        "a tensor scale is {dtype: float32, rule: nvfp4}",
    )
    yield (
        spec.tensor_scale is not None and spec.scale.rule is not ScaleRule.NVFP4,
        ("tensor_scale",),
        "a tensor scale belongs to rule 'nvfp4'; remove it",
    )
    yield (
        spec.tensor_scale is None and spec.scale.rule is ScaleRule.NVFP4,
        ("scale", "rule"),
        "rule 'nvfp4' needs tensor_scale: {dtype: float32, rule: nvfp4}",
    )
    yield (
        spec.rounding is Rounding.STOCHASTIC and not four_bits,
        ("rounding",),
        "stochastic rounding is defined for e2m1",
    )
    yield (
        spec.hadamard not in (None, _HADAMARD),
        ("hadamard",),
        "the transform is {size: 16, orientation: columnwise}",
    )
    yield (
        spec.hadamard is not None and along is not Extent.ALL and along % _HADAMARD.size != 0,
        ("block",),
        f"a transform needs blocks of a multiple of {_HADAMARD.size} elements",
    )
