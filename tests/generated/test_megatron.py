"""`main_grad` in buffers of Megatron-core's own DistributedDataParallel, on two ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from fusegen.ir.naming import Cell

from .loading import load_cells
from .ranks import Place, run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: pip install megatron-core",
)

RECIPES = ("bf16", "fp8_delayed", "fp8_block")

SCRIPT = """
import contextlib, importlib, warnings
warnings.simplefilter("ignore")
import bundle
torch.cuda.current_device = lambda: torch.device("cpu")  # where Megatron puts its buffers
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads,
)
from megatron.core.transformer import TransformerConfig
cell, *flags = words
overlap, distributed = "overlap" in flags, "distributed" in flags
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=1, hidden_size=32, num_attention_heads=1, gradient_accumulation_fusion=True
)
MICRO, STEPS = 3, 3


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before = torch.nn.Linear(32, 32, dtype=torch.bfloat16)
        self.experts = importlib.import_module(f"bundle.{cell}").GroupedMLP(2, 32, 48)

    def forward(self, x, *rest):
        return self.experts(self.before(x), *rest)


def run(call, experts, step, micro, source):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + source)
    x = torch.randn(16, 32, generator=generator).bfloat16()
    y = call(x, torch.tensor([9, 7]), torch.rand(16, generator=generator))
    y.float().square().mean().backward()
    if "delayed_wgrad" in cell:
        experts.backward_dw()


def experts_of(model):
    return dict(model.experts.named_parameters())


# What each rank leaves in plain buffers of its own; their mean is what Megatron's have to hold.
alone = [Model() for _ in range(ranks)]
expected = []
for step in range(STEPS):
    for source, model in enumerate(alone):
        for parameter in model.experts.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)
        for micro in range(MICRO):
            run(model, model.experts, step, micro, source)
    sums = zip(*(experts_of(model).values() for model in alone))
    expected.append([sum(each.main_grad / ranks for each in same) for same in sums])
assert all(grad.any() for grads in expected for grad in grads)

model = Model()
for parameter in model.experts.parameters():
    parameter.allreduce = "experts" not in flags  # whether of all data-parallel ranks, or experts'
ddp = DistributedDataParallel(
    config,
    DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=distributed,
        bucket_size=5000 if overlap else None,
        delay_wgrad_compute="delayed_wgrad" in cell,
    ),
    model,
)
groups = [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]
assert len(groups) > 1 or not overlap
assert bool(ddp.expert_parallel_bucket_groups) == ("experts" in flags)
for parameter in model.experts.parameters():
    buffer = ddp.param_to_bucket_group[parameter].buckets[0].grad_data
    assert parameter.main_grad.dtype == torch.float32
    assert parameter.main_grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
for step in range(STEPS):
    ddp.zero_grad_buffer()
    for micro in range(MICRO):
        last = micro == MICRO - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            run(ddp, model.experts, step, micro, rank)
        for parameter in model.experts.parameters():
            assert parameter.grad is None and parameter.grad_added_to_main_grad
    # Buckets whose gradients are there are on their way; Megatron learns in a first step which.
    started = [group.grad_reduce_handle is not None for group in groups]
    assert all(started) if overlap and step else not any(started), (step, started)
    finalize_model_grads([ddp])
    seen = 0
    for (name, parameter), grad in zip(experts_of(model).items(), expected[step], strict=True):
        found, own = parameter.main_grad, slice(None)
        if distributed:  # each rank has its part of a bucket
            (bucket,) = (
                bucket
                for bucket in ddp.param_to_bucket_group[parameter].buckets
                if any(parameter is each for each in bucket.params)
            )
            size = bucket.grad_data.numel() // ranks
            first = (bucket.grad_data.data_ptr() - found.data_ptr()) // 4 + rank * size
            own = slice(max(first, 0), max(first + size, 0))
        assert torch.equal(found.flatten()[own], grad.flatten()[own]), (name, step)
        seen += grad.flatten()[own].numel()
    assert seen
    assert model.before.weight.main_grad.any() and model.before.weight.grad is None
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    options = ("add_to_main_grad",), ("add_to_main_grad", "delayed_wgrad")
    cells = [Cell("grouped_mlp", recipe, chosen) for recipe in RECIPES for chosen in options]
    name = load_cells("megatron", tmp_path_factory.mktemp("megatron"), cells)
    return Place(Path(str(sys.modules[name].__file__)).parent)


@pytest.mark.parametrize(
    ("option", "flags"),
    [
        ("add_to_main_grad", ()),
        ("add_to_main_grad", ("overlap",)),
        ("add_to_main_grad", ("overlap", "experts")),
        ("add_to_main_grad", ("distributed",)),
        ("add_to_main_grad", ("overlap", "distributed")),
        ("add_to_main_grad__delayed_wgrad", ("overlap",)),
        ("add_to_main_grad__delayed_wgrad", ("overlap", "distributed")),
    ],
)
def test_buffers_hold_the_mean_of_all_ranks(
    place: Place, option: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Bit for bit, over micro-batches and steps; buckets are reduced when their last one is in."""
    run_ranks(SCRIPT, tmp_path, place, f"grouped_mlp__bf16__{option}", *flags)


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "bf16"])
def test_recipes(place: Place, recipe: str, tmp_path: Path) -> None:
    run_ranks(SCRIPT, tmp_path, place, f"grouped_mlp__{recipe}__add_to_main_grad", "overlap")
