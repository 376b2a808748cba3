"""What a release leaves behind to test later ones by.

``PYTHONPATH=tests python -m promises.release COMMIT`` writes ``tests/promises/<version>``: pages of
what the release promises (``surfaces.py``), and ``release.tar.xz`` with its specs, a bundle that it
vendored, and checkpoints that were trained by it.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from click.testing import CliRunner
from promises import surfaces
from torch import Tensor, nn

from fusegen import __version__, cli
from fusegen.publish import paths

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
ARCHIVE = "release.tar.xz"
BUNDLE, SPECS, CHECKPOINTS = "experts", "specs", "checkpoints"
NAMESPACE = "released"
SELECTION = tuple(
    word
    for option, names in (
        ("--arch", ("cpu",)),
        ("--module", ("linear", "grouped_mlp")),
        ("--recipe", ("bf16", "fp8_delayed")),
    )
    for name in names
    for word in (option, name)
)
CELLS = ("linear__bf16", "linear__fp8_delayed", "grouped_mlp__bf16", "grouped_mlp__fp8_delayed")
STEPS = 3
"""That a checkpoint was trained for."""


@dataclass(frozen=True)
class Case:
    """How a module is made and called.

    Attributes:
        name: of the class.
        sizes: of its constructor.
        inputs: of one call.
    """

    name: str
    sizes: Mapping[str, int]
    inputs: Callable[[torch.Generator], tuple[Tensor, ...]]


def _rows(generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randn(8, 16, generator=generator).bfloat16(),)


def _tokens(generator: torch.Generator) -> tuple[Tensor, ...]:
    """Tokens of two experts, the first of which has two rows, the second five; one is nobody's."""
    (x,) = _rows(generator)
    return x, torch.tensor([2, 5]), torch.rand(8, generator=generator)


CASES = {
    "linear": Case("Linear", {"in_features": 16, "out_features": 32}, _rows),
    "grouped_mlp": Case("GroupedMLP", {"num_groups": 2, "hidden": 16, "intermediate": 32}, _tokens),
}


class Training:
    """A module of a bundle, and the training of it.

    Args:
        bundle: name that the bundle was imported under.
        cell: to train.
    """

    def __init__(self, bundle: str, cell: str) -> None:
        self._case = CASES[cell.partition("__")[0]]
        made = getattr(importlib.import_module(f"{bundle}.{cell}"), self._case.name)
        torch.manual_seed(1)
        self.module: nn.Module = made(**self._case.sizes)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self._steps = 0

    def run(self, steps: int) -> list[float]:
        """Train further; the loss of each step."""
        losses = []
        for _ in range(steps):
            self._steps += 1
            inputs = self._case.inputs(torch.Generator().manual_seed(self._steps))
            self._optimizer.zero_grad()
            loss: Tensor = self.module(*inputs).float().square().mean()
            loss.backward()
            self._optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    def checkpoint(self) -> dict[str, Any]:
        """All that the training goes on from."""
        module, optimizer = self.module.state_dict(), self._optimizer.state_dict()
        return {"module": module, "optimizer": optimizer, "steps": self._steps}

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; its keys are those of the module, neither more nor fewer."""
        self.module.load_state_dict(checkpoint["module"], strict=True)
        # An optimizer keeps the tensors that it is given.
        self._optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
        self._steps = checkpoint["steps"]


def load_bundle(name: str, folder: Path) -> str:
    """Import a bundle by path, under a name, which comes back."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec and spec.loader
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return name


def fusegen(*words: str | Path) -> int:
    """The exit code of a command."""
    done = CliRunner().invoke(cli.program, [str(word) for word in words])
    print(done.output)
    return done.exit_code


def bundle_pages() -> dict[str, surfaces.Facts]:
    """What is promised by now, by file, but for the answers of commands."""
    folder = ROOT / "generated" / "cpu"
    lock = json.loads((folder / "fusegen.lock").read_text(encoding="utf-8"))
    name = load_bundle("promised_bundle", folder)
    cells: dict[str, ModuleType] = {
        cell: importlib.import_module(f"{name}.{cell}") for cell in lock["selection"]["cells"]
    }
    return {
        "api.txt": surfaces.api(cells),
        "schemas.txt": surfaces.schemas(cells, "fusegen_cpu"),
        "state_dicts.txt": surfaces.state_dicts(cells),
        "exit_codes.txt": surfaces.exit_codes(),
    }


def _contents(scratch: Path) -> Iterator[tuple[str, Path]]:
    """Files of the archive by their names there."""
    assert fusegen("vendor", BUNDLE, *SELECTION, "--namespace", NAMESPACE) == 0
    name = load_bundle("made_bundle", scratch / BUNDLE / "cpu")
    (scratch / CHECKPOINTS).mkdir()
    for cell in CELLS:
        training = Training(name, cell)
        training.run(STEPS)
        torch.save(training.checkpoint(), scratch / CHECKPOINTS / f"{cell}.pt")
    for root in (scratch / BUNDLE, scratch / CHECKPOINTS, paths.builtin_specs()):
        for path in sorted(root.rglob("*")):
            if path.is_file() and not {"__pycache__", "schema"} & {*path.parts}:
                yield f"{root.name}/{path.relative_to(root).as_posix()}", path


def write(commit: str) -> Path:
    """Write the folder of this version; which comes back."""
    out = FOLDER / __version__
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        pages = {**bundle_pages(), "json.txt": surfaces.json_keys()}
        for name, facts in pages.items():
            (out / name).write_text(surfaces.page(facts), encoding="utf-8", newline="\n")
        (Path(folder) / "made").mkdir()
        os.chdir(Path(folder) / "made")
        with tarfile.open(out / ARCHIVE, "w:xz", preset=9) as archive:
            for name, path in _contents(Path.cwd()):
                entry = tarfile.TarInfo(name)
                entry.size = path.stat().st_size
                with path.open("rb") as file:
                    archive.addfile(entry, file)
        os.chdir(ROOT)
    (out / "commit.txt").write_text(f"{commit}\n", encoding="utf-8")
    return out


if __name__ == "__main__":
    print(write(sys.argv[1]))
