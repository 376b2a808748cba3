"""A mixture-of-experts layer around a generated expert MLP, trained on a toy problem.

    python examples/moe_layer.py                  # the CPU bundle of this repository
    python examples/moe_layer.py PATH/TO/sm_90a   # a compiled bundle, on the GPU

What a framework adds around the experts is small: route, sort the tokens by expert, count them on
the device, and put the results back.  Nothing here reads a device value on the host.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn


def load_bundle(folder: Path) -> ModuleType:
    """A bundle from any folder; inside a package an ordinary import does.

    Raises:
        SystemExit: no bundle lies there.
    """
    if not (folder / "__init__.py").is_file():
        sys.exit(f"{folder}: expected a generated bundle, got none; write one: fusegen generate")
    spec = importlib.util.spec_from_file_location(
        "bundle", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None, folder
    sys.modules["bundle"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["bundle"])
    return sys.modules["bundle"]


def device_for(arch: str, count: int = 1) -> str:
    """The type of the devices that run the code of an architecture.

    Args:
        arch: which names the folder of a bundle.
        count: devices that are needed.

    Raises:
        SystemExit: torch sees fewer GPUs.
    """
    if arch == "cpu":
        return "cpu"
    seen = torch.cuda.device_count()
    if seen < count:
        sys.exit(f"{arch}: needs GPUs: {count}; torch {torch.__version__} sees {seen}")
    return "cuda"


class MixtureOfExperts(nn.Module):
    """Top-k routing over experts of a generated `GroupedMLP`.

    Args:
        experts: the generated module.
        hidden: size of a token.
        num_groups: number of experts.
        top_k: experts per token.
    """

    def __init__(self, experts: nn.Module, hidden: int, num_groups: int, top_k: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, num_groups, bias=False)
        self.experts = experts
        self.num_groups, self.top_k = num_groups, top_k

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] fp32 -> the same shape."""
        probs, chosen = self.router(x).softmax(dim=-1).topk(self.top_k, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        token = order // self.top_k
        groups = torch.arange(self.num_groups, device=x.device)
        split_sizes = (chosen.flatten() == groups.unsqueeze(1)).sum(dim=1)
        y = self.experts(x[token].bfloat16(), split_sizes, probs.flatten()[order])
        return torch.zeros_like(x).index_add(0, token, y.float())


def main(folder: Path) -> float:
    """Fit a fixed random function; returns the last loss divided by the first."""
    bundle = load_bundle(folder)
    mlp = importlib.import_module(".grouped_mlp__bf16", bundle.__name__)
    device = device_for(folder.name)
    torch.manual_seed(0)
    hidden, groups = 64, 8
    experts = mlp.GroupedMLP(num_groups=groups, hidden=hidden, intermediate=128, device=device)
    layer = MixtureOfExperts(experts, hidden, groups, top_k=2).to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    x = torch.randn(512, hidden, device=device)
    target = torch.tanh(x @ torch.randn(hidden, hidden, device=device) / hidden**0.5)
    losses = []
    for step in range(60):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step % 10 == 0:
            print(f"step {step:3d}  loss {float(losses[-1]):.4f}")
    return float(losses[-1] / losses[0])


if __name__ == "__main__":
    default = Path(__file__).parents[1] / "generated" / "cpu"
    ratio = main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else default)
    print(f"the loss fell to {ratio:.0%} of where it began")
