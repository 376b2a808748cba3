"""What a user relies on after copying a bundle somewhere else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ruff.__main__ import find_ruff_bin

from fusegen import api
from fusegen.publish import paths

from .loading import LOAD

ROOT = Path(__file__).parents[2]

USE = """
import torch
bundle = load("some_name", {folder!r})
module = bundle.grouped_mlp__bf16
layer = module.GroupedMLP(num_groups=3, hidden=16, intermediate=24)
x = torch.randn(7, 16).bfloat16().requires_grad_()
y = layer(x, torch.tensor([3, 0, 2]), torch.rand(7))
y.sum().backward()
assert y.shape == (7, 16) and not y[5:].any() and x.grad[:5].any()
assert "fusegen" not in sys.modules
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that cannot see fusegen."""
    words = [sys.executable, "-I", "-c", LOAD + script]
    hide = "import sys\nsys.modules['fusegen'] = None\n"
    words[-1] = hide + words[-1].replace('assert "fusegen" not in sys.modules\n', "")
    return subprocess.run(words, capture_output=True, text=True, cwd="/")


def copy(bundle: Path, target: Path) -> Path:
    """A vendored copy; only what git would carry."""
    return Path(
        shutil.copytree(bundle, target, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    )


USERS_RUFF = """
[tool.ruff]
line-length = 79
force-exclude = {force}

[tool.ruff.lint]
select = ["ALL"]

[tool.ruff.format]
quote-style = "single"
"""


@pytest.mark.parametrize("force", ["true", "false"])
def test_ruff_of_the_users_changes_nothing(bundle: Path, tmp_path: Path, force: str) -> None:
    """Whatever its configuration, and however files are named: a folder, or one by one."""
    folder = copy(bundle, tmp_path / "src" / "experts")
    (tmp_path / "pyproject.toml").write_text(USERS_RUFF.format(force=force), "utf-8")
    (tmp_path / "src" / "own.py").write_text('x = "a"\n', "utf-8")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    single = sorted(map(str, folder.rglob("*.py")))
    ruff = find_ruff_bin()
    for places in (["src/experts"], single):
        for words in (["format"], ["check", "--fix", "--unsafe-fixes"]):
            command = [ruff, *words, "--no-cache", *places]
            done = subprocess.run(
                command, cwd=tmp_path, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout
    subprocess.run([ruff, "format", "--no-cache", "."], cwd=tmp_path, check=True)
    assert (tmp_path / "src" / "own.py").read_text("utf-8") == "x = 'a'\n"
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_git_leaves_line_ends_as_they_are(bundle: Path, tmp_path: Path) -> None:
    folder = copy(bundle, tmp_path / "experts")
    git = ["git", "-c", "core.autocrlf=true", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "experts"], check=True, capture_output=True)
    file = folder / "linear__bf16.py"
    before = file.read_bytes()
    file.unlink()
    subprocess.run([*git, "checkout", "-q", "--", "experts/linear__bf16.py"], check=True)
    assert file.read_bytes() == before and b"\r" not in before


def test_the_license_comes_along(bundle: Path) -> None:
    assert (bundle / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_works_from_any_folder_without_fusegen(bundle: Path, tmp_path: Path) -> None:
    folder = copy(bundle, tmp_path / "third party" / "experts")
    result = run(USE.format(folder=str(folder)))
    assert result.returncode == 0, result.stderr


def test_two_copies_share_their_ops(bundle: Path, tmp_path: Path) -> None:
    one, two = copy(bundle, tmp_path / "one"), copy(bundle, tmp_path / "two")
    result = run(
        f"""
first = load("first", {str(one)!r}).linear__bf16
second = load("second", {str(two)!r}).linear__bf16
assert first is not second and first._forward is second._forward
"""
    )
    assert result.returncode == 0, result.stderr


def test_another_bundle_in_the_namespace_is_refused(bundle: Path, tmp_path: Path) -> None:
    one, two = copy(bundle, tmp_path / "one"), copy(bundle, tmp_path / "two")
    cell = two / "linear__bf16.py"
    cell.write_text(re.sub(r'DIGEST = ".{64}"', f'DIGEST = "{"0" * 64}"', cell.read_text()))
    result = run(
        f'load("first", {str(one)!r}).linear__bf16\nload("second", {str(two)!r}).linear__bf16'
    )
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError") and str(one) in last and str(two) in last
    assert "--namespace" in last


def vendor(folder: Path, namespace: str, module: str, templates: Path | None = None) -> None:
    """A copy for the CPU in bf16; of the version of fusegen that these templates are of."""
    with pytest.MonkeyPatch.context() as patch:
        if templates is not None:
            patch.setattr(paths, "builtin_templates", lambda: templates)
        request = api.Request(
            folder, (), ("cpu",), (module,), ("bf16",), namespace=namespace, folders=api.BUILTIN
        )
        assert not api.vendor(request).refused


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two copies below packages of a project, of different namespaces and versions of fusegen.

    One of them has a module that was ejected, and edited since.
    """
    root = tmp_path_factory.mktemp("project")
    templates = root / "other_templates"
    shutil.copytree(paths.builtin_templates(), templates)
    for name in ("static/runtime/_cells.py", "static/reference/_steps.py", "module/cell.py.j2"):
        text = (templates / name).read_text()
        (templates / name).write_text(f"{text}\n\nWRITTEN_BY = 'another version'\n")
    vendor(root / "mine" / "layers" / "experts", "mine", "mlp")
    vendor(root / "mine" / "layers" / "experts", "mine", "silu")
    vendor(root / "theirs" / "kernels", "theirs", "mlp", templates)
    vendor(root / "theirs" / "kernels", "theirs", "silu", templates)
    shutil.rmtree(templates)
    (root / "mine" / "__init__.py").write_text("")
    api.eject(root / "mine" / "layers" / "experts", "silu")
    ejected = root / "mine/layers/experts/cpu/ejected/silu__bf16/reference/silu__bf16.py"
    ejected.write_text(ejected.read_text() + "\n\nMINE = 1\n")
    return root


def test_two_copies_in_one_process(project: Path) -> None:
    """Imported by name under different parents: a package, and a folder that is none."""
    script = f"""
import torch
sys.path.insert(0, {str(project)!r})
from mine.layers.experts.cpu.mlp__bf16 import MLP as Mine
from theirs.kernels.cpu.mlp__bf16 import MLP as Theirs
from mine.layers.experts.cpu.silu__bf16 import silu as mine_silu
from theirs.kernels.cpu.silu__bf16 import WRITTEN_BY, silu as theirs_silu
import mine.layers.experts.cpu as bundle
assert "silu__bf16" in dir(bundle) and bundle.silu__bf16.silu is mine_silu
assert bundle.ejected.silu__bf16.reference.silu__bf16.MINE == 1

results = []
for layer_class, silu in ((Mine, mine_silu), (Theirs, theirs_silu)):
    torch.manual_seed(0)
    layer = layer_class(16, 24)
    x = torch.randn(8, 16).bfloat16().requires_grad_()
    y = silu(layer(x))
    y.sum().backward()
    results.append((y, x.grad, *(p.grad for p in layer.parameters())))
assert all(map(torch.equal, *results))
ops = ("mlp__bf16_forward", "silu__bf16_forward")
for op in ops:
    assert getattr(torch.ops.mine_cpu, op) is not getattr(torch.ops.theirs_cpu, op)
assert "silu__bf16" not in sys.modules
"""
    result = run(script)
    assert result.returncode == 0, result.stderr


def test_two_copies_in_one_run_of_pytest(project: Path) -> None:
    """Tests of the same names, in pytest's default mode of imports."""
    words = ["-v", "-p", "no:cacheprovider", "-k", "silu and (matches or module)"]
    run_tests = [sys.executable, "-m", "pytest", *words, "mine", "theirs"]

    def ended() -> subprocess.CompletedProcess[str]:
        return subprocess.run(run_tests, capture_output=True, text=True, cwd=project, check=False)

    done = ended()
    assert done.returncode == 0, done.stdout[-3000:]
    for place in ("mine/layers/experts/cpu/ejected/silu__bf16", "theirs/kernels/cpu"):
        assert f"\n{place}/tests/test_silu__bf16.py::test_module[cpu] PASSED" in done.stdout
    for folder in ("mine/layers/experts", "theirs/kernels"):
        (project / folder / "__init__.py").unlink()
    assert "import file mismatch" in ended().stdout  # which is what they are packages for


def test_a_stale_library_is_refused(bundle: Path, tmp_path: Path) -> None:
    folder = copy(bundle, tmp_path / "copy")
    (folder / "lib").mkdir()
    library = folder / "lib" / f"fusegen_{bundle.name}.so"
    library.write_bytes(b"built from something")
    result = run(f'load("vendored", {str(folder)!r}).linear__bf16')
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError") and str(library) in last
    assert f"fusegen build {folder}" in last


def test_unknown_module_names_the_known_ones(bundle: Path) -> None:
    result = run(f'load("b", {str(bundle)!r}).linear__fp7')
    assert "AttributeError" in result.stderr and "linear__bf16" in result.stderr


@pytest.mark.parametrize("mode", ["default", "dynamic"])
def test_compiles_with_inductor_once_for_all_token_counts(mode: str) -> None:
    """One graph for every number of tokens, equal to eager bit for bit."""
    script = f"""
import torch
from torch._dynamo.testing import CompileCounterWithBackend
bundle = load("b", {str(ROOT / "generated" / "cpu")!r})
module = bundle.grouped_mlp__bf16
torch.manual_seed(0)
layer = module.GroupedMLP(num_groups=3, hidden=16, intermediate=24)
counter = CompileCounterWithBackend("inductor")
compiled = torch.compile(layer, fullgraph=True, backend=counter)
for tokens in (7, 12, 33):
    x = torch.randn(tokens, 16).bfloat16().requires_grad_()
    splits, probs = torch.tensor([3, 0, 2]), torch.rand(tokens)
    if {mode == "dynamic"}:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(probs, 0)
    y = compiled(x, splits, probs)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    other = layer(x, splits, probs)
    (dx_other,) = torch.autograd.grad(other, x, torch.ones_like(y))
    assert torch.equal(y, other) and torch.equal(dx, dx_other)
    if {mode == "default"}:
        break
assert counter.frame_count == 1, counter.frame_count
"""
    result = run(script)
    assert result.returncode == 0, result.stderr[-3000:]


def test_torch_is_new_enough() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert (major, minor) >= (2, 11)
