"""Exported bundles as Hugging Face's library `kernels` chooses and loads them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import kernels
import pytest
import torch
from kernels._rust import Digest, DigestAlgorithm
from kernels.backends import CPU, CUDA
from kernels.variants import VariantRejected, _resolve_variant_for_system, get_variants_local
from packaging.version import Version
from walkthroughs.walk import has_toolchain

from fusegen import api
from fusegen.build.toolchain import BuildError, find_toolchain

BACKENDS = {
    "cpu": CPU(),
    "CUDA 12.9": CUDA(Version("12.9")),
    "CUDA 13.0": CUDA(Version("13.0")),
    "CUDA 13.2": CUDA(Version("13.2")),
    "CUDA 14.0": CUDA(Version("14.0")),
}


def vendored(folder: Path, namespace: str, *archs: str) -> Path:
    """A folder of bundles with SiLU, in a namespace of their own."""
    api.vendor(api.Request(folder, (), archs, ("silu",), ("bf16",), namespace=namespace))
    return folder


def silu(kernel: ModuleType) -> torch.Tensor:
    """What the kernel's module computes and the gradient of it."""
    x = torch.linspace(-4, 4, 64).bfloat16().requires_grad_()
    y = kernel.silu__bf16.SiLU()(x)
    y.sum().backward()
    assert x.grad is not None
    return torch.stack((y.detach(), x.grad))


def expected() -> torch.Tensor:
    x = torch.linspace(-4, 4, 64).bfloat16().float().requires_grad_()
    y = torch.nn.functional.silu(x)
    y.sum().backward()
    assert x.grad is not None
    return torch.stack((y.detach(), x.grad))


def test_a_bundle_is_loaded(tmp_path: Path) -> None:
    """The module of the repository runs forward and backward, eager and compiled."""
    bundles = vendored(tmp_path / "my experts", "loaded", "cpu")
    (done,) = api.export_kernels(bundles, tmp_path / "hub", version=3)
    assert done.folder == tmp_path / "hub" / "build" / "torch-cpu"
    kernel = kernels.get_local_kernel(tmp_path / "hub")
    assert dir(kernel) == ["silu__bf16"]
    torch.testing.assert_close(silu(kernel).float(), expected(), rtol=2**-7, atol=2**-8)
    compiled = torch.compile(kernel.silu__bf16.SiLU(), fullgraph=True, backend="aot_eager")
    x = torch.randn(16).bfloat16()
    assert torch.equal(compiled(x), kernel.silu__bf16.SiLU()(x))
    (loaded,) = (each for each in kernels.get_loaded_kernels() if each.module is kernel)
    about = loaded.metadata
    assert (str(about.name), about.version, about.license) == ("loaded", 3, "Apache-2.0")
    assert about.digest is not None
    about.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, done.folder))


def test_the_command_line_of_the_library_reads_it(tmp_path: Path) -> None:
    api.export_kernels(vendored(tmp_path / "b", "told", "cpu"), tmp_path / "hub")
    command = "from kernels.cli import main; main()"
    words = [sys.executable, "-c", command, "info", str(tmp_path / "hub")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Name: told\nVersion: 1\n" in done.stdout and "Backends: cpu\n" in done.stdout


def test_two_versions_side_by_side(tmp_path: Path) -> None:
    """Of namespaces of their own; equal ones share their ops, and different ones are refused."""
    found = {}
    for version, namespace in ((1, "pair_v1"), (2, "pair_v2")):
        bundles = vendored(tmp_path / namespace, namespace, "cpu")
        text = (bundles / "cpu" / "silu__bf16.py").read_text("utf-8")
        edited = text + f"\n\nEDITION = {version}\n"
        (bundles / "cpu" / "silu__bf16.py").write_text(edited, "utf-8")
        out = tmp_path / f"v{version}"
        api.export_kernels(bundles, out, name="pair", version=version)
        found[version] = kernels.get_local_kernel(out)
    assert [found[version].silu__bf16.EDITION for version in (1, 2)] == [1, 2]
    assert found[1].__name__ != found[2].__name__
    assert torch.equal(silu(found[1]), silu(found[2]))


OP = """edition: 1
op: curve
summary: y = {0}
dims: {{T: elements}}
inputs: {{x: {{shape: [T...]}}}}
outputs: {{y: {{shape: [T...]}}}}
pointwise: {{y: {0}}}
"""
MODULE = "edition: 1\nmodule: curve\nclass: Curve\nop: curve\n"


def test_versions_of_one_namespace_that_differ_are_refused(tmp_path: Path) -> None:
    """By the bundles, when the second is used: one op cannot compute two things."""
    for version, formula in enumerate(("x ** 2", "x ** 3")):
        for kind, text in (("ops", OP.format(formula)), ("modules", MODULE)):
            place = tmp_path / f"s{version}" / kind / "curve.yaml"
            place.parent.mkdir(parents=True)
            place.write_text(text, "utf-8")
        folders = api.Folders((tmp_path / f"s{version}",))
        bundles = tmp_path / f"b{version}"
        request = api.Request(
            bundles, (), ("cpu",), ("curve",), ("bf16",), namespace="one", folders=folders
        )
        api.vendor(request)
        api.export_kernels(bundles, tmp_path / f"v{version}", version=version)
    first, second = (kernels.get_local_kernel(tmp_path / f"v{version}") for version in (0, 1))
    assert first.curve__bf16.Curve()(torch.tensor([3.0]).bfloat16()) == 9
    with pytest.raises(ImportError, match=r"namespace .* is taken[\s\S]*--namespace"):
        _ = second.curve__bf16


@pytest.mark.skipif(not has_toolchain(), reason="needs nvcc")
def test_a_compiled_bundle_is_chosen_by_its_cuda_version(tmp_path: Path) -> None:
    bundles = vendored(tmp_path / "b", "chosen", "cpu", "sm_90a")
    with pytest.raises(BuildError, match="the kernels are not compiled\n  run: fusegen build"):
        api.export_kernels(bundles, tmp_path / "hub")
    assert not (tmp_path / "hub" / "build").exists(), "none is written where one cannot be"
    report = api.build(bundles / "sm_90a")
    on_cpu, on_gpu = api.export_kernels(bundles, tmp_path / "hub")
    major, minor = find_toolchain().version
    variants = get_variants_local(tmp_path / "hub" / "build")
    assert {each.variant_str for each in variants} == {on_cpu.folder.name, on_gpu.folder.name}
    chosen = {}
    for name, backend in BACKENDS.items():
        resolved, _ = _resolve_variant_for_system(
            variants, backend, "x86_64", "linux", Version("2.13"), True, None
        )
        chosen[name] = [each.variant_str for each in resolved]
    for name, backend in BACKENDS.items():
        if isinstance(backend, CUDA):
            version = backend.version
            runs = version.major == major and version.minor >= minor
            assert chosen[name] == ([on_gpu.folder.name] if runs else []), name
    assert chosen["cpu"] == [on_cpu.folder.name]
    older, trace = _resolve_variant_for_system(
        variants, CUDA(Version(f"{major}.{minor}")), "x86_64", "linux", Version("2.10"), True, None
    )
    assert not older and all(isinstance(each, VariantRejected) for each in trace)
    library = on_gpu.folder / "lib" / report.library.name
    assert library.read_bytes() == report.library.read_bytes()
    kernel = kernels.get_local_kernel(on_gpu.folder)  # its CPU tensors run the reference
    torch.testing.assert_close(silu(kernel).float(), expected(), rtol=2**-7, atol=2**-8)
    (loaded,) = (each for each in kernels.get_loaded_kernels() if each.module is kernel)
    assert loaded.metadata.backend.archs == ["9.0a"]
