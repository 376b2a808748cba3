"""States of delayed scaling lie in one tensor per direction; state dicts have them one by one."""

from __future__ import annotations

import copy
import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as distributed

from fusegen.ir.naming import Cell

from .loading import load_cells
from .ranks import Place, run_ranks

pytestmark = pytest.mark.usefixtures("fresh_compiler")

E, HISTORY = 3, 1024
ROLES = ("fc1.input", "fc1.weight", "fc2.input", "fc2.weight", "fc2.grad_output", "fc1.grad_output")
CELL = "grouped_mlp__fp8_delayed"
RANK = """
import importlib
from torch.distributed.checkpoint import state_dict as distributed
from torch.nn.parallel import DistributedDataParallel
module = importlib.import_module("bundle.CELL")
layer = module.GroupedMLP(3, 32, 16, device=device)
saved = torch.load(f"{folder}/checkpoint.pt") if rank == 0 else {}
broadcast = distributed.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
distributed.set_model_state_dict(DistributedDataParallel(layer), saved, options=broadcast)
torch.save(layer.state_dict(), f"{folder}/{rank}.pt")
""".replace("CELL", CELL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Place]:
    """Name of the package, and where ranks find it."""
    folder = tmp_path_factory.mktemp("states")
    name = load_cells("states", folder, [Cell.parse(CELL), Cell("linear", "fp8_delayed")])
    return name, Place(folder / "cpu")


def make(place: tuple[str, Place], **more: Any) -> Any:
    torch.manual_seed(0)
    return importlib.import_module(f"{place[0]}.{CELL}").GroupedMLP(E, 32, 16, **more)


def checkpoint() -> dict[str, Tensor]:
    """What a module saved when each of its states was a buffer of its own."""
    generator = torch.Generator().manual_seed(5)
    state = {
        "fc1.weight": torch.randn(E, 32, 32, generator=generator).bfloat16(),
        "fc2.weight": torch.randn(E, 32, 16, generator=generator).bfloat16(),
    }
    for number, role in enumerate(ROLES):
        history = torch.rand(HISTORY, E, generator=generator)
        history[0] = 0.0
        state[f"{role}_amax_history"] = history
        state[f"{role}_scale"] = torch.tensor([1.0, 2.0, 0.5]) * 2.0**number
    return state


def train(layer: Any) -> list[Tensor]:
    """Results, gradients and states of two steps."""
    found = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        x = torch.randn(24, 32, generator=generator).bfloat16().requires_grad_()
        y = layer(x, torch.tensor([9, 0, 13]), torch.rand(24, generator=generator))
        y.float().square().sum().backward()
        found += [y.detach(), x.grad]
    return [*found, *layer.state_dict().values()]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def by_hand(place: tuple[str, Place]) -> Any:
    """A module whose tensors hold the checkpoint, row by row."""
    layer, saved = make(place), checkpoint()
    rows = {
        name: torch.cat([saved[f"{role}_{part}"].view(-1, E) for role in roles for part in parts])
        for name, roles, parts in (
            ("forward_state", ROLES[:4], ("amax_history", "scale")),
            ("backward_state", ROLES[4:], ("amax_history", "scale")),
        )
    }
    with torch.no_grad():
        for name, tensor in rows.items():
            getattr(layer, name).copy_(tensor)
        layer.fc1.weight.copy_(saved["fc1.weight"])
        layer.fc2.weight.copy_(saved["fc2.weight"])
    return layer


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_old_checkpoint_gives_the_same_bits(
    place: tuple[str, Place], device: str, assign: bool
) -> None:
    layer = make(place, device=device)
    if device == "meta" and not assign:
        layer.to_empty(device="cpu")
    done = layer.load_state_dict(checkpoint(), strict=True, assign=assign)
    assert not done.missing_keys and not done.unexpected_keys
    assert same(train(layer), train(by_hand(place)))


def test_a_state_dict_has_the_names_and_shapes_of_before(place: tuple[str, Place]) -> None:
    saved, old = make(place).state_dict(), checkpoint()
    assert {name: tensor.shape for name, tensor in saved.items()} == {
        name: tensor.shape for name, tensor in old.items()
    }
    layer = make(place)
    assert {name for name, _ in layer.named_buffers()} == {"forward_state", "backward_state"}


def test_a_missing_and_a_wrong_state_are_named(place: tuple[str, Place]) -> None:
    state = checkpoint()
    del state["fc1.input_scale"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"fc1.input_scale"'):
        make(place).load_state_dict(state)
    state = checkpoint() | {"fc2.input_scale": torch.ones(5)}
    with pytest.raises(RuntimeError, match=r"size mismatch for fc2.input_scale"):
        make(place).load_state_dict(state)


def moved(layer: Any, how: str) -> Any:
    match how:
        case "deepcopy":
            return copy.deepcopy(layer)
        case "pickle":
            return pickle.loads(pickle.dumps(layer))
        case "half":
            return layer.half().bfloat16()
        case "data":  # as FSDP moves buffers
            for tensor in layer.buffers():
                tensor.data = tensor.data.clone()
            return layer
    return layer.to("cpu", torch.float64).to(torch.bfloat16)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "half", "data", "to"])
def test_states_stay_rows_of_their_tensor(place: tuple[str, Place], how: str) -> None:
    layer = moved(by_hand(place), how)
    assert layer.forward_state.dtype == torch.float32
    assert same(train(layer), train(by_hand(place)))
    scale = layer.fc2.input_scale
    assert torch.equal(scale, layer.forward_state[3 * 1025 - 1])
    layer.fc2.input_scale = torch.full((E,), 7.0)
    assert layer.forward_state[3 * 1025 - 1].tolist() == [7.0] * E
    assert torch.equal(layer.state_dict()["fc2.input_scale"], layer.forward_state[3 * 1025 - 1])


def test_compiled_steps_change_them(place: tuple[str, Place]) -> None:
    layer = by_hand(place)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    given = (torch.tensor([9, 0, 13]), torch.rand(24))
    call(x.requires_grad_(), *given).sum().backward()
    eager = by_hand(place)
    eager(x.detach().requires_grad_(), *given).sum().backward()
    assert same([*layer.state_dict().values()], [*eager.state_dict().values()])


def test_distributed_state_dicts_of_a_wrapped_module(place: tuple[str, Place]) -> None:
    """`torch.compile` puts a prefix to each name, which PyTorch takes away again."""
    wrapped: nn.Module = torch.compile(by_hand(place), backend="aot_eager")  # type: ignore[assignment]
    state = distributed.get_model_state_dict(wrapped)
    assert state.keys() == checkpoint().keys()
    other: nn.Module = torch.compile(make(place), backend="aot_eager")  # type: ignore[assignment]
    options = distributed.StateDictOptions(strict=True)
    distributed.set_model_state_dict(other, copy.deepcopy(state), options=options)
    assert same([*other.state_dict().values()], [*wrapped.state_dict().values()])


def test_ranks_get_them_from_the_first(place: tuple[str, Place], tmp_path: Path) -> None:
    torch.save(checkpoint(), tmp_path / "checkpoint.pt")
    run_ranks(RANK, tmp_path, place[1])
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt")
        assert state.keys() == checkpoint().keys()
        for name, tensor in checkpoint().items():
            assert torch.equal(state[name], tensor), name
