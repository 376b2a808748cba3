"""Several copies of one bundle in one process."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import ModuleType

import bundles
import gpu_support as support
import pytest
import torch

CASE = support.ragged("copies", 5, 300, 72, 136)


def _renamed(word: str) -> str:
    """Another namespace of the same length, so that it can be written into a library's bytes."""
    return "x" + word[1:]


def copy_of(folder: Path, to: Path, namespace: str | None = None) -> Path:
    """A vendored copy, under another op namespace if one is given.

    The namespace is replaced in the library's bytes too: this gives just what a second build
    gives, two libraries of the same kernels in one process, without compiling for minutes.
    """
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("__pycache__"))
    if namespace is not None:
        old = f"fusegen_{folder.name}"
        for path in (to / "_library.py", *to.glob("lib/*.so")):
            path.write_bytes(path.read_bytes().replace(old.encode(), namespace.encode()))
        for path in to.glob("lib/*.so"):
            path.rename(path.with_name(f"{namespace}.so"))
    return to


def run(bundle: ModuleType) -> dict[str, torch.Tensor]:
    operands = support.grouped_linear_operands(CASE, torch.bfloat16)
    dy = support.randn((CASE.tokens, CASE.n), torch.bfloat16, 9)
    return support.forward_backward(support.function_of(bundle, "grouped_linear"), operands, dy)


def test_identical_copies_share_their_ops(bundle: ModuleType, folder: Path, tmp_path: Path) -> None:
    expected = run(bundle)
    other = bundles.load_bundle(copy_of(folder, tmp_path / folder.name), "vendored_same")
    support.assert_same(run(other), expected)
    name = "grouped_linear__bf16_forward"
    assert support.op_of(other, name) is support.op_of(bundle, name)


def test_another_namespace_has_its_own_ops(
    bundle: ModuleType, folder: Path, tmp_path: Path
) -> None:
    expected = run(bundle)
    namespace = _renamed(f"fusegen_{folder.name}")
    place = copy_of(folder, tmp_path / folder.name, namespace)
    other = bundles.load_bundle(place, "vendored_other")
    support.assert_same(run(other), expected)
    name = "grouped_linear__bf16_forward"
    assert support.op_of(other, name) is not support.op_of(bundle, name)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", "CUDA")


def test_another_bundle_in_the_namespace_is_refused(
    bundle: ModuleType, folder: Path, tmp_path: Path
) -> None:
    support.function_of(bundle, "linear")
    place = copy_of(folder, tmp_path / folder.name)
    shutil.rmtree(place / "lib", ignore_errors=True)  # on the CPU there is none
    cell = place / "linear__bf16.py"
    cell.write_text(re.sub(r'(DIGEST = ")[0-9a-f]{8}', r"\g<1>00000000", cell.read_text()))
    other = bundles.load_bundle(place, "vendored_clash")
    with pytest.raises(ImportError) as caught:
        bundles.load_cell(other, "linear__bf16")
    assert str(place) in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "--namespace" in str(caught.value)
