"""Against what TransformerEngine and torchao publish, with every known disagreement stated.

Collected only where FUSEGEN_ORACLES names a folder with their wheels; see conftest.py.
"""

from __future__ import annotations

import os
import sys
import types
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from inputs import INPUTS
from subject import quantization, reference
from torch import Tensor

pytestmark = pytest.mark.oracle

WHEELS = Path(os.environ["FUSEGEN_ORACLES"])
NO_NAN = [name for name in INPUTS if name != "nan"]


def wheel(pattern: str) -> Path:
    found = sorted(WHEELS.glob(pattern))
    assert len(found) == 1, f"expected one {pattern} in {WHEELS}, found {found}"
    return found[0]


def transformer_engine(name: str) -> dict[str, Any]:
    """Names of one of TransformerEngine's pure-PyTorch references, over stand-ins for the rest."""
    package = "transformer_engine.pytorch"
    with zipfile.ZipFile(wheel("transformer_engine-2.20.2-*.whl")) as archive:

        def source(module: str) -> str:
            return archive.read(f"transformer_engine/pytorch/custom_recipes/{module}.py").decode()

        utils = types.ModuleType("reference_utils")
        exec(source("reference_utils"), utils.__dict__)
        recipes = types.ModuleType(f"{package}.custom_recipes")
        recipes.__dict__.update(reference_utils=utils, gemm=mock.MagicMock())
        base = types.ModuleType(f"{package}.quantized_tensor")
        base.__dict__.update(QuantizedTensorStorage=object, Quantizer=object)
        parents = {parent: types.ModuleType(parent) for parent in ("transformer_engine", package)}
        module = types.ModuleType(f"oracle_{name}")
        stand_ins = {**parents, recipes.__name__: recipes, base.__name__: base}
        with pytest.MonkeyPatch.context() as patch:
            for key, value in {**stand_ins, module.__name__: module}.items():
                patch.setitem(sys.modules, key, value)
            exec(source(name), module.__dict__)
    return module.__dict__


def torchao() -> Any:
    sys.path.insert(0, str(wheel("torchao-0.18.0-*.whl")))
    try:
        from torchao.float8 import config, float8_utils
        from torchao.prototype.mx_formats import kernels, mx_tensor, nvfp4_tensor
    finally:
        del sys.path[0]
    return types.SimpleNamespace(
        to_mx=mx_tensor.to_mx,
        Mode=mx_tensor.ScaleCalculationMode,
        to_fp4=kernels.f32_to_f4_unpacked,
        amax_to_scale=float8_utils.amax_to_scale,
        Float8Config=config.Float8LinearConfig,
        nvfp4=nvfp4_tensor.nvfp4_quantize,
        nvfp4_scale=nvfp4_tensor.per_tensor_amax_to_scale,
    )


AO = torchao()
TE_NVFP4 = transformer_engine("reference_nvfp4")
TE_CURRENT = transformer_engine("reference_current_scaling")


def codes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


# torchao, MX


@pytest.mark.parametrize("kind", NO_NAN)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("mode", ["RCEIL", "FLOOR"])
def test_mx(kind: str, fmt: str, mode: str) -> None:
    """Same bits on bf16, but for data of blocks whose exponent is 0.

    There torchao multiplies by 1 (RCEIL), or divides by 2^-126 where 2^-127 is meant (FLOOR).
    """
    x = INPUTS[kind]((24, 96), torch.bfloat16)
    q = quantization(
        "mxfp8", "input", format=fmt, round="pow2_up" if mode == "RCEIL" else "pow2_down"
    )
    got = reference.quantize(x, q).rowwise
    scale, data = AO.to_mx(x, reference.DTYPES[fmt], 32, AO.Mode[mode])
    assert torch.equal(codes(got.scale), codes(scale))
    large = (codes(got.scale) > 0).repeat_interleave(32, dim=1)
    assert torch.equal(codes(got.data)[large], codes(data)[large])
    if kind not in ("zero", "single"):
        small = codes(got.data)[~large], codes(data)[~large]
        assert (~large).any() == (kind in ("edge_of_range", "denormal"))
        assert torch.equal(*small) == bool(large.all())


def test_mx_above_the_maximum_in_fp32() -> None:
    """torchao takes log2 in fp32, which loses the last bit far from 1: off by one, too low."""
    x = torch.zeros(1, 32)
    x[0, 0] = 448.0 * 2.0**20 * (1 + 2.0**-22)
    got = reference.quantize(x, quantization("mxfp8", "input")).rowwise
    scale, _ = AO.to_mx(x, torch.float8_e4m3fn, 32, AO.Mode.RCEIL)
    assert codes(got.scale).item() == 127 + 21
    assert codes(scale).item() == 127 + 20


def test_mx_amax_of_nan() -> None:
    """torchao's amax is NaN with its block; here NaN counts for nothing."""
    x = torch.ones(1, 32)
    x[0, 3] = torch.nan
    got = reference.quantize(x, quantization("mxfp8", "input")).rowwise
    scale, _ = AO.to_mx(x, torch.float8_e4m3fn, 32, AO.Mode.RCEIL)
    assert codes(scale).item() == 0xFF and codes(got.scale).item() == 119


# torchao, NVFP4


@pytest.mark.parametrize("kind", ["normal", "heavy_tailed", "ties", "finite_max"])
def test_nvfp4_of_torchao(kind: str) -> None:
    """Data agrees where scales do; scales are clamped to at least 2^-6 there and not here.

    Its scales and factors are the same numbers by other roundings, so ties may go the other way: at
    most one scale in fifty, of small integers, and one code in a thousand.
    """
    x = INPUTS[kind]((64, 96), torch.bfloat16)
    q = quantization("nvfp4", "input", hadamard=None)
    got = reference.quantize(x, q).rowwise
    tensor_scale = AO.nvfp4_scale(got.amax[0])
    scale, data = AO.nvfp4(x, 16, tensor_scale)
    clamped = got.scale.float().clamp(min=2.0**-6)
    agree = clamped == scale.float()
    assert agree.float().mean() > 0.98
    same = (clamped == got.scale.float()) & agree
    mask = same.repeat_interleave(8, dim=1)
    assert mask.any()
    differ = codes(got.data)[mask] != data.view(torch.uint8)[mask]
    assert differ.float().mean() < 1e-3


def test_nan_in_e2m1() -> None:
    """A format without NaN: torchao's bit tricks give some code, here it is 0x7."""
    nan = torch.tensor([torch.nan, -torch.nan])
    assert reference._encode(nan, "e2m1", None).tolist() == [0x7, 0x7]
    assert AO.to_fp4(nan).tolist() != [0x7, 0x7]


# torchao, rowwise


def test_rowwise_scales() -> None:
    """Powers of two by default and amaxes of at least 1e-12 there; both are fields here."""
    assert AO.Float8Config.from_recipe_name("rowwise").round_scales_to_power_of_2
    amax = torch.cat([torch.zeros(1), torch.exp2(torch.linspace(-60, 100, 3000))])
    for power_of_two in (False, True):
        q = quantization(
            "fp8_rowwise", "input", epsilon=1e-12, round="pow2_down" if power_of_two else "none"
        )
        x = torch.stack((amax, -amax / 3), dim=1)
        got = reference.quantize(x, q).rowwise
        scale = AO.amax_to_scale(amax, torch.float8_e4m3fn, round_scales_to_power_of_2=power_of_two)
        assert torch.equal(got.scale, torch.ones(()) / scale)


# TransformerEngine, NVFP4


def negative_zero_to_zero(packed: Tensor, x: Tensor) -> Tensor:
    """Codes 0x8 of elements that are -0 become 0x0, as TransformerEngine's Python has them."""
    low, high = packed & 0xF, packed >> 4
    zero = x == 0
    low = torch.where(zero[:, 0::2], 0, low)
    high = torch.where(zero[:, 1::2], 0, high)
    return low | high << 4


@pytest.mark.parametrize("kind", NO_NAN)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("block", [(1, 16), (16, 16)], ids=str)
def test_nvfp4_of_transformer_engine(kind: str, dtype: torch.dtype, block: tuple[int, int]) -> None:
    """Same bits, but for -0."""
    x = INPUTS[kind]((48, 96), dtype)
    q = quantization("nvfp4", "weight", block=block)
    for operand in reference.quantize(x, q, columnwise=True):
        own = x.T.contiguous() if operand.columnwise else x
        data, scale = TE_NVFP4["NVFP4QuantizerRef"]._quantize_blockwise_reference(
            own, operand.amax, block[1], block[0], pow_2_scales=False, eps=0.0
        )
        mine = codes(operand.scale).repeat_interleave(block[0], dim=int(operand.columnwise))
        assert torch.equal(mine.T if operand.columnwise else mine, codes(scale))
        packed = codes(operand.data)[:, : own.shape[1] // 2]
        assert torch.equal(negative_zero_to_zero(packed, own), data)


def transformer_engine_rht(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and amax of the transposed, transformed copy."""
    ref = object.__new__(TE_NVFP4["NVFP4QuantizerRef"])
    ref.__dict__.update(with_rht=True, quant_tile_shape=(1, 16), with_random_sign_mask=True)
    rotated = ref._apply_rht(x.T.contiguous())
    amax = rotated.abs().max().float().view(1)
    data, scale = ref._quantize_blockwise_reference(
        rotated, amax, 16, 1, pow_2_scales=False, eps=0.0
    )
    return negative_zero_to_zero(data, rotated), scale, amax


def test_transform_of_exact_numbers() -> None:
    """Small integers are transformed without rounding, whatever the order of sums: same bits."""
    x = torch.randint(-3, 4, (64, 96), generator=torch.Generator().manual_seed(7)).bfloat16()
    got = reference.quantize(
        x, quantization("nvfp4", "input"), rowwise=False, columnwise=True
    ).columnwise
    data, scale, amax = transformer_engine_rht(x)
    values, _ = reference._values(x, got.quantization, True, None)
    assert torch.equal(got.amax, amax)
    assert torch.equal(codes(got.scale).T, codes(scale))
    assert torch.equal(negative_zero_to_zero(codes(got.data), values.T), data)


def test_transform_of_normal_numbers() -> None:
    """The order of sums changes a few codes in 10^5, and no scale by more than one code."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(8)).bfloat16()
    got = reference.quantize(
        x, quantization("nvfp4", "input"), rowwise=False, columnwise=True
    ).columnwise
    data, scale, _ = transformer_engine_rht(x)
    apart = codes(got.scale).T.int() - codes(scale).int()
    assert apart.abs().max() <= 1 and (apart != 0).float().mean() < 5e-3
    assert (codes(got.data) != data).float().mean() < 5e-3


# TransformerEngine, scales from an amax


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("epsilon", [0.0, 0.25])
def test_scale_from_amax(power_of_two: bool, fmt: Any, dtype: torch.dtype, epsilon: float) -> None:
    """Same bits from 0 to the largest finite amax, where an infinite scale becomes the input's."""
    amax = torch.cat(
        [
            torch.zeros(1),
            torch.exp2(torch.linspace(-149, 127.99, 5000)),
            torch.tensor([torch.finfo(torch.float32).max]),
        ]
    )
    q = quantization(
        "fp8_block", "input", format=fmt, epsilon=epsilon,
        round="pow2_down" if power_of_two else "none",
    )  # fmt: skip
    scale, inverse, _ = TE_CURRENT["_scale_from_amax_tensor"](
        dtype, amax, reference.DTYPES[fmt], eps=epsilon, pow_2_scales=power_of_two
    )
    got = reference._ratio_scale(amax.clamp(min=epsilon), q, dtype)
    assert torch.equal(got, scale)
    assert torch.equal(torch.ones(()) / got, inverse)


def test_scale_of_an_infinite_amax() -> None:
    """TransformerEngine's Python gives 0, with or without powers of two; its kernels give 1."""
    for power_of_two in (False, True):
        scale, _, _ = TE_CURRENT["_scale_from_amax_tensor"](
            torch.bfloat16,
            torch.tensor([torch.inf]),
            torch.float8_e4m3fn,
            eps=0.0,
            pow_2_scales=power_of_two,
        )
        assert scale.tolist() == [0.0]
    q = quantization("fp8_block", "input")
    assert reference._ratio_scale(torch.tensor([torch.inf]), q, torch.bfloat16).tolist() == [1.0]
