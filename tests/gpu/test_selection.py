"""The rules that a plan prints: they can be read, and every kernel they name can be reached."""

from __future__ import annotations

from types import ModuleType

import bundles
import pytest
import selection


@pytest.mark.parametrize("kind", selection.KINDS)
def test_every_point_can_be_reached(bundle: ModuleType, kind: str) -> None:
    module = bundles.load_cell(bundle, "grouped_linear__bf16").GroupedLinear
    rules = selection.gemm_rules(module.describe(), kind)
    assert rules[-1].condition == "always"
    reached = selection.reach_every_point(kind, rules)
    assert reached.keys() == {point for rule in rules for point in rule.points}


def test_conditions_are_read_as_they_are_printed() -> None:
    plan = """\
kernels, first rule that holds (io is bfloat16 or float16)
  gemm_x_fprop, from a model, not measured
    mean_group_tokens < 64 and columns % 192 == 0: small
    rows >= 4096: large
    groups == 1 and tokens >= 512: least of
      wide: 4000 + waves * (1000 + 2000 * k / 1024) ns; 256 x 256 on 2 SMs
      narrow: 5000 + waves * (500 + 1100 * k / 1024) ns; 256 x 128 on 2 SMs
    always: middle
  group_sum
    always: the only one
"""
    rules = selection.read_rules(plan)
    assert list(rules) == ["gemm_x_fprop", "group_sum"]
    gemm = rules["gemm_x_fprop"]
    sizes = selection.gemm_sizes("fprop", tokens=630, groups=10, n=384, k=8)
    assert selection.chosen(gemm, sizes) == "small"
    assert selection.chosen(gemm, sizes | {"columns": 200}) == "middle"
    assert selection.chosen(gemm, sizes | {"mean_group_tokens": 64}) == "middle"
    assert selection.chosen(gemm, sizes | {"columns": 200, "rows": 4096}) == "large"
    # 66 clusters: 64 and 128 tiles are one wave and two, 68 and 136 are two and three.
    sizes = selection.gemm_sizes("fprop", tokens=2048, groups=1, n=2048, k=1024)
    assert selection.chosen(gemm, sizes) == "wide"
    assert selection.chosen(gemm, sizes | {"columns": 2176, "k": 8192}) == "narrow"
    assert selection.chosen(gemm, sizes | {"groups": 2}) == "middle"
    with pytest.raises(ValueError, match="is no condition of a plan"):
        selection.Rule.of("rows is 4", "x").holds(sizes)
    with pytest.raises(LookupError, match="no sizes lead to never"):
        selection.reach_every_point(
            "fprop", [selection.Rule.of("rows < 0", "never"), selection.Rule.of("always", "x")]
        )


def test_kernel_names() -> None:
    name = (
        "void fusegen::ragged_gemm<(fusegen::Gemm)2, __half, "
        "fusegen::Config<128, 192, 64, 2, (fusegen::Schedule)1, fusegen::Limits<232448, 65536>, 2>"
        " >(CUtensorMap_st)"
    )
    expected = selection.Launch("wgrad", "float16", "pingpong_128x192x64_2x1")
    assert selection.launch_of(name) == expected
    name = (
        "void fusegen::ragged_decoded_mma_gemm<(fusegen::Gemm)1, __nv_bfloat16, fusegen::MmaConfig<"
        "128, 128, 32, 2, 2, 4, 2, fusegen::Limits<166912, 65536> >, (fusegen::Store)0>(int)"
    )
    expected = selection.Launch("dgrad", "bfloat16", "mma_128x128x32_2x2_4_2")
    assert selection.launch_of(name) == expected
    name = (
        "void fusegen::ragged_fp8_mma_gemm<(fusegen::Gemm)2, __nv_fp8_e5m2, __nv_fp8_e4m3, __half, "
        "(fusegen::Fp8Scaling)0, (fusegen::Accumulation)1, fusegen::MmaConfig<128, 128, 64, 2, 4, "
        "4, 1, fusegen::Limits<101376, 65536> >, (fusegen::Store)6>(int)"
    )
    expected = selection.Launch("wgrad", "float16", "mma_128x128x64_2x4_4_1")
    assert selection.launch_of(name) == expected
    for multiply in ("MxWarpMma<__nv_fp8_e4m3, __nv_fp8_e4m3>", "NvWarpMma"):
        name = (
            f"void fusegen::ragged_scaled_mma_gemm<(fusegen::Gemm)2, fusegen::{multiply}, __half, "
            "(fusegen::Accumulation)0, fusegen::MmaConfig<128, 128, 64, 2, 4, 4, 1, "
            "fusegen::Limits<101376, 65536> >, (fusegen::Store)6, fusegen::Keep>(int)"
        )
        assert selection.launch_of(name) == expected
    for m, ctas, point in ((128, 1, "umma_128x256x128_1"), (256, 2, "umma_256x256x128_1_2")):
        name = (
            "void fusegen::ragged_scaled_tcgen05_gemm<(fusegen::Gemm)2, __nv_fp8_e5m2, "
            f"__nv_fp8_e4m3, __half, fusegen::Tcgen05Config<{m}, 256, 128, 1, {ctas}, "
            "fusegen::Limits<232448, 65536> >, (fusegen::Store)6>(int)"
        )
        assert selection.launch_of(name) == selection.Launch("wgrad", "float16", point)
    assert selection.launch_of("void fusegen::group_sum::kernel<__half, __half>(int)") is None
