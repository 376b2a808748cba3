"""Fat bundles on a device: the bits of the bundle that they choose, and several in one process.

Libraries are those of the bundles under test, whose cells these are: nothing is built here.  A GPU
also counts as one of an earlier architecture, whose PTX it runs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import bundles
import pytest
import torch
from torch import Tensor

from fusegen import api
from fusegen.ir.naming import Cell
from fusegen.publish.selection import read_selection

from ..generated.loading import write_fat
from ..generated.test_fat import Ops, forget, inputs, layer_of, same, step
from .places import NEEDS_TWO

NAMES = ("grouped_linear__bf16", "linear__fp8_delayed", "grouped_mlp__fp8_block")
FIRST = f"{bundles.DEVICE}:0"
SPECS = api.load_specs()


@pytest.fixture(scope="module")
def fat(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """A fat bundle of these cells, those that the bundle under test has, with its library."""
    recorded = read_selection(folder)
    assert recorded is not None
    cells = [Cell.parse(name) for name in NAMES if (folder / f"{name}.py").exists()]
    made = write_fat(recorded.namespace, tmp_path_factory.mktemp("fat"), cells)
    for inner in made.glob("sm_*"):
        library = bundles.library_of(folder.parent / inner.name)
        if library is not None:
            shutil.copytree(library.parent, inner / "lib")
    return bundles.load_bundle(made, f"fat_{folder.name}")


@contextmanager
def counted_as(fat: ModuleType, **archs: str) -> Iterator[None]:
    """Within it devices are those of architectures, by index: `gpu0="sm_80"`."""
    devices = bundles.load_cell(fat, "_devices")
    before = dict(vars(devices))
    capabilities = {int(name[3:]): SPECS.archs[arch].capability for name, arch in archs.items()}
    vars(devices).update(
        is_gpu=lambda device: True, capability_of=lambda device: capabilities[device.index or 0]
    )
    forget(fat.__name__)
    try:
        yield
    finally:
        vars(devices).update(before)
        forget(fat.__name__)


def names_in(fat: ModuleType) -> list[str]:
    return [name for name in NAMES if name in dir(fat)]


def given(name: str, device: str) -> list[Tensor]:
    found = [(each.detach().to(device), each.requires_grad) for each in inputs(name)]
    return [each.requires_grad_(wanted) for each, wanted in found]


def stepped(bundle: ModuleType, name: str, device: str) -> tuple[list[Tensor], set[str]]:
    """What a training step on a device gives, and the namespaces of the ops that ran."""
    with Ops("") as ops:
        found = step(layer_of(bundle.__name__, name).to(device), given(name, device))
    return [each.cpu() for each in found], {each for each in ops.namespaces if "sm_" in each}


def built(folder: Path) -> Sequence[Path]:
    """The bundles beside the one under test, itself among them, that this device runs."""
    capability = torch.cuda.get_device_capability() if bundles.DEVICE == "cuda" else (9, 0)
    beside = (folder.parent / name for name in ("sm_80", "sm_90a"))
    runs = [each for each in beside if each.is_dir() and bundles.code_on(each, capability)]
    return [each for each in runs if bundles.DEVICE == "cpu" or bundles.library_of(each)]


def test_a_training_step_has_the_bits_of_the_bundle_that_is_chosen(
    fat: ModuleType, folder: Path
) -> None:
    alone = bundles.load_bundle(folder)
    for name in names_in(fat):
        expected, _ = stepped(alone, name, FIRST)
        with counted_as(fat, gpu0=folder.name):
            found, ran = stepped(fat, name, FIRST)
        assert len(ran) == 1 and ran.pop().endswith(f"_{folder.name}")
        same(found, expected)


def test_the_device_itself_says_which(fat: ModuleType, folder: Path) -> None:
    if bundles.DEVICE == "cpu":
        found, ran = stepped(fat, NAMES[0], "cpu")
        assert not ran and found
        return
    devices = bundles.load_cell(fat, "_devices")
    capability = torch.cuda.get_device_capability()
    arch = next(arch.name for arch in devices.ARCHS if arch.runs_on(capability))
    if bundles.library_of(folder.parent / arch) is None:
        with pytest.raises(RuntimeError, match="fusegen build"):
            stepped(fat, NAMES[0], FIRST)
        return
    _, ran = stepped(fat, NAMES[0], FIRST)
    assert len(ran) == 1 and ran.pop().endswith(f"_{arch}")


def test_architectures_take_turns_in_one_process(fat: ModuleType, folder: Path) -> None:
    name = names_in(fat)[0]
    expected = {
        each.name: stepped(bundles.load_bundle(each), name, FIRST)[0] for each in built(folder)
    }
    for arch in (*expected, *reversed(expected)):
        with counted_as(fat, gpu0=arch):
            found, ran = stepped(fat, name, FIRST)
        assert len(ran) == 1 and ran.pop().endswith(f"_{arch}")
        same(found, expected[arch])


def test_what_is_compiled_has_the_bits_too(fat: ModuleType, folder: Path) -> None:
    for name in names_in(fat):
        with counted_as(fat, gpu0=folder.name), torch.no_grad():
            layer = layer_of(fat.__name__, name).to(FIRST)
            expected = layer(*given(name, FIRST))
            compiled = torch.compile(layer, fullgraph=True)(*given(name, FIRST))
        same([compiled.cpu()], [expected.cpu()])


def test_a_call_is_captured_once_it_was_made(fat: ModuleType, folder: Path) -> None:
    if bundles.DEVICE == "cpu":
        pytest.skip("needs a GPU")
    name = names_in(fat)[0]
    with counted_as(fat, gpu0=folder.name), torch.no_grad():
        layer, tensors = layer_of(fat.__name__, name).to(FIRST), given(name, FIRST)
        expected = layer(*tensors).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(*tensors)
        y.zero_()
        graph.replay()
        same([y.cpu()], [expected.cpu()])


@NEEDS_TWO
def test_two_gpus_of_two_architectures(fat: ModuleType, folder: Path) -> None:
    """One module goes from one to the other and back, in one process."""
    if bundles.DEVICE == "cpu":
        pytest.skip("needs two GPUs")
    name, archs = names_in(fat)[0], [each.name for each in built(folder)]
    expected = [
        stepped(bundles.load_bundle(folder.parent / arch), name, FIRST)[0] for arch in archs
    ]
    with counted_as(fat, gpu0=archs[0], gpu1=archs[-1]):
        for _ in range(2):
            for device, bits in zip(("cuda:0", "cuda:1"), (expected[0], expected[-1]), strict=True):
                found, ran = stepped(fat, name, device)
                assert ran.pop().endswith(f"_{archs[0] if device == FIRST else archs[-1]}")
                same(found, bits)
