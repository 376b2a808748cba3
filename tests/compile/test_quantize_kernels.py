"""The quantise kernels themselves, on the CPU: every output bit against the reference.

`cuda_on_cpu` runs a block's threads as fibers. What it cannot show is the hardware's own part: its
conversions, its timing and races between warps.
"""

from __future__ import annotations

import ctypes
from itertools import product

import pytest
import torch
from torch import Tensor

from fusegen.ir.shapes import Const
from fusegen.steps import copies

from .quantize_harness import (
    AMAX_PARTIALS,
    ATOMS,
    CODES,
    CSRC,
    MOST_STEPS,
    RECIPES,
    UNTRANSPOSED,
    UNWRITTEN,
    Buffer,
    Case,
    Delayed,
    DelayedState,
    Kernels,
    Run,
    UpdateScale,
    _Dequantize,
    _DequantizeGroups,
    _Several,
    _Step,
    address,
    check,
    compile_for_cpu,
    reference,
)

SPECIAL = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40, -1e-40, 3e38, 448.0, -6.0, 1e-7, 6e4)
# Name -> shape, splits, whether values are special ones here and there.
CASES: dict[str, tuple[tuple[int, ...], list[int] | None, bool]] = {
    "ragged": ((200, 136), [0, 5, 130, 0, 33], False),
    "out of range": ((300, 264), [-3, 260, 0, 500], True),
    "forty groups": ((150, 40), [1] * 40, False),
    "more groups than a warp holds": ((90, 16), [0, 1, 0] * 50 + [20, 500, 3] + [2] * 10, False),
    "one row each": ((66, 16), [33, 33], True),
    "no rows": ((64, 24), [0, 0], False),
    "dense": ((64, 8), None, True),
    "tall": ((256, 24), None, False),
    "nothing": ((0, 40), [0, 3], False),
    "nothing dense": ((0, 40), None, False),
    "weights": ((2, 136, 72), None, False),
    "wide weights": ((3, 16, 272), None, True),
}


def test_workspaces_have_room_for_all_partial_amaxes() -> None:
    declared = f"kAmaxPartials = {AMAX_PARTIALS};"
    assert declared in (CSRC / "fusegen" / "quantize" / "quantize.h").read_text()
    assert Const(AMAX_PARTIALS) == copies.AMAX_PARTIALS


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    folder = tmp_path_factory.mktemp("quantize_kernels")
    return Kernels(compile_for_cpu("quantize_kernels.cuh", folder), "cpu")


def _case(name: str, dtype: torch.dtype) -> Case:
    shape, splits, special = CASES[name]
    rng = torch.Generator().manual_seed(sum(map(ord, name)))
    rows = torch.randint(-12, 12, (*shape[:-1], 1), generator=rng).float()
    x = (torch.randn(shape, generator=rng) * rows.exp2()).to(dtype)
    if shape[-2] > 36:
        x[..., 20:36, :] = 0
    if special:
        flat = x.view(-1)
        at = torch.randint(0, len(flat), (max(len(SPECIAL), len(flat) // 50),), generator=rng)
        flat[at] = torch.tensor(SPECIAL).to(dtype)[torch.arange(len(at)) % len(SPECIAL)]
        flat.view(torch.int16)[flat.isnan().nonzero()[::2]] |= -(2**15)  # NaN has signs, too
    return Case(x, None if splits is None else torch.tensor(splits))


def _arguments(recipe: str, case: Case) -> dict[str, object]:
    q = RECIPES[recipe].quantization
    arguments: dict[str, object] = {}
    if q.source == "history":
        scale = torch.rand(case.groups, generator=torch.Generator().manual_seed(1)) * 100
        arguments |= {"scale": scale, "fold": True}
    if q.rounding == "stochastic":
        arguments["rng_state"] = torch.tensor([0x123456789ABCDEF, 7])
    return arguments


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_both_copies(kernels: Kernels, recipe: str, case: str) -> None:
    dtype = torch.float16 if case in ("one row each", "wide weights") else torch.bfloat16
    data = _case(case, dtype)
    sums = not CASES[case][2] and recipe == "current_e5m2_epsilon"
    run = Run(kernels, RECIPES[recipe], data)
    check(run.quantize(**_arguments(recipe, data), sums=sums), f"{recipe}, {case}")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", ATOMS)
def test_scales_in_atoms(kernels: Kernels, recipe: str, case: str) -> None:
    """Every byte of every atom, whichever copies are wanted."""
    data = _case(case, torch.float16 if case == "wide weights" else torch.bfloat16)
    arguments: dict[str, object] = {}
    if ATOMS[recipe].quantization.rounding == "stochastic":
        arguments["rng_state"] = torch.tensor([0x123456789ABCDEF, 7])
    run = Run(kernels, ATOMS[recipe], data)
    for wanted in ((True, True), (True, False), (False, True)):
        check(run.quantize(*wanted, **arguments), f"{recipe}, {case}, {wanted}")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", UNTRANSPOSED)
def test_untransposed(kernels: Kernels, recipe: str, case: str) -> None:
    """Rows of codes end with their pitch; places between groups have no codes."""
    data = _case(case, torch.float16 if case == "wide weights" else torch.bfloat16)
    run = Run(kernels, UNTRANSPOSED[recipe], data)
    for wanted in ((True, True), (True, False), (False, True)):
        check(run.quantize(*wanted), f"{recipe}, {case}, {wanted}")


@pytest.mark.parametrize("recipe", ["block_1x128", "row_e5m2", "mx_1x32"])
def test_groups_that_start_otherwise_change_no_untransposed_codes(
    kernels: Kernels, recipe: str
) -> None:
    own, data = UNTRANSPOSED[recipe], _case("forty groups", torch.bfloat16)
    for align in (16, 128):
        check(Run(kernels, own, data, align).quantize(), f"{recipe}, {align}")


def test_atoms_need_groups_that_begin_one(kernels: Kernels) -> None:
    run = Run(kernels, ATOMS["mx_1x32"], _case("ragged", torch.bfloat16))
    arguments = run.arguments()
    arguments.row_align = 32
    with pytest.raises(AssertionError, match="row_align = 128 where scales lie in atoms"):
        kernels.call("run_quantize", 0, ATOMS["mx_1x32"].config, arguments)


@pytest.mark.parametrize("recipe", ["nv_1x16_hadamard", "nv_1x16_both"])
def test_values_near_the_largest(kernels: Kernels, recipe: str) -> None:
    """Groups whose transform just fits, overflows here and there, and overflows in every run."""
    rng = torch.Generator().manual_seed(17)
    signs = torch.randint(0, 2, (180, 136), generator=rng) * 2.0 - 1.0
    exponents = torch.repeat_interleave(torch.tensor([125.0, 126.5, 127.99]), 60).unsqueeze(1)
    x = (signs * exponents.exp2()).bfloat16()
    case = Case(x, torch.tensor([60, 60, 60]))
    run = Run(kernels, RECIPES[recipe], case)
    check(run.quantize(**_arguments(recipe, case)), recipe)


def test_more_tiles_than_partial_amaxes(kernels: Kernels) -> None:
    """A block of the amax kernel meets several tiles, and a group all blocks or some, in a ring."""
    rows = 128 * (AMAX_PARTIALS + 20)
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(9)).bfloat16()
    x *= torch.linspace(1, 3, rows).unsqueeze(1)
    splits = torch.tensor([100, 128 * (AMAX_PARTIALS - 5), 0, 2000])
    run = Run(kernels, RECIPES["current_e4m3"], Case(x, splits))
    check(run.quantize(columnwise=False), "current_e4m3")


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize(
    "recipe",
    ["current_e4m3", "row", "block_1x128", "mx_32x32", "nv_1x16", "block_1x64", "block_32x32_e5m2"],
)
def test_one_copy(kernels: Kernels, recipe: str, columnwise: bool) -> None:
    for case in ("ragged", "dense"):
        run = Run(kernels, RECIPES[recipe], _case(case, torch.bfloat16))
        check(run.quantize(not columnwise, columnwise), f"{recipe}, {case}")


@pytest.mark.parametrize("recipe", ["block_1x128", "block_1x64", "block_32x32_e5m2"])
@pytest.mark.parametrize("align", [16, 32, 128])
def test_alignment(kernels: Kernels, align: int, recipe: str) -> None:
    for case in ("ragged", "forty groups", "no rows"):
        run = Run(kernels, RECIPES[recipe], _case(case, torch.bfloat16), align)
        check(run.quantize(), f"{align}, {case}")


@pytest.mark.parametrize(
    "recipe", ["block_1x128", "block_1x128_exact", "block_1x64", "block_1x32_e5m2", "block_1x16"]
)
@pytest.mark.parametrize("case", ["ragged", "out of range", "forty groups", "no rows", "dense"])
def test_token_major_scales(kernels: Kernels, recipe: str, case: str) -> None:
    run = Run(kernels, RECIPES[recipe], _case(case, torch.bfloat16))
    check(run.quantize(token_major=True), f"{recipe}, {case}")


def test_longer_dense_copies(kernels: Kernels) -> None:
    """A dense tensor may lie in the space that one group of all tokens would have."""
    for case in ("dense", "tall"):
        run = Run(kernels, RECIPES["block_1x128"], _case(case, torch.bfloat16))
        check(run.quantize(token_major=True, longer=32), case)


def _history(slots: int, margin: int = 0) -> reference.Quantization:
    return reference.Quantization(
        "e5m2", (None, None), "float32", "max_over_amax",
        source="history", history=slots, margin=margin,
    )  # fmt: skip


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 33, 300, 1024])
def test_delayed_update(kernels: Kernels, slots: int, grouped: bool, given: bool) -> None:
    """One step of two states, whose amaxes are in slot 0, or given."""
    rng = torch.Generator().manual_seed(slots)
    groups, margin = 6, 3
    history = torch.rand(slots, groups, generator=rng) * 10
    history[0] = 0
    history[:, 3] = 0
    scale = torch.rand(groups, generator=rng)
    amax = torch.tensor([0.0, 20.0, torch.inf, 0.0, 1e-40, 2.0])
    q = _history(slots, margin)
    wanted = reference.delayed_update(history, scale, amax, q, grouped=grouped)
    history[0] = 0 if given else amax
    history, scale, amax = (t.to(kernels.device) for t in (history, scale, amax))
    state = (slots, groups, 57344.0, margin, grouped, address(amax if given else None))
    arguments = Delayed(count=2)
    arguments.states[0] = DelayedState(address(history), address(scale), *state)
    one = torch.tensor([[3.5]], device=kernels.device)  # fewer groups than the other has
    other = torch.tensor([7.0], device=kernels.device)
    arguments.states[1] = DelayedState(address(one), address(other), 1, 1, 448.0)
    kernels.call("run_delayed", arguments)
    assert torch.equal(history.cpu(), wanted[0])
    assert torch.equal(scale.cpu(), wanted[1])
    assert (one.item(), other.item()) == (0.0, 128.0)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("slots", "steps"), [(1, 40), (2, 40), (31, 200), (33, 200), (100, 500), (1024, 2200)]
)
def test_delayed_updates_follow_the_definition(
    kernels: Kernels, slots: int, steps: int, grouped: bool
) -> None:
    """From the first step until every slot was overwritten twice; zeros and infinity, too."""
    rng = torch.Generator().manual_seed(slots)
    groups, q = 9, _history(slots)  # one more than a block has
    wanted = reference.delayed_state(q, groups)
    history, scale = (t.clone().to(kernels.device) for t in wanted)
    state = (slots, groups, 57344.0, 0, grouped)
    arguments = Delayed(count=1)
    arguments.states[0] = DelayedState(address(history), address(scale), *state)
    for step in range(steps):
        amax = torch.rand(groups, generator=rng) * 10
        fate = torch.rand(groups, generator=rng)
        amax[fate < 0.2] = 0
        amax[fate > 0.999] = torch.inf
        amax[(fate > 0.98) & (fate < 0.99)] = 1e-40
        wanted = reference.delayed_update(*wanted, amax, q, grouped=grouped)
        history[0] = amax.to(kernels.device)
        kernels.call("run_delayed", arguments)
        assert torch.equal(scale.cpu(), wanted[1]), step
        assert torch.equal(history.cpu(), wanted[0]), step


def test_given_amaxes_move_the_states_of_a_call_on_together(kernels: Kernels) -> None:
    """A state waits for the last step of its call, and one that is not updated stays."""
    q, groups, due = _history(4), 3, Delayed()
    found, wanted = [], []
    for number in range(3):
        amax = torch.tensor([1.0, 0.0, 8.0]) + number
        history, scale = (t.to(kernels.device) for t in reference.delayed_state(q, groups))
        found.append((amax.to(kernels.device), history, scale))
        updated = reference.delayed_update(history.cpu(), scale.cpu(), amax, q)
        wanted.append((amax, *(updated if number != 1 else (history.cpu(), scale.cpu()))))
    for number, (amax, history, scale) in enumerate(found):
        state = (4, groups, 57344.0, 0, False, address(amax))
        arguments = UpdateScale(
            DelayedState(address(history), address(scale), *state),
            ctypes.addressof(due),
            number == 2,
            number != 1,
        )
        assert (found[0][2] == 1).all(), "nothing has moved on before the last step"
        kernels.call("run_update_scale", arguments)
    assert due.count == 0
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))


def test_histories_whose_offsets_need_more_than_32_bits_are_refused(kernels: Kernels) -> None:
    arguments = Delayed(count=1)
    arguments.states[0] = DelayedState(None, None, 1, 1 << 21, 448.0)
    with pytest.raises(AssertionError, match=r"groups < 2\^21"):
        kernels.call("run_delayed", arguments)


def test_clear_advances_the_random_state(kernels: Kernels) -> None:
    state = torch.tensor([3, 40], device=kernels.device)
    buffers = [kernels.floats(n) for n in (1, 700, 33)]
    kernels.clear(buffers, state, 2)
    assert state.tolist() == [3, 42]
    for buffer in buffers:
        assert (buffer.bytes() == 0).all()


def _strides(scale: Tensor, columnwise: bool) -> tuple[int, int, int]:
    """From one matrix, line and block to the next."""
    blocks = scale.shape[1:]
    if len(blocks) == 1:
        return blocks.numel(), 1, 0
    return (blocks.numel(), 1, blocks[1]) if columnwise else (blocks.numel(), blocks[1], 1)


def _decoding(recipe: str) -> tuple[int, reference.Quantization]:
    """A kernel's number, and how the reference makes what it reads."""
    found = (RECIPES | CODES)[recipe]
    return found.config, found.quantization


def _unscaled(recipe: str, operand: reference.Operand) -> reference.Operand:
    """What codes stand for where they are decoded as they are; other copies as they were."""
    return operand._replace(scale=torch.ones_like(operand.scale)) if recipe in CODES else operand


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "recipe",
    [
        *("mx_1x32", "mx_1x32_e5m2", "mx_32x32", "nv_1x16", "nv_16x16", "block_1x128_exact", "row"),
        *("block_1x64", "block_64x64", "block_1x32_e5m2", "block_32x32_e5m2", "mx_1x128_e2m1"),
        *("nv_32x32", *CODES),
    ],
)
def test_dequantize(
    kernels: Kernels, recipe: str, whole: bool, columnwise: bool, transposed: bool
) -> None:
    """Code times block scale; the whole of it takes the tensor's scale, too."""
    config, q = _decoding(recipe)
    x = _case("weights", torch.bfloat16).x
    made = reference.quantize(x, q, rowwise=not columnwise, columnwise=columnwise)
    operand = made.columnwise if columnwise else made.rowwise
    operand = _unscaled(recipe, operand)
    amax = operand.amax if whole else None
    wanted = reference.dequantize(operand._replace(amax=amax)).bfloat16()
    wanted = wanted.transpose(1, 2) if columnwise else wanted
    matrices, lines, length = wanted.shape
    data, scale = (
        t.view(torch.uint8).contiguous().to(kernels.device) for t in (operand.data, operand.scale)
    )
    on_device = None if amax is None else amax.to(kernels.device)
    output = Buffer(wanted.numel() * 2, kernels.device)
    arguments = _Dequantize(
        address(data),
        None if recipe in CODES else address(scale),
        address(output),
        matrices,
        lines,
        length,
        data.shape[-1],
        *((0, 0, 0) if recipe in CODES else _strides(operand.scale, columnwise)),
        1 if q.block[1] is None else q.block[0],
        address(on_device),
    )
    kernels.call("run_dequantize", int(transposed), config, arguments)
    found = output.bytes().view(torch.bfloat16)
    wanted = wanted.transpose(1, 2).contiguous() if transposed else wanted.contiguous()
    assert torch.equal(found.view(wanted.shape), wanted)


UNTRANSPOSED_BLOCKS = (
    *("block_1x128", "block_1x64", "mx_1x32_e5m2", "block_1x16"),
    *("mx_1x32", "pow2_1x128", "pow2_128x128"),
)


def _decode_untransposed(
    kernels: Kernels, recipe: str, x: Tensor, sizes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What a kernel makes of a columnwise copy that lies as `x`, and what the reference does."""
    own = UNTRANSPOSED[recipe]
    operand = reference.quantize(
        x, own.quantization, rowwise=False, columnwise=True, group_sizes=sizes,
        layout=own.layout(128 if own.atoms else 32),
    ).columnwise  # fmt: skip
    wanted = reference.dequantize(operand, group_sizes=sizes).bfloat16()
    matrices, lines, length = wanted.view(-1, *wanted.shape[-2:]).shape
    inner = operand.scale.shape[operand.scale.dim() - (5 if own.atoms else 2) :]
    start = 128 if own.atoms else own.quantization.block[1]
    output = Buffer(wanted.numel() * 2, kernels.device)
    arguments = _Dequantize(
        address(operand.data), address(operand.scale), address(output), matrices, lines, length,
        operand.data.shape[-1], inner.numel(), inner[1], 1, start, None,
        address(sizes), 0 if sizes is None else len(sizes), 0, 0 if sizes is None else start,
    )  # fmt: skip
    kernels.call("run_dequantize_untransposed", own.config, arguments)
    return output.bytes().view(torch.bfloat16).view(wanted.shape), wanted


@pytest.mark.parametrize("recipe", UNTRANSPOSED_BLOCKS)
def test_dequantize_untransposed(kernels: Kernels, recipe: str) -> None:
    found, wanted = _decode_untransposed(kernels, recipe, _case("weights", torch.bfloat16).x, None)
    assert torch.equal(found, wanted)


every_grouping = pytest.mark.parametrize(
    ("splits", "rows"),
    [([0, 5, 130, 0, 33], 200), ([-4, 2**62, 9], 77), ([3] * 70, 512), ([17], 17), ([0, 0], 64)],
)


@pytest.mark.parametrize("recipe", UNTRANSPOSED_BLOCKS)
@every_grouping
def test_dequantize_untransposed_groups(
    kernels: Kernels, recipe: str, splits: list[int], rows: int
) -> None:
    """Lines past all groups are left alone."""
    x = torch.randn(rows, 136, generator=torch.Generator().manual_seed(2)).bfloat16()
    sizes = torch.tensor(splits)
    found, wanted = _decode_untransposed(kernels, recipe, x, sizes)
    end = int(sizes.clamp(0, rows).cumsum(0).clamp(max=rows)[-1])
    assert torch.equal(found[:end], wanted[:end])
    assert (found[end:].view(torch.uint8) == UNWRITTEN).all()


@pytest.mark.parametrize(
    "recipe",
    [
        *("nv_1x16", "block_1x128_exact", "current_e4m3"),
        *("block_1x64", "block_1x32_e5m2", "block_64x64", "block_32x32_e5m2", "nv_32x32"),
    ],
)
@every_grouping
def test_dequantize_rows_of_groups(
    kernels: Kernels, recipe: str, splits: list[int], rows: int
) -> None:
    """By an amax or a scale of the row's group, or scales that lie where padded groups begin."""
    q = RECIPES[recipe].quantization
    columns, align = 136, 32
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)).bfloat16()
    sizes = torch.tensor(splits)
    operand = reference.quantize(x, q, group_sizes=sizes).rowwise
    wanted = reference.dequantize(operand, group_sizes=sizes).bfloat16()
    square = q.block[0] not in (1, None)
    by_token = q.rule == "max_over_amax" and q.block[0] == 1
    scale = reference.token_major(operand.scale, sizes, align) if by_token else operand.scale
    line, block = (1, scale.shape[1]) if by_token else (scale.shape[-1], 1)
    of_group = int(q.block == (None, None))
    if of_group:
        line, block = 0, 0
    data, stored, on_device = (
        t.to(kernels.device)
        for t in (operand.data.view(torch.uint8), scale.view(torch.uint8), sizes)
    )
    amax = operand.amax.to(kernels.device) if q.tensor_scale else None
    output = Buffer(wanted.numel() * 2, kernels.device)
    arguments = _Dequantize(
        *(address(each) for each in (data, stored, output)),
        *(1, rows, columns, data.shape[-1], 0, line, block, q.block[0] if square else 1),
        *(address(amax), address(on_device), len(splits)),
        *(of_group, align if by_token else q.block[0] if square else 0),
    )
    kernels.call("run_dequantize", 0, RECIPES[recipe].config, arguments)
    ends = sizes.clamp(0, rows).cumsum(0).clamp(max=rows)
    found = output.bytes().view(torch.bfloat16).view(rows, columns)[: int(ends[-1])]
    assert torch.equal(found, wanted[: int(ends[-1])])


@pytest.mark.parametrize(
    "recipe",
    [
        *("mx_1x32", "nv_1x16", "nv_1x16_hadamard", "current_e4m3", "row", "block_1x128_exact"),
        *("mx_32x32", "block_1x64", "block_64x64", "block_32x32_e5m2", "mx_1x128_e2m1", *CODES),
    ],
)
@every_grouping
def test_dequantize_groups(kernels: Kernels, recipe: str, splits: list[int], rows: int) -> None:
    """Rows of a group at its padded place, zeros after them, and the padded sizes."""
    config, q = _decoding(recipe)
    columns, align = 136, 32
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)).bfloat16()
    sizes = torch.tensor(splits)
    made = reference.quantize(x, q, rowwise=False, columnwise=True, group_sizes=sizes)
    operand = _unscaled(recipe, made.columnwise)
    values, placed = reference._read(operand, sizes)
    places, count = placed.places(align)
    wanted = torch.zeros(count, columns)
    wanted[places[placed.valid]] = values[placed.valid]
    ends = sizes.clamp(0, rows).cumsum(0).clamp(max=rows)
    starts, _ = reference._rows((rows, columns), sizes, sizes.device).starts(align)
    ends = torch.cat((starts[1:], (ends[-1:] // align + len(splits))))
    data, scale, on_device, padded = (
        t.to(kernels.device)
        for t in (
            operand.data.view(torch.uint8),
            operand.scale.view(torch.uint8),
            sizes,
            torch.full_like(sizes, -1),
        )
    )
    output = Buffer(count * columns * 2, kernels.device)
    arguments = _DequantizeGroups(
        address(data),
        None if recipe in CODES else address(scale),
        address(output),
        address(on_device),
        address(padded),
        rows,
        columns,
        len(splits),
        data.shape[-1],
        align,
    )
    kernels.call("run_dequantize_groups", config, arguments)
    assert torch.equal(padded.cpu(), align * (ends - starts))
    used = align * int(ends[-1])
    found = output.bytes().view(torch.bfloat16).view(count, columns)[:used]
    assert torch.equal(found, wanted[:used].bfloat16())


class Step:
    """A quantise step: amaxes, copies, sums over rows and state, as a plan launches it."""

    def __init__(self, kernels: Kernels, recipe: str, case: Case, update: bool) -> None:
        self.run = Run(kernels, RECIPES[recipe], case)
        self.kernels, self.case, self.update = kernels, case, update
        self.q = self.run.q
        self.arguments = _Step(quantize=self.run.arguments(), update=update)
        self.outputs: dict[str, tuple[Buffer, Tensor]] = {}
        self.scale = self.history = self.rng_state = None
        if self.q.source == "history":
            rng = torch.Generator().manual_seed(1)
            self.scale = torch.rand(case.groups, generator=rng) * 100
            self.history = torch.rand(self.q.history, case.groups, generator=rng)
            self.history[0] = 0
        if self.q.rounding == "stochastic":
            self.rng_state = torch.tensor([0x123456789ABCDEF, 7])

    def launch(self, rowwise: bool, columnwise: bool) -> None:
        due = Delayed()
        self.prepare(rowwise, columnwise, due, moves_states=True)
        self.kernels.call("run_step", self.run.half, self.run.recipe.config, self.arguments)
        self.check()

    def prepare(self, rowwise: bool, columnwise: bool, due: Delayed, *, moves_states: bool) -> None:
        """Fill in the arguments; states that are to move on go to ``due``."""
        x, splits = self.case.x, self.case.splits
        made = reference.quantize(
            x, self.q, rowwise=rowwise, columnwise=columnwise, group_sizes=splits,
            scale=self.scale, rng_state=self.rng_state,
        )  # fmt: skip
        for name, operand in (("rowwise", made.rowwise), ("columnwise", made.columnwise)):
            if operand is not None:
                self._add_copy(name, operand)
        self._add_scratch()
        device = self.kernels.device
        states = (self.scale, self.history, self.rng_state)
        self.kept = [None if t is None else t.clone().to(device) for t in states]
        arguments = self.arguments
        scale, history, rng_state = map(address, self.kept)
        arguments.rng_state = rng_state
        if history is not None:
            largest, margin = reference.MAX[self.q.format], self.q.margin
            arguments.state = DelayedState(
                history,
                scale,
                self.q.history,
                self.case.groups,
                largest,
                margin,
                splits is not None,
            )
            arguments.due, arguments.moves_states = ctypes.addressof(due), moves_states
        self.sums = Buffer(2 * self.case.groups * self.case.columns, device)
        arguments.sums = self.sums.pointer()

    def check(self) -> None:
        """Copies, amaxes, sums and state are what the reference says."""
        check({n: (b.bytes(), w) for n, (b, w) in self.outputs.items()}, "step")
        self.run.check_sums(self.sums.bytes().view(self.case.x.dtype).float(), 5e-3)
        self._check_state(*self.kept)

    def _add_copy(self, name: str, operand: object) -> None:
        data, scale = (t.view(torch.uint8) for t in (operand.data, operand.scale))  # type: ignore[attr-defined]
        buffers = [Buffer(t.numel(), self.kernels.device) for t in (data, scale)]
        copy = getattr(self.arguments.quantize, name)
        copy.data, copy.scale = (buffer.pointer() for buffer in buffers)
        copy.pitch = data.shape[-1]
        self.outputs[f"{name} data"] = buffers[0], data.flatten()
        self.outputs[f"{name} scale"] = buffers[1], scale.flatten()
        if self.q.tensor_scale:
            amax = operand.amax  # type: ignore[attr-defined]
            buffer = self.kernels.floats(len(amax))
            setattr(self.arguments, f"{name}_amax", buffer.pointer())
            self.outputs[f"{name} amax"] = buffer, amax.view(torch.uint8)

    def _add_scratch(self) -> None:
        case, floats = self.case, self.kernels.floats
        self.scratch = [
            floats(case.groups), floats(2 * case.groups * AMAX_PARTIALS), floats(case.all_rows),
            floats(case.groups * case.columns), floats(case.segments() * case.columns),
        ]  # fmt: skip
        arguments = self.arguments
        amax, partials, arguments.row_amax, arguments.column_amax, sums = map(address, self.scratch)
        arguments.amax, arguments.partial_amax = amax, partials
        arguments.quantize.row_sums = sums
        if self.q.block == (None, None) and self.q.source != "history":
            wanted = reference.group_amax(case.x, self.q, group_sizes=case.splits)
            self.outputs["amax"] = self.scratch[0], wanted.view(torch.uint8)

    def _check_state(
        self, scale: Tensor | None, history: Tensor | None, rng_state: Tensor | None
    ) -> None:
        if scale is not None and history is not None:
            wanted = (self.history, self.scale)
            if self.update:
                amax = reference.group_amax(self.case.x, self.q, group_sizes=self.case.splits)
                grouped = self.case.splits is not None
                wanted = reference.delayed_update(*wanted, amax, self.q, grouped=grouped)
            assert torch.equal(history.cpu(), wanted[0]) and torch.equal(scale.cpu(), wanted[1])
        if rng_state is not None:
            steps = int(self.update)
            assert torch.equal(rng_state.cpu(), reference.advance(self.rng_state, steps))
        for buffer in self.scratch:
            buffer.bytes()


@pytest.mark.parametrize("case", ["ragged", "no rows", "dense", "nothing", "weights"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_step(kernels: Kernels, recipe: str, case: str) -> None:
    update = case != "dense"
    for rowwise, columnwise in ((True, True), (True, False), (False, True), (False, False)):
        data = _case(case, torch.bfloat16)
        plain = Case(data.x.nan_to_num(1.0, 1.0, 1.0), data.splits)
        Step(kernels, recipe, plain, update).launch(rowwise, columnwise)


@pytest.mark.parametrize(
    "recipe", [name for name, recipe in RECIPES.items() if recipe.quantization.source == "history"]
)
def test_step_by_a_given_scale(kernels: Kernels, recipe: str) -> None:
    """No history: the amax alone, to be reduced over ranks, or not even that where the backward
    makes a copy again."""
    for case, amax in product(("ragged", "no rows", "dense", "nothing"), (False, True)):
        data = _case(case, torch.bfloat16)
        step = Step(kernels, recipe, data, update=False)
        scale = step.scale
        assert scale is not None
        made = reference.quantize(
            data.x, step.q, rowwise=False, columnwise=True, group_sizes=data.splits, scale=scale
        )
        step._add_copy("columnwise", made.columnwise)
        given = scale.to(kernels.device)
        step.arguments.quantize.scale = address(given)
        if amax:
            found = kernels.floats(step.case.groups)
            step.arguments.amax = found.pointer()
            wanted = reference.group_amax(data.x, step.q, group_sizes=data.splits)
            step.outputs["amax"] = found, wanted.view(torch.uint8)
        kernels.call("run_step", step.run.half, step.run.recipe.config, step.arguments)
        check({n: (b.bytes(), w) for n, (b, w) in step.outputs.items()}, case)


def _several(kernels: Kernels, steps: list[Step]) -> None:
    arguments = _Several(count=len(steps))
    for place, step in enumerate(steps):
        arguments.steps[place] = step.arguments
    kernels.call("run_several", steps[0].run.half, steps[0].run.recipe.config, arguments)


def _plain(name: str) -> Case:
    data = _case(name, torch.bfloat16)
    return Case(data.x.nan_to_num(1.0, 1.0, 1.0), data.splits)


TOGETHER: dict[str, list[tuple[str, bool, bool]]] = {  # cases, and the copies that are wanted
    "one": [("ragged", True, True)],
    "an expert MLP": [
        ("ragged", True, True), ("weights", True, False), ("wide weights", False, True),
    ],
    "nothing first": [("nothing", True, True), ("ragged", True, True)],
    "nothing between": [
        ("dense", True, True), ("nothing dense", True, False), ("no rows", True, True),
        ("weights", True, True),
    ],
    "many groups": [("more groups than a warp holds", True, True), ("forty groups", False, True)],
}  # fmt: skip
AT_ONCE = [
    name
    for name, recipe in RECIPES.items()
    if not recipe.quantization.tensor_scale
    and (recipe.quantization.source == "history" or None not in recipe.quantization.block)
]


@pytest.mark.parametrize("together", TOGETHER)
@pytest.mark.parametrize("recipe", AT_ONCE)
def test_several_steps_in_one_launch(kernels: Kernels, recipe: str, together: str) -> None:
    """Bits, sums and states of each as alone; states move on together, behind the last one."""
    due = Delayed()
    cases = TOGETHER[together]
    steps = [Step(kernels, recipe, _plain(name), update=name != "dense") for name, _, _ in cases]
    for step, (_, rowwise, columnwise) in zip(steps, cases, strict=True):
        step.prepare(rowwise, columnwise, due, moves_states=step is steps[-1])
    _several(kernels, steps)
    assert due.count == 0
    for step in steps:
        step.check()


def test_states_that_move_on_later_wait(kernels: Kernels) -> None:
    due = Delayed()
    steps = [Step(kernels, "delayed_e4m3", _plain(name), True) for name in ("ragged", "weights")]
    for step in steps:
        step.prepare(True, True, due, moves_states=False)
    _several(kernels, steps)
    assert due.count == 2
    assert [due.states[i].slots for i in range(2)] == [16, 16]
    for step in steps:
        history = step.kept[1]
        assert history is not None and step.history is not None
        amax = reference.group_amax(step.case.x, step.q, group_sizes=step.case.splits)
        assert torch.equal(history[0].cpu(), amax)
        assert torch.equal(history[1:].cpu(), step.history[1:])


def test_several_amaxes_by_given_scales(kernels: Kernels) -> None:
    """Each is found from nothing; one that nobody asked for is not written."""
    steps = [
        Step(kernels, "delayed_e4m3", _plain(name), False)
        for name in ("ragged", "weights", "dense")
    ]
    kept = []
    for step, wants in zip(steps, (True, False, True), strict=True):
        assert step.scale is not None
        data = step.case
        made = reference.quantize(
            data.x, step.q, rowwise=True, columnwise=False, group_sizes=data.splits,
            scale=step.scale,
        )  # fmt: skip
        step._add_copy("rowwise", made.rowwise)
        given = step.scale.to(kernels.device)
        step.arguments.quantize.scale = address(given)
        found = kernels.floats(data.groups)
        kept.append((given, found))
        if wants:
            step.arguments.amax = found.pointer()
            wanted = reference.group_amax(data.x, step.q, group_sizes=data.splits)
            step.outputs["amax"] = found, wanted.view(torch.uint8)
    _several(kernels, steps)
    for step in steps:
        check({n: (b.bytes(), w) for n, (b, w) in step.outputs.items()}, "given scales")
    assert (kept[1][1].bytes() == UNWRITTEN).all()


@pytest.mark.parametrize("count", [0, MOST_STEPS + 1])
def test_a_launch_of_too_few_or_too_many_steps_is_refused(kernels: Kernels, count: int) -> None:
    with pytest.raises(AssertionError, match="1 to 4 steps"):
        kernels.call("run_several", 0, 5, _Several(count=count))


def test_a_tensor_that_cannot_be_quantised_keeps_the_others_from_it(kernels: Kernels) -> None:
    good, bad = (Step(kernels, "mx_1x32", _plain("dense"), False) for _ in range(2))
    for step in (good, bad):
        step.prepare(True, True, Delayed(), moves_states=False)
    bad.arguments.quantize.columns = 12
    with pytest.raises(AssertionError, match="columns: a multiple of 8"):
        _several(kernels, [good, bad])
    for buffer, _ in good.outputs.values():
        assert (buffer.bytes() == UNWRITTEN).all()


def _of_atoms(case: Case, recipe: str, columnwise: bool) -> reference.Operand:
    """A copy whose scales lie in atoms, as the reference makes it."""
    q = ATOMS[recipe].quantization
    made = reference.quantize(
        case.x, q, rowwise=not columnwise, columnwise=columnwise, group_sizes=case.splits,
        layout=reference.Layout(align=128, atoms=True),
        rng_state=torch.tensor([3, 7]) if q.rounding == "stochastic" else None,
    )  # fmt: skip
    return made.columnwise if columnwise else made.rowwise


DECODED_ATOMS = ("mx_1x32", "mx_32x32", "nv_1x16", "pow2_128x128")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("recipe", DECODED_ATOMS)
def test_dequantize_from_atoms(
    kernels: Kernels, recipe: str, columnwise: bool, transposed: bool
) -> None:
    case = _case("weights", torch.bfloat16)
    operand = _of_atoms(case, recipe, columnwise)
    wanted = reference.dequantize(operand).bfloat16()
    wanted = wanted.transpose(1, 2) if columnwise else wanted
    matrices, lines, length = wanted.shape
    output = Buffer(wanted.numel() * 2, kernels.device)
    along = operand.scale.shape[1:]
    arguments = _Dequantize(
        address(operand.data), address(operand.scale), address(output),
        matrices, lines, length, operand.data.shape[-1],
        along.numel(), along[1], 0, 1, address(operand.amax),
    )  # fmt: skip
    kernels.call("run_dequantize", int(transposed), ATOMS[recipe].config, arguments)
    found = output.bytes().view(torch.bfloat16)
    wanted = wanted.transpose(1, 2).contiguous() if transposed else wanted.contiguous()
    assert torch.equal(found.view(wanted.shape), wanted)


@pytest.mark.parametrize("recipe", DECODED_ATOMS)
@every_grouping
def test_dequantize_rows_of_groups_from_atoms(
    kernels: Kernels, recipe: str, splits: list[int], rows: int
) -> None:
    x = torch.randn(rows, 136, generator=torch.Generator().manual_seed(2)).bfloat16()
    sizes = torch.tensor(splits)
    operand = _of_atoms(Case(x, sizes), recipe, columnwise=False)
    wanted = reference.dequantize(operand, group_sizes=sizes).bfloat16()
    output = Buffer(wanted.numel() * 2, kernels.device)
    arguments = _Dequantize(
        address(operand.data), address(operand.scale), address(output), 1, rows, 136,
        operand.data.shape[-1], 0, operand.scale.shape[1], 0, 1,
        address(operand.amax), address(sizes), len(splits), 0, 128,
    )  # fmt: skip
    kernels.call("run_dequantize", 0, ATOMS[recipe].config, arguments)
    ends = sizes.clamp(0, rows).cumsum(0).clamp(max=rows)
    found = output.bytes().view(torch.bfloat16).view(rows, 136)[: int(ends[-1])]
    assert torch.equal(found, wanted[: int(ends[-1])])


@pytest.mark.parametrize("recipe", [*DECODED_ATOMS, "nv_1x16_both"])
@every_grouping
def test_dequantize_groups_from_atoms(
    kernels: Kernels, recipe: str, splits: list[int], rows: int
) -> None:
    x = torch.randn(rows, 136, generator=torch.Generator().manual_seed(2)).bfloat16()
    sizes = torch.tensor(splits)
    operand = _of_atoms(Case(x, sizes), recipe, columnwise=True)
    values, placed = reference._read(operand, sizes)
    places, count = placed.places(128)
    wanted = torch.zeros(count, 136)
    wanted[places[placed.valid]] = values[placed.valid]
    starts, _ = placed.starts(128)
    padded = torch.full_like(sizes, -1)
    output = Buffer(count * 136 * 2, kernels.device)
    arguments = _DequantizeGroups(
        address(operand.data), address(operand.scale), address(output), address(sizes),
        address(padded), rows, 136, len(splits), operand.data.shape[-1], 128,
    )  # fmt: skip
    kernels.call("run_dequantize_groups", ATOMS[recipe].config, arguments)
    found = output.bytes().view(torch.bfloat16).view(count, 136)
    for start, padding in zip(starts.tolist(), padded.tolist(), strict=True):
        assert torch.equal(
            found[start : start + padding], wanted.bfloat16()[start : start + padding]
        )
    assert int(padded.sum()) > 0
