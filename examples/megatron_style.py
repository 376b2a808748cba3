"""Expert training as Megatron-LM does it: micro-batches, fp32 main_grad and master weights.

    python examples/megatron_style.py             # on the CPU
    python examples/megatron_style.py sm_90a      # generates and builds for the GPU

Weight gradients are added to fp32 buffers by the GEMMs themselves, after the backwards that
others wait for, and weights are quantised once per optimiser step instead of once per micro-batch.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from moe_layer import device_for, load_bundle
from torch import Tensor, nn

from fusegen import api

EXPERTS, HIDDEN, INNER = 4, 128, 192
TOKENS, MICRO_BATCHES, STEPS = 256, 4, 40
OPTIONS = ("add_to_main_grad", "delayed_wgrad", "cached_weights")


def make(arch: str, folder: Path) -> nn.Module:
    """The expert MLP under fp8_block, its choices made when it is generated."""
    device = device_for(arch)
    request = api.Request(
        out=folder,
        archs=(arch,),
        modules=("grouped_mlp",),
        recipes=("fp8_block",),
        options=OPTIONS,
        namespace="megatron_style",
    )
    api.generate(request)
    if arch != "cpu":
        api.build([folder / arch])
    (cell,) = (path.stem for path in (folder / arch).glob("grouped_mlp__*.py"))
    module = getattr(load_bundle(folder / arch), cell)
    experts: nn.Module = module.GroupedMLP(EXPERTS, HIDDEN, INNER)
    return experts.to(device)


class MainParameters:
    """fp32 masters and gradient buffers of a module in lower precision, and their optimiser."""

    def __init__(self, module: nn.Module, learning_rate: float) -> None:
        self.parameters = list(module.parameters())
        self.masters = [parameter.detach().float().clone() for parameter in self.parameters]
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.main_grad = torch.zeros_like(master)
        self.optimiser = torch.optim.AdamW(self.masters, lr=learning_rate)

    @torch.no_grad()
    def step(self, micro_batches: int) -> None:
        """Masters follow the mean gradient, parameters follow the masters."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = parameter.main_grad / micro_batches
        self.optimiser.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)
            parameter.main_grad.zero_()


def batch(generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens sorted by expert, group sizes, router probabilities."""
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    chosen = torch.randint(EXPERTS, (TOKENS,), generator=generator)
    sizes = torch.bincount(chosen, minlength=EXPERTS)
    probs = torch.rand(TOKENS, generator=generator) + 0.5
    return x.to(device), sizes.to(device), probs.to(device)


def train(experts: nn.Module) -> list[float]:
    """Mean losses per step; the experts learn to turn their input round."""
    main = MainParameters(experts, learning_rate=5e-3)
    device = main.masters[0].device
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        total = 0.0
        for _ in range(MICRO_BATCHES):
            x, sizes, probs = batch(generator, device)
            loss = (experts(x, sizes, probs) + x).float().square().mean()
            loss.backward()
            total += loss.item() / MICRO_BATCHES
        for _ in range(MICRO_BATCHES):  # a pipeline's stage does it while it waits for another
            experts.backward_dw()
        main.step(MICRO_BATCHES)
        experts.refresh_weights()
        losses.append(total)
    return losses


def main() -> None:
    """Generate, train, print."""
    arch = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        losses = train(make(arch, Path(folder)))
    steps = f"{STEPS} steps of {MICRO_BATCHES} micro-batches"
    print(f"loss {losses[0]:.3f}, after {steps} {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
