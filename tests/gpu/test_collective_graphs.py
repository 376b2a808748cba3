"""CUDA graphs of directions that collectives cut: op, collective, op are captured as a whole.

The grouped GEMM whose ranks share their amaxes, forward and backward in one graph.  Every rank
replays it, and calls a copy of the module beside it that is captured nowhere; inputs and group
sizes change all the time, and differ between ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..generated.ranks import Place, run_ranks
from ..generated.test_reduced_amax import cell_of
from .places import NEEDS_TWO, place_with_reduced_amax

MODULE = "grouped_linear"
EXPERTS, TOKENS, REPLAYS = 5, 200, 30

# One rank.  On the CPU, which has no graphs, a replay is a call: a check of the script itself.
RANK = f"""
import copy, importlib, random
module = importlib.import_module("bundle.{cell_of(MODULE)}")
torch.manual_seed(0)
layer = module.GroupedLinear({EXPERTS}, 136, 72, bias=True, device=device)
drawn = random.Random(rank)
generator = torch.Generator().manual_seed(rank)
base = torch.randn({TOKENS}, 136, generator=generator).bfloat16().to(device)
dy = torch.randn({TOKENS}, 72, generator=generator).mul(1 + rank).bfloat16().to(device)
x = torch.empty_like(base, requires_grad=True)
sizes = torch.zeros({EXPERTS}, dtype=torch.int64, device=device)

def draw():
    # Ragged and empty groups, rows past their sum, and sums past the rows.
    splits = [drawn.choice((0, drawn.randint(1, {TOKENS} // 2))) for _ in range({EXPERTS})]
    sizes.copy_(torch.tensor(splits))
    with torch.no_grad():
        x.copy_(base * drawn.uniform(0.5, 2.0))

def step(called):
    y = called(x, sizes)
    return [y.detach(), *torch.autograd.grad(y, [x, *called.parameters()], dy)]

def bits(tensors):
    return [tensor.detach().contiguous().view(torch.uint8) for tensor in tensors]

def amaxes():
    # Of the rank's rows, group by group.
    ends = sizes.cumsum(0).clamp(max={TOKENS}).tolist()
    groups = [x.detach()[begin:end] for begin, end in zip([0, *ends], ends)]
    return torch.stack([g.abs().amax() if len(g) else x.new_zeros(()) for g in groups]).float()

draw()
if device == "cuda":
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # NCCL connects the ranks at the first collective
            step(layer)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(layer)
else:
    step(layer)
eager = copy.deepcopy(layer)

differing = 0
seen, newest = [], [layer.input_amax_history[-1].clone()]
for _ in range({REPLAYS}):
    draw()
    if device == "cuda":
        graph.replay()
    else:
        results = step(layer)
    pairs = zip(bits([*results, *layer.buffers()]), bits([*step(eager), *eager.buffers()]))
    differing += sum(not torch.equal(one, other) for one, other in pairs)
    seen.append(amaxes())
    newest.append(layer.input_amax_history[-1].clone())
state = {{name: tensor for name, tensor in layer.state_dict().items() if "_" in name}}
found = {{"differing": differing, "seen": seen, "newest": newest, "state": state}}
torch.save(found, f"{{folder}}/{{rank}}.pt")
if device == "cuda":
    torch.cuda.synchronize()
"""


@pytest.fixture(scope="module")
def place(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return place_with_reduced_amax(MODULE, folder, tmp_path_factory.mktemp("reduced"))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=NEEDS_TWO)])
def test_replays_equal_eager_calls_and_share_amaxes(
    place: Place, ranks: int, tmp_path: Path
) -> None:
    run_ranks(RANK, tmp_path, place, ranks=ranks)
    found = [torch.load(tmp_path / f"{rank}.pt", map_location="cpu") for rank in range(ranks)]
    assert [each["differing"] for each in found] == [0] * ranks
    for replay in range(REPLAYS):
        largest = torch.stack([each["seen"][replay] for each in found]).amax(0)
        for each in found:
            before, after = each["newest"][replay : replay + 2]
            # The history of a group without rows on any rank stays as it is.
            assert torch.equal(after, torch.where(largest > 0, largest, before)), replay
    first, *others = (each["state"] for each in found)
    assert len(first) == 6
    for state in others:
        assert state.keys() == first.keys()
        for name, tensor in first.items():
            assert torch.equal(tensor, state[name]), name
