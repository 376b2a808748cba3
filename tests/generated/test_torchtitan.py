"""Experts as torchtitan has them, swapped for ours as its page shows."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .ranks import Place, run_ranks
from .test_docs import DOCS, blocks

PAGE = DOCS / "integrations" / "torchtitan.md"
RECIPES = ("bf16", "fp8_block")
E, D, F, ROWS = 4, 64, 96, 32


class GroupedExperts(nn.Module):
    """The formula and the parameters of torchtitan's, by loops."""

    def __init__(self, num_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1_EFD = nn.Parameter(torch.randn(num_experts, hidden_dim, dim) / dim**0.5)
        self.w2_EDF = nn.Parameter(torch.randn(num_experts, dim, hidden_dim) / hidden_dim**0.5)
        self.w3_EFD = nn.Parameter(torch.randn(num_experts, hidden_dim, dim) / dim**0.5)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        rows = []
        for e, part in enumerate(x[: int(counts.sum())].split(counts.tolist())):
            h = nn.functional.silu(part @ self.w1_EFD[e].T) * (part @ self.w3_EFD[e].T)
            rows.append(h @ self.w2_EDF[e].T)
        return torch.cat([*rows, x.new_zeros(len(x) - int(counts.sum()), x.shape[1])])


@pytest.fixture(scope="module", params=RECIPES)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the first block of the page defines, for a recipe."""
    folder = tmp_path_factory.mktemp("torchtitan")
    (command,) = blocks(PAGE, "")
    words = [sys.executable, "-m", *command.split()]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    package = f"titan_{request.param}"
    (folder / "experts").rename(folder / package)
    code = blocks(PAGE, "python")[0].replace("experts.cpu", f"{package}.cpu")
    names: dict[str, Any] = {"recipe": request.param, "folder": folder, "package": package}
    sys.path.insert(0, str(folder))
    exec(code.replace("fp8_block", request.param), names)
    sys.path.remove(str(folder))
    return names


def swapped(page: Any, kind: type[nn.Module], experts: nn.Module) -> nn.Module:
    model = page["swap"](nn.ModuleDict({"inner": experts}), kind)
    inner: nn.Module = model["inner"]
    assert type(inner).__name__ == "Experts"
    return inner


def step(call: Callable[[Tensor, Tensor], Tensor], x: Tensor, counts: Tensor) -> list[Tensor]:
    leaf = x.detach().clone().requires_grad_()
    y = call(leaf, counts)
    y[: int(counts.sum())].square().mean().backward()
    assert leaf.grad is not None
    return [y.detach()[: int(counts.sum())], leaf.grad[: int(counts.sum())]]


def weights(page: Any, inner: nn.Module) -> dict[str, Tensor]:
    """Gradients of ours by torchtitan's names."""
    grads = {name: p.grad for name, p in inner.named_parameters()}
    found: dict[str, Tensor] = page["from_fused"](grads)
    return found


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert (found.double() - expected.double()).norm() < tolerance * expected.double().norm()


def compare(page: Any, kind: type[nn.Module], experts: Any, exact: Any) -> None:
    """Results and all gradients, for sizes that leave rows over; state dicts there and back."""
    tolerance = {"bf16": 0.02, "fp8_block": 0.12}[page["recipe"]]
    x, counts = torch.randn(ROWS, D), torch.tensor([9, 0, 12, 8], dtype=torch.int32)
    inner = swapped(page, kind, experts)
    back = page["from_fused"](inner.state_dict())
    assert all(torch.equal(back[name], p) for name, p in experts.named_parameters())
    expected = step(exact, x.to(next(exact.parameters()).dtype), counts)
    for found, other in zip(step(inner, x, counts), expected, strict=True):
        close(found, other, tolerance)
    grads = weights(page, inner)
    for name, parameter in exact.named_parameters():
        close(grads[name], parameter.grad, tolerance)


def test_the_formula(page: Any) -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(E, D, F)
    exact = GroupedExperts(E, D, F).double()
    exact.load_state_dict(experts.state_dict())
    compare(page, GroupedExperts, experts, exact)


@pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"
)
def test_its_own_class(page: Any) -> None:
    from torchtitan.models.common.moe import GroupedExperts as Own

    torch.manual_seed(0)
    experts, exact = (Own.Config(dim=D, hidden_dim=F, num_experts=E).build() for _ in range(2))
    experts.load_state_dict(GroupedExperts(E, D, F).state_dict())
    exact.load_state_dict(experts.state_dict())
    compare(page, Own, experts, exact)


def test_fp32_and_bf16_parameters(page: Any) -> None:
    """Weights in the type of the experts that were there."""
    for dtype in (torch.float32, torch.bfloat16):
        inner = swapped(page, GroupedExperts, GroupedExperts(E, D, F).to(dtype))
        x = torch.randn(ROWS, D, dtype=dtype)
        assert inner(x, torch.tensor([9, 0, 12, 8])).dtype == dtype
        assert {p.dtype for p in inner.parameters()} == {dtype}


SHARDED = """
page, source = words
sys.path.insert(0, page)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
names = {}
exec(open(source).read(), names)
data = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), torch.tensor([9, 0, 12, 8])


def train(experts):
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        loss = experts(*data).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def made():
    torch.manual_seed(0)
    return names["Experts"](4, 64, 96)


plain = made()
expected = train(plain)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
sharded = fully_shard(made(), mp_policy=policy)
assert train(sharded) == expected and len({*expected}) == 3
theirs = names["from_fused"](sharded.state_dict())
for name, tensor in names["from_fused"](plain.state_dict()).items():
    assert torch.equal(theirs[name].full_tensor(), tensor), name
back = names["to_fused"](theirs)
for name, tensor in plain.state_dict().items():
    assert torch.equal(back[name].full_tensor(), tensor), name
"""


def test_sharded(page: Any, tmp_path: Path) -> None:
    """FSDP2 gathers bfloat16 of fp32 parameters, as the cast does; state dicts map as DTensors."""
    code = blocks(PAGE, "python")[0].replace("experts.cpu", f"{page['package']}.cpu")
    source = tmp_path / "page.py"
    source.write_text(code.replace("fp8_block", page["recipe"]), "utf-8")
    folder = page["folder"]
    place = Place(folder / page["package"] / "cpu")
    run_ranks(SHARDED, tmp_path, place, str(folder), str(source))
