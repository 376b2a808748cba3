"""Fat bundles in use: one module on several devices, which choose what runs."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusegen import api
from fusegen.families.limits import CAPABILITIES
from fusegen.ir.naming import Cell
from fusegen.spec.serving import all_archs, arch_of

from .loading import load_bundle, write_cells, write_fat
from .planted_gpu import CAPABILITY, plant

pytestmark = pytest.mark.usefixtures("fresh_compiler")

SPECS = api.load_specs()
LINEAR = "linear__fp8_delayed"
CELLS = (
    Cell("linear", "fp8_delayed"),
    Cell("grouped_mlp", "fp8_block", ("add_to_main_grad",)),
    Cell("grouped_linear", "fp8_delayed", ("cached_weights",)),
    Cell("grouped_linear", "mxfp8", ("quantized_weights",)),
    Cell("grouped_linear", "bf16", ("delayed_wgrad",)),
    Cell("grouped_linear", "nvfp4", ("debug",)),
    Cell("quantize", "bf16"),
    Cell("quantize", "mxfp8"),
)
T, E, K, N = 24, 3, 32, 48
HOPPER, AMPERE = (9, 0), (8, 0)
ARCHS = {SPECS.archs[name].capability: name for name in all_archs(SPECS)}
on_every_gpu = pytest.mark.parametrize("capability", ARCHS, ids=ARCHS.values())
on_two_gpus = pytest.mark.parametrize("capability", [HOPPER, AMPERE], ids=["sm_90a", "sm_80"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fat("fat", tmp_path_factory.mktemp("a folder"), CELLS)


@pytest.fixture(scope="module")
def bundle(folder: Path) -> str:
    return load_bundle("fat_bundle", folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same cells for the CPU alone."""
    folder = tmp_path_factory.mktemp("alone")
    return load_bundle("fat_alone", write_cells("fat_alone", "cpu", folder, CELLS))


def cell(bundle: str, name: str) -> ModuleType:
    return importlib.import_module(f"{bundle}.{name}")


@contextmanager
def gpu(bundle: str, capability: tuple[int, int]) -> Iterator[None]:
    """Within it tensors of the CPU count as those of a GPU."""
    devices = importlib.import_module(f"{bundle}._devices")
    before = dict(vars(devices))
    forget(bundle)
    plant(devices, capability)
    try:
        yield
    finally:
        vars(devices).update(before)
        forget(bundle)


def forget(bundle: str) -> None:
    """Every cell asks for the architecture again."""
    torch.compiler.reset()
    for name, module in list(sys.modules.items()):
        if re.fullmatch(rf"{bundle}\.\w+__\w+", name) and hasattr(module, "_cell"):
            module._cell._archs.clear()


class Ops(TorchDispatchMode):
    """Namespaces of the ops that were called, of those that begin so."""

    def __init__(self, prefix: str = "fat_") -> None:
        super().__init__()
        self.prefix = prefix
        self.namespaces: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.startswith(self.prefix):
            self.namespaces.add(func.namespace)
        return func(*args, **(kwargs or {}))


def layer_of(bundle: str, name: str) -> Any:
    torch.manual_seed(0)
    module = cell(bundle, name)
    if name.startswith("linear"):
        return module.Linear(K, N, bias=True)
    if name.startswith("quantize"):
        return module.Quantize()
    made = module.GroupedMLP if "mlp" in name else module.GroupedLinear
    layer = made(E, K, N, bias=True)
    if "main_grad" in name:
        for weight in (layer.fc1.weight, layer.fc2.weight):
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    return layer


def inputs(name: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, K, generator=generator).bfloat16().requires_grad_()
    if name.startswith(("linear", "quantize")):
        return [x]
    sizes = torch.tensor([T - 5, 0, 5])
    return [x, sizes, torch.rand(T, generator=generator)] if "mlp" in name else [x, sizes]


def step(layer: Any, given: Sequence[Tensor]) -> list[Tensor]:
    """A training step: the result, gradients, and all that the module keeps."""
    y = layer(*given)
    y.float().square().sum().backward()
    if hasattr(layer, "backward_dw"):
        layer.backward_dw()
    found = [y.detach(), given[0].grad]
    for parameter in layer.parameters():
        found += [parameter.grad, getattr(parameter, "main_grad", None)]
    found += layer.buffers()
    return [each.clone().float() for each in found if each is not None]


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# Which bundle runs


@on_every_gpu
@pytest.mark.parametrize("name", [str(each) for each in CELLS if str(each) != "quantize__bf16"])
def test_a_training_step_runs_where_its_tensors_are(
    bundle: str, name: str, capability: tuple[int, int]
) -> None:
    with Ops() as here:
        expected = step(layer_of(bundle, name), inputs(name))
    reason = cell(bundle, name)._cell.lacking.get(ARCHS[capability])
    if reason is not None:
        assert "is not that of the reference" in reason
        with gpu(bundle, capability), pytest.raises(RuntimeError, match=re.escape(reason)):
            step(layer_of(bundle, name), inputs(name))
        return
    with gpu(bundle, capability), Ops() as there:
        found = step(layer_of(bundle, name), inputs(name))
    assert here.namespaces == {"fat_all"}
    ours = {each for each in there.namespaces if not each.startswith("fat_all")}
    assert ours == {f"fat_{ARCHS[capability]}"}
    same(found, expected)


@on_every_gpu
def test_the_functions_choose_too(bundle: str, capability: tuple[int, int]) -> None:
    module = cell(bundle, "quantize__mxfp8")
    (x,) = inputs("quantize")
    here = module.quantize(x.detach())
    reason = module._cell.lacking.get(ARCHS[capability])
    if reason is not None:  # its copies lie otherwise, which a CPU has no op for
        assert "is not that of the reference" in reason
        with gpu(bundle, capability), pytest.raises(RuntimeError, match=re.escape(reason)):
            module.quantize(x.detach())
        return
    with gpu(bundle, capability), Ops() as there:
        found = module.quantize(x.detach())
        values = module.dequantize(found)
    assert there.namespaces == {f"fat_{ARCHS[capability]}"}
    assert type(found) is module.Quantized and torch.equal(values, module.dequantize(here))
    for ours, theirs in zip(found, here, strict=True):
        assert str(ours) == str(theirs)
    plain = cell(bundle, "quantize__bf16")
    with gpu(bundle, capability):
        assert plain.quantize(x).rowwise_data is x


def fake(device: str) -> list[Tensor]:
    sizes = ((T, K), torch.bfloat16), ((N, K), torch.bfloat16)
    states = ((2050, 1), torch.float32), ((1025, 1), torch.float32)
    return [torch.empty(size, dtype=dtype, device=device) for size, dtype in (*sizes, *states)]


def call(
    module: ModuleType, x: Tensor, weight: Tensor, forward: Tensor, backward: Tensor
) -> Tensor:
    result: Tensor = module.linear(x, weight, forward_state=forward, backward_state=backward)
    return result


def test_two_gpus_of_different_architecture_in_one_process(
    bundle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By device, whichever comes first, and beside the CPU."""
    module = cell(bundle, LINEAR)
    found = {0: HOPPER, 1: AMPERE, 2: HOPPER}
    devices = importlib.import_module(f"{bundle}._devices")
    monkeypatch.setattr(devices, "capability_of", lambda device: found[device.index])
    forget(bundle)
    for device, arch in (("cuda:1", "sm_80"), ("cuda:0", "sm_90a"), ("cpu", "all")) * 2:
        with torch.no_grad(), FakeTensorMode(), Ops() as ops:
            assert call(module, *fake(device)).shape == (T, N)
        assert ops.namespaces == {f"fat_{arch}"}
    with torch.no_grad(), FakeTensorMode(), Ops() as ops:
        call(module, *fake("cuda:2"))
    assert ops.namespaces == {"fat_sm_90a"}
    forget(bundle)


def test_the_architecture_of_a_gpu_is_that_of_native(bundle: str) -> None:
    devices = importlib.import_module(f"{bundle}._devices")
    for capability in CAPABILITIES:
        fit = [arch.name for arch in devices.ARCHS if arch.runs_on(capability)]
        assert (fit[0] if fit else None) == arch_of(capability, SPECS)


def test_meta_tensors_need_no_gpu(bundle: str) -> None:
    with torch.no_grad():
        assert call(cell(bundle, LINEAR), *fake("meta")).is_meta


# One module


@pytest.mark.parametrize("name", [str(each) for each in CELLS])
def test_a_state_goes_to_a_bundle_of_one_architecture_and_back(
    bundle: str, alone: str, name: str
) -> None:
    ours, theirs = layer_of(bundle, name), layer_of(alone, name)
    for layer in (ours, theirs):
        if name != "quantize__bf16":
            step(layer, inputs(name))
    state = ours.state_dict()
    assert list(state) == list(theirs.state_dict())
    assert [p.shape for p in ours.parameters()] == [p.shape for p in theirs.parameters()]
    for layer in (theirs, layer_of(bundle, name)):
        layer.load_state_dict(state)
        same([*map(_float, layer.state_dict().values())], [*map(_float, state.values())])
    assert inspect.signature(type(ours)) == inspect.signature(type(theirs))
    assert inspect.signature(type(ours).forward) == inspect.signature(type(theirs).forward)


def _float(tensor: Tensor) -> Tensor:
    return tensor.float()


def test_it_is_copied_pickled_and_moved_as_one_module(bundle: str) -> None:
    layer, given = layer_of(bundle, LINEAR), inputs(LINEAR)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.copy(layer).to("cpu")]
    with gpu(bundle, HOPPER):
        expected = step(layer, given)
        moved = copy.deepcopy(layer)
        assert type(pickle.loads(pickle.dumps(layer))) is type(layer)
    given[0].grad = None
    same(step(copies[1], given), expected)
    assert [name for name, _ in moved.named_modules()] == [
        name for name, _ in layer.named_modules()
    ]
    assert copies[0].to("meta").weight.is_meta


def test_training_goes_on_where_the_module_is_moved_to(bundle: str) -> None:
    """A step on each of three devices is three steps on one."""
    layer, once = layer_of(bundle, LINEAR), layer_of(bundle, LINEAR)
    for capability in (None, HOPPER, AMPERE):
        given, others = inputs(LINEAR), inputs(LINEAR)
        expected = step(once, others)
        if capability is None:
            same(step(layer, given), expected)
        else:
            with gpu(bundle, capability):
                same(step(layer, given), expected)


# Compilers


@on_two_gpus
def test_it_compiles_as_one_graph(bundle: str, capability: tuple[int, int]) -> None:
    for name in (LINEAR, "grouped_mlp__fp8_block__add_to_main_grad", "quantize__mxfp8"):
        expected = step(layer_of(bundle, name), inputs(name))
        with gpu(bundle, capability):
            layer = layer_of(bundle, name)
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            given = inputs(name)
            y = compiled(*given)
            y.float().square().sum().backward()
            same([y.detach().float(), given[0].grad.float()], expected[:2])  # type: ignore[union-attr]


def test_compiled_code_follows_the_device(bundle: str) -> None:
    """What was compiled for one architecture does not run for another."""
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(re.findall(r"fat_\w+", str(graph.code)))
        return graph.forward

    layer = layer_of(bundle, LINEAR)
    for capability in (None, HOPPER, AMPERE, None):
        with torch.no_grad():
            if capability is None:
                torch.compile(layer, fullgraph=True, backend=backend)(*inputs(LINEAR))
            else:
                with gpu(bundle, capability):
                    torch.compile(layer, fullgraph=True, backend=backend)(*inputs(LINEAR))
    assert list(dict.fromkeys(seen)) == ["fat_all", "fat_sm_90a", "fat_sm_80"]


class Called(nn.Module):
    def __init__(self, module: ModuleType) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, weight: Tensor, forward: Tensor, backward: Tensor) -> Tensor:
        return call(self.module, x, weight, forward, backward)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_has_the_ops_of_the_device(bundle: str, strict: bool) -> None:
    with gpu(bundle, HOPPER), torch.no_grad():
        layer = layer_of(bundle, LINEAR)
        program = torch.export.export(layer, tuple(inputs(LINEAR)), strict=strict)
        assert "fat_sm_90a.linear__fp8_delayed_forward" in str(program.graph)
    with torch.no_grad():
        program = torch.export.export(layer, tuple(inputs(LINEAR)), strict=strict)
    assert "fat_all.linear__fp8_delayed_forward" in str(program.graph)


def test_it_is_exported_for_a_gpu_of_fake_tensors(
    bundle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = importlib.import_module(f"{bundle}._devices")
    monkeypatch.setattr(devices, "capability_of", lambda _: AMPERE)
    forget(bundle)
    with torch.no_grad(), FakeTensorMode():
        program = torch.export.export(Called(cell(bundle, LINEAR)), tuple(fake("cuda:0")))
    assert "fat_sm_80.linear__fp8_delayed_forward" in str(program.graph)
    forget(bundle)


# Errors


def test_a_gpu_that_nobody_generated_for_names_the_command(bundle: str, folder: Path) -> None:
    layer, given = layer_of(bundle, "grouped_mlp__fp8_block__add_to_main_grad"), inputs("mlp")
    with gpu(bundle, (7, 5)), pytest.raises(RuntimeError) as caught:
        layer(*given)
    command = (
        "fusegen generate --arch all --module grouped_mlp --recipe fp8_block --option "
        f"add_to_main_grad --out '{folder.parent}'"
    )
    assert "capability 7.5" in str(caught.value) and str(caught.value).endswith(command)
    layer(*given)  # the CPU's


def test_fake_tensors_on_a_gpu_that_is_not_there(
    bundle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(bundle)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with torch.no_grad(), FakeTensorMode(), pytest.raises(RuntimeError, match="there is none"):
        call(cell(bundle, LINEAR), *fake("cuda:0"))


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """A copy whose files may be changed."""
    return Path(shutil.copytree(folder, tmp_path / "own" / "all"))


def failure(folder: Path, name: str, capability: tuple[int, int]) -> str:
    bundle = load_bundle(f"fat_{folder.parents[1].name}", folder)
    with gpu(bundle, capability), pytest.raises((RuntimeError, ImportError)) as caught:
        layer_of(bundle, name)(*inputs(name))
    return str(caught.value)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def stated_digest(path: Path, arch: str) -> str:
    found = re.search(rf'\n        "{arch}": "([0-9a-f]+)",', path.read_text(encoding="utf-8"))
    assert found
    return found[1]


def test_a_cell_that_the_architecture_lacks(own: Path) -> None:
    """The error names the reason, and what works: other architectures, one of them on this GPU."""
    path = own / f"{LINEAR}.py"
    edit(path, f'"sm_90a": "{stated_digest(path, "sm_90a")}",', "")
    edit(path, "lacking={}", 'lacking={"sm_90a": "it has no such MMA"}')
    said = failure(own, LINEAR, HOPPER)
    assert "cpu is for sm_90a, where it cannot be made: it has no such MMA; it was made for" in said
    others = said.partition("CPUs, ")[2].partition(";")[0].split(", ")
    assert "sm_80" in others and "sm_90a" not in others
    assert "cpu also runs " in said and said.endswith(f".{LINEAR}")


def test_a_bundle_that_was_made_anew_alone(own: Path) -> None:
    path = own / f"{LINEAR}.py"
    edit(path, stated_digest(path, "sm_80"), "0" * 64)
    said = failure(own, LINEAR, AMPERE)
    assert "has another one than" in said and f"fusegen generate --out {own.parent}" in said


def test_a_bundle_that_is_not_there(own: Path) -> None:
    shutil.rmtree(own / "sm_80")
    said = failure(own, LINEAR, AMPERE)
    assert f"{own / 'sm_80'}: No module named" in said and "make it anew: fusegen generate" in said


def test_kernels_that_are_not_built(bundle: str, folder: Path) -> None:
    """As in any bundle: the GPU's op says which command builds it."""
    library = importlib.import_module(f"{bundle}.sm_80._library")
    assert f"fusegen build '{folder / 'sm_80'}'" in library._explain_absence(LINEAR)


def test_the_reference_of_a_fat_bundle_says_who_chooses(bundle: str) -> None:
    library = importlib.import_module(f"{bundle}._library")
    assert "call the module or its function" in library._explain_absence(LINEAR)


# The tests that it brings


@pytest.mark.parametrize(
    ("capability", "chosen"), [("", "quantize"), ("9.0", ""), ("8.0", "linear__fp8_delayed")]
)
def test_its_own_tests_pass_on_every_device(folder: Path, capability: str, chosen: str) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
    planted = ["-p", "planted_gpu"] if capability else []
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [*words, *planted, str(folder / "tests")],
        env={**os.environ, CAPABILITY: capability, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout
    if capability:
        major, minor = map(int, capability.split("."))
        assert f"ran as: {ARCHS[major, minor]}\n" in done.stdout
