"""Weights in fp32 as parts of 16 bits, and their products added up, on the CPU: the reference's
bits, sizes that are no whole block, and what is refused."""

from __future__ import annotations

import ctypes

import pytest
import torch

from .launches import launches
from .quantize_harness import Buffer, Kernels, Long, Pointer, address, reference_of

DTYPES = pytest.mark.parametrize(
    "dtype", (torch.bfloat16, torch.float16), ids=("bfloat16", "float16")
)
PARTS = 3


class _Split(ctypes.Structure):
    _fields_ = [("weight", Pointer), ("parts", Pointer), ("n", Long), ("k", Long)]


class _Add(ctypes.Structure):
    _fields_ = [
        ("products", Pointer),
        ("bias", Pointer),
        ("sums", Pointer),
        ("tokens", Long),
        ("n", Long),
    ]


reference = reference_of("_fp32_weight")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return launches(
        tmp_path_factory.mktemp("fp32_weight"),
        "fp32_weight",
        split_weight="SplitWeightArguments",
        add_products="AddProductsArguments",
    )


@DTYPES
@pytest.mark.parametrize("shape", ((8, 8), (40, 264), (1, 2048), (0, 64)))
def test_parts_have_the_bits_of_the_reference(
    kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(shape[1])
    weight = torch.randn(shape, generator=rng) * 4.0 ** torch.randint(-9, 5, shape, generator=rng)
    weight.view(-1)[:4] = torch.tensor([torch.inf, torch.nan, -0.0, 1e6])[: weight.numel()]
    out = Buffer(2 * PARTS * weight.numel(), "cpu")
    arguments = _Split(address(weight), address(out), *shape)
    kernels.call("run_split_weight", int(dtype == torch.float16), arguments)
    expected = reference.split(weight, like=torch.empty(0, dtype=dtype))
    found = out.bytes().view(dtype).view_as(expected)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@DTYPES
@pytest.mark.parametrize("biased", (False, True))
@pytest.mark.parametrize(("tokens", "n"), ((1, 8), (77, 136), (256, 40), (0, 8)))
def test_sums_have_the_bits_of_the_reference(
    kernels: Kernels, tokens: int, n: int, biased: bool, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(n)
    products = torch.randn(tokens, PARTS * n, generator=rng)
    bias = torch.randn(n, generator=rng).to(dtype) if biased else None
    out = Buffer(4 * tokens * n, "cpu")
    arguments = _Add(address(products), address(bias), address(out), tokens, n)
    kernels.call("run_add_products", int(dtype == torch.float16), arguments)
    assert torch.equal(out.floats().view(tokens, n), reference.add(products, add=bias))


def test_other_sizes_are_refused(kernels: Kernels) -> None:
    weight, out = torch.zeros(8, 12), Buffer(1024, "cpu")
    with pytest.raises(AssertionError, match="k: a multiple of 8"):
        kernels.call("run_split_weight", 0, _Split(address(weight), address(out), 8, 12))
    with pytest.raises(AssertionError, match="n: a multiple of 8"):
        kernels.call("run_add_products", 0, _Add(address(weight), None, address(out), 1, 4))
