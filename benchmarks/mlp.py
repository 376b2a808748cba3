"""The whole expert MLP under every recipe, forward and backward, against torch and others.

Torch's runs torch._grouped_mm in bf16.  Every recipe pays for its quantisation here, weights
included, but for `cached_weights`, whose refresh is a row of its own; without a recipe's name, ours
is bf16 too.  Cases are named after models; besides:

    MODEL DRAW         group sizes of another draw (shapes.py)
    MODEL main_grad    weights' gradients are added to fp32 buffers; torch's after they are made
    MODEL permuted     tokens are gathered for the experts and summed over them afterwards
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import common
import dense
import floors
import pairs
import peers
import shapes
import torch
from common import OURS, Case, Failure, Outcome
from torch import Tensor

PEER, EAGER = "torch compiled", "torch eager"
MAIN_GRAD, HELD, CACHED = "add_to_main_grad", "held_weights", "cached_weights"
# Whose numbers are looked at where not all contenders take part.
CELLS = ("grouped_mlp__bf16", "grouped_mlp__fp8_block", "grouped_mlp__fp8_delayed")
DRAWS_OF_ALL = ("zipf",)  # beside the usual one, for every model; three models have all
BLOCK_SECONDS = 0.03
ARCH = "sm_90a"  # whose plans are looked at where there is no GPU

# Relative difference from bf16 that a whole chain of quantised GEMMs may have.
TOLERANCES = {OURS: 2e-2, EAGER: 2e-2, f"{OURS} nvfp4": 5e-1}
TOLERANCE = 2e-1

Step = Callable[[], tuple[Tensor, ...]]
Forward = Callable[..., Tensor]  # (x, fc1, fc2, probs) -> y


@dataclass(frozen=True)
class Contender:
    """One expert MLP.

    Attributes:
        step: one forward and backward: y, and the gradients of x, fc1, fc2 and probs.
        cell: whose plan is its floor: its own, or of others' the one of the same recipe.
    """

    step: Step
    cell: str


def torch_mlp(x: Tensor, fc1: Tensor, fc2: Tensor, probs: Tensor, ends: Tensor) -> Tensor:
    """The experts of torch: x [T, H], fc1 [E, 2F, H], fc2 [E, H, F], probs [T], ends int32 [E]."""
    h = torch._grouped_mm(x, fc1.transpose(-2, -1), offs=ends)
    gate, up = h.float().chunk(2, dim=-1)
    a = (torch.nn.functional.silu(gate) * up * probs[:, None]).to(x.dtype)
    return torch._grouped_mm(a, fc2.transpose(-2, -1), offs=ends)


# ---- permutation


@torch.compile(dynamic=False)
def _gathered(x: Tensor, rows: Tensor, top_k: int) -> Tensor:
    """[T / top_k, H] -> [T, H] in order of experts; rows [T] are places of tokens' experts."""
    return x[rows // top_k]


@torch.compile(dynamic=False)
def _summed(y: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """[T, H] in order of experts -> [T / top_k, H], summed over the experts of each token."""
    return y[inverse].view(-1, top_k, y.shape[1]).sum(1)


class Gather(torch.autograd.Function):
    """Rows of tokens for their experts; the gradient sums over the experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        gathered: Tensor = _gathered(x, rows, top_k)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _summed(grad, inverse, ctx.top_k), None, None, None


class Scatter(torch.autograd.Function):
    """The inverse: every token's sum over its experts; the gradient gathers."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.top_k = top_k
        summed: Tensor = _summed(y, inverse, top_k)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        return _gathered(grad, rows, ctx.top_k), None, None, None


def permuted(mlp: Forward, rows: Tensor, inverse: Tensor, top_k: int) -> Forward:
    """An expert MLP of tokens in their own order, [T / top_k, H] -> [T / top_k, H]."""

    def forward(x: Tensor, fc1: Tensor, fc2: Tensor, probs: Tensor) -> Tensor:
        gathered = Gather.apply(x, rows, inverse, top_k)  # type: ignore[no-untyped-call]
        y = mlp(gathered, fc1, fc2, probs)
        out: Tensor = Scatter.apply(y, rows, inverse, top_k)  # type: ignore[no-untyped-call]
        return out

    return forward


# ---- one model


@dataclass(frozen=True)
class Model:
    """One model's experts and tokens; everybody computes with the same.

    Attributes:
        shape: of the experts.
        draw: of the group sizes.
        x: [T, H], or in order of tokens [T / top_k, H].
        fc1, fc2, probs: as torch_mlp takes them; all four ask for gradients.
        dy: of y, in its shape.
        sizes: of the groups, int64 [E].
    """

    shape: shapes.Expert
    draw: str
    x: Tensor
    fc1: Tensor
    fc2: Tensor
    probs: Tensor
    dy: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, shape: shapes.Expert) -> Model:
        """Random tensors, and the usual draw."""
        hidden, inner = shape.hidden, shape.intermediate
        parameter = torch.nn.Parameter
        return cls(
            *(shape, shapes.DRAW),
            common.normal(shape.tokens, hidden).requires_grad_(),
            parameter(common.normal(shape.groups, 2 * inner, hidden, scale=hidden**-0.5)),
            parameter(common.normal(shape.groups, hidden, inner, scale=inner**-0.5)),
            torch.rand(shape.tokens, device=common.DEVICE).requires_grad_(),
            common.normal(shape.tokens, hidden),
            shapes.splits(shape.groups, shape.tokens),
        )

    def drawn(self, draw: str) -> Model:
        """The same with other group sizes."""
        sizes = shapes.splits(self.shape.groups, self.shape.tokens, draw)
        return replace(self, draw=draw, sizes=sizes)

    @property
    def name(self) -> str:
        """Of the case."""
        return shapes.drawn(self.shape.name, self.draw)

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Whose gradients a step gives."""
        return self.x, self.fc1, self.fc2, self.probs

    @property
    def ends(self) -> Tensor:
        """As torch wants the groups, int32 [E]."""
        return self.sizes.cumsum(0).to(torch.int32)

    @property
    def lengths(self) -> dict[str, int]:
        """Dimensions by the symbols of plans."""
        shape = self.shape
        return {
            "T": shape.tokens,
            "E": shape.groups,
            "H": shape.hidden,
            "F": shape.intermediate,
        }

    @property
    def flops(self) -> int:
        """Of the GEMMs of a forward and backward."""
        return 18 * self.shape.tokens * self.shape.hidden * self.shape.intermediate


def _step(forward: Callable[[], Tensor], model: Model) -> tuple[Tensor, ...]:
    y = forward()
    return (y.detach(), *torch.autograd.grad(y, model.leaves, model.dy))


def _trained(forward: Forward, model: Model) -> Step:
    return partial(_step, partial(forward, *model.leaves), model)


def _layer(package: Any, cell: str, model: Model) -> Any:
    """A layer of ours with the model's weights."""
    shape = model.shape
    layer = common.bundles.load_cell(package, cell).GroupedMLP(
        shape.groups, shape.hidden, shape.intermediate, device=common.DEVICE
    )
    layer.fc1.weight, layer.fc2.weight = model.fc1, model.fc2
    return layer


def cells_of(package: Any, names: Sequence[str] | None = None) -> list[str]:
    """Cells of the bundle: the named ones, or all but those that add to main_grad."""
    found = common.bundles.cells_of(Path(package.__path__[0]), "grouped_mlp", choices=True)
    if names is not None:
        return [cell for cell in found if cell in names]
    return [cell for cell in found if MAIN_GRAD not in cell]


def _torch(model: Model, compiled: Forward) -> Forward:
    ends = model.ends
    return lambda x, fc1, fc2, probs: compiled(x, fc1, fc2, probs, ends)


def plain(
    package: Any, model: Model, cells: Sequence[str], compiled: Forward
) -> dict[str, Contender]:
    """Torch's and ours, each with the weights it has."""
    forwards: dict[str, Forward] = {PEER: compiled, EAGER: torch_mlp}
    found = {
        name: Contender(_trained(_torch(model, each), model), CELLS[0])
        for name, each in forwards.items()
    }
    for cell in cells:
        layer = _layer(package, cell, model)
        if CACHED in cell:
            for _ in range(2):  # delayed scaling has a scale of these weights from the second on
                layer.refresh_weights()
        forward = partial(layer, model.x, model.sizes, model.probs)
        found[common.contender(cell)] = Contender(partial(_step, forward, model), cell)
    return found


def others(model: Model, expected: tuple[Tensor, ...]) -> dict[str, Contender]:
    """The expert MLPs of other libraries, where they are installed, by recipe."""
    given = peers.Expert(
        *(model.sizes, model.x.detach(), model.fc1.detach(), model.fc2.detach()),
        *(model.probs.detach(), model.dy),
    )
    steps = peers.mlp_steps(peers.installed(peers.MLPS), given, expected)
    return {name: Contender(step, _cell_of(name)) for name, step in steps.items()}


def _cell_of(name: str) -> str:
    """The cell of the recipe that the name of somebody else's ends with."""
    recipe = name.rpartition(" ")[2]
    return f"grouped_mlp__{recipe}" if recipe in floors.recipes() else CELLS[0]


# ---- what is added to main_grad


def adding(package: Any, model: Model, compiled: Forward) -> dict[str, Contender]:
    """Weights' gradients into fp32 buffers that grow with every step, from zero."""
    forward, sums = _torch(model, compiled), (_buffer(model.fc1), _buffer(model.fc2))
    found = {
        PEER: Contender(partial(_torch_added, forward, sums, model), f"{CELLS[0]}__{MAIN_GRAD}")
    }
    for cell in cells_of(package, [f"{each}__{MAIN_GRAD}" for each in CELLS]):
        layer = _layer(package, cell, model)
        for linear in (layer.fc1, layer.fc2):
            linear.weight = torch.nn.Parameter(linear.weight.detach())
            linear.weight.main_grad = _buffer(linear.weight)
        name = common.contender(cell.removesuffix(f"__{MAIN_GRAD}"))
        found[name] = Contender(partial(_our_added, layer, model), cell)
    return found


def _buffer(weight: Tensor) -> Tensor:
    return torch.zeros(weight.shape, device=weight.device)


def _our_added(layer: Any, model: Model) -> tuple[Tensor, ...]:
    fc1, fc2 = layer.fc1.weight, layer.fc2.weight
    y = layer(model.x, model.sizes, model.probs)
    leaves = (model.x, fc1, fc2, model.probs)
    dx, _, _, dprobs = torch.autograd.grad(y, leaves, model.dy, allow_unused=True)
    return y.detach(), dx, fc1.main_grad, fc2.main_grad, dprobs


def _torch_added(forward: Forward, sums: tuple[Tensor, Tensor], model: Model) -> tuple[Tensor, ...]:
    y, dx, dfc1, dfc2, dprobs = _trained(forward, model)()
    return y, dx, sums[0].add_(dfc1), sums[1].add_(dfc2), dprobs


# ---- with the permutation


def permuting(package: Any, model: Model, compiled: Forward) -> dict[str, Contender]:
    """Tokens in their own order around the experts, for torch and ours alike."""
    top_k, tokens = model.shape.top_k, model.shape.tokens
    rows = torch.randperm(tokens, device=common.DEVICE)
    inverse = torch.argsort(rows)
    shape = (tokens // top_k, model.shape.hidden)
    model = replace(model, x=common.normal(*shape).requires_grad_(), dy=common.normal(*shape))
    around = partial(permuted, rows=rows, inverse=inverse, top_k=top_k)
    found = {PEER: Contender(_trained(around(_torch(model, compiled)), model), CELLS[0])}
    for cell in cells_of(package, CELLS):
        forward = around(partial(_of_layer, _layer(package, cell, model), model.sizes))
        found[common.contender(cell)] = Contender(_trained(forward, model), cell)
    return found


def _of_layer(
    layer: Any, sizes: Tensor, x: Tensor, fc1: Tensor, fc2: Tensor, probs: Tensor
) -> Tensor:
    """A layer of ours, which has the weights already."""
    y: Tensor = layer(x, sizes, probs)
    return y


# ---- measuring


def held_gib(step: Step) -> float:
    """Memory that a forward leaves for its backward, beside its result.

    What is allocated when the gradients are asked for, less what was before the step and y.
    """
    found: list[int] = []
    grad = torch.autograd.grad

    def asked(outputs: Tensor, *arguments: Any, **more: Any) -> Any:
        found.append(_allocated() - outputs.untyped_storage().nbytes() - before)
        return grad(outputs, *arguments, **more)

    with mock.patch.object(torch.autograd, "grad", asked):
        before = _allocated()
        step()
    return found[0] / 2**30


def _allocated() -> int:
    return torch.cuda.memory_allocated() if common.DEVICE != "cpu" else 0


def as_torch(
    model: str, contenders: Mapping[str, Contender], expected: tuple[Tensor, ...] | None = None
) -> tuple[dict[str, Contender], list[Failure], tuple[Tensor, ...]]:
    """Contenders whose results are torch's; a recipe with state has warmed up.

    What grows with every step is compared after as many steps.
    """
    contenders[PEER].step()
    wanted = expected or contenders[PEER].step()

    def check(name: str, contender: Contender) -> Contender:
        if name == PEER:
            return contender
        contender.step()
        case, tolerance = f"{model} {name}", TOLERANCES.get(name, TOLERANCE)
        for got, each in zip(contender.step(), wanted, strict=True):
            common.require_close(case, got, each, tolerance)
        return contender

    made, failures = common.try_each(model, contenders, check)
    return made, failures, wanted


@dataclass(frozen=True)
class Bench:
    """What the cases of one model share.

    Attributes:
        package: the bundle.
        model: with the usual draw.
        compiled: torch_mlp; its sizes are the same in all cases.
        copy_rate: bytes per second.
    """

    package: Any
    model: Model
    compiled: Forward
    copy_rate: float

    def everybody(self) -> list[Outcome]:
        """Every recipe and choice, and other libraries."""
        checked, failures = self._and_others(cells_of(self.package))
        refreshes = self._refreshes()
        return [*self._timed(self.model, self.model.name, checked, refreshes), *failures]

    def recipes(self) -> list[Outcome]:
        """Every recipe by itself, and other libraries."""
        plain_cells = [cell for cell in cells_of(self.package) if cell.count("__") == 1]
        checked, failures = self._and_others(plain_cells)
        return [*self._timed(self.model, self.model.name, checked), *failures]

    def _and_others(self, cells: Sequence[str]) -> tuple[dict[str, Contender], list[Failure]]:
        made = plain(self.package, self.model, cells, self.compiled)
        checked, failures, expected = as_torch(self.model.name, made)
        return checked | others(self.model, expected), failures

    def drawn(self, draw: str) -> list[Outcome]:
        """Three recipes and torch compiled; with copies of weights that stay, too."""
        model = self.model.drawn(draw)
        cells = (*CELLS, *(f"{cell}__{option}" for cell in CELLS for option in (HELD, CACHED)))
        made = plain(self.package, model, cells_of(self.package, cells), self.compiled)
        del made[EAGER]
        return self._some(model, model.name, made)

    def added(self) -> list[Outcome]:
        """Three recipes and torch compiled, with main_grad."""
        made = adding(self.package, self.model, self.compiled)
        return self._some(self.model, f"{self.model.name} main_grad", made)

    def permuted(self) -> list[Outcome]:
        """Three recipes and torch compiled, with the permutation."""
        made = permuting(self.package, self.model, self.compiled)
        return self._some(self.model, f"{self.model.name} permuted", made)

    def _some(self, model: Model, case: str, made: Mapping[str, Contender]) -> list[Outcome]:
        checked, failures, _ = as_torch(case, made)
        return [*self._timed(model, case, checked), *failures]

    def _refreshes(self) -> dict[str, common.Contender]:
        """What quantises cached weights, once a step of the optimizer."""
        cells = [cell for cell in cells_of(self.package) if CACHED in cell]
        layers = {common.contender(c): _layer(self.package, c, self.model) for c in cells}
        return {
            f"{name}, refresh": partial(_ignored, layer.refresh_weights)
            for name, layer in layers.items()
        }

    def _timed(
        self,
        model: Model,
        case: str,
        contenders: Mapping[str, Contender],
        more: Mapping[str, common.Contender] | None = None,
    ) -> list[Outcome]:
        if common.DEVICE != "cpu":
            torch.cuda.empty_cache()
        memory = {name: memory_of(each.step) for name, each in contenders.items()}
        arch = ARCH if common.DEVICE == "cpu" else Path(self.package.__path__[0]).name
        plans = {name: floors.plan_of(each.cell, arch) for name, each in contenders.items()}
        modes = sorted({floors.Mode()}.union(*map(floors.modes, plans.values())), key=str)
        runs = {name: partial(_ignored, each.step) for name, each in contenders.items()}
        samples = common.compare(
            {**runs, **(more or {}), **dense.contenders(modes)}, seconds=BLOCK_SECONDS
        )
        rates = dense.rates(samples, modes, self.copy_rate)
        splits = model.sizes.tolist()
        rows: list[Outcome] = []
        for name, plan in plans.items():
            floor = floors.floor(plan, model.lengths, splits, rates)
            known = {**memory[name], **_dense_rates(floors.modes(plan), rates)}
            rows.append(_row(model, case, name, samples, floor, known))
        return rows + [common.row(case, name, "ms", samples[name]) for name in more or {}]


def _ignored(step: Callable[[], Any], _: int = 0) -> Any:
    """One step; its tensors exceed every cache, so there is one set of them."""
    return step()


def memory_of(step: Step) -> dict[str, float]:
    """GiB above what a step finds: held between its halves, and at its worst moment."""
    if common.DEVICE == "cpu":
        step()
        return {}
    return {"held_gib": held_gib(step), "peak_gib": common.peak_gib(step)}


def _dense_rates(modes: Iterable[floors.Mode], rates: floors.Rates) -> dict[str, float]:
    """The rates that a floor was made of, TFLOP/s; that of bf16 stands in every row."""
    found = {"dense_tflops": rates.gemms[floors.Mode()] / 1e12}
    for mode in modes:
        if mode.formats:
            found[f"dense_{mode}_tflops"] = rates.gemms[mode] / 1e12
    return found


def _row(
    model: Model,
    case: str,
    name: str,
    samples: Mapping[str, Sequence[float]],
    floor: floors.Floor,
    known: Mapping[str, float],
) -> common.Row:
    median = statistics.median(samples[name])
    return common.row(
        *(case, name, "ms", samples[name]),
        floor=floor.total,
        rate=model.flops / median / 1e9,
        rate_unit="TFLOP/s",
        fraction=floor.total / median,
        extra={
            **known,
            "floor_products_ms": floor.gemms,
            "floor_quantise_ms": floor.quantise,
            "floor_activation_ms": floor.activation,
            "l2_gb": floor.l2_bytes / 1e9,
            "speedup_over_torch": pairs.ratio(samples[PEER], samples[name]).median,
        },
    )


def mlp(*, quick: bool = False) -> Iterator[Case]:
    """The expert MLP of seven models; of three under all draws, with main_grad and permuted."""
    package, copy_rate = common.bundle(), common.copy_rate()
    closely = (shapes.SMALL,) if quick else shapes.EXPERTS
    for shape in (*closely, *(() if quick else shapes.MORE_EXPERTS)):
        bench = lru_cache(maxsize=1)(partial(_bench, package, shape, copy_rate))
        yield from _cases(shape, bench, closely=shape in closely)
        del bench  # and with it the tensors of the model
        if common.DEVICE != "cpu":
            torch.cuda.empty_cache()


def _bench(package: Any, shape: shapes.Expert, copy_rate: float) -> Bench:
    """A model's tensors, made when its first case is measured."""
    torch._dynamo.reset()
    compiled = torch.compile(torch_mlp, fullgraph=True, dynamic=False)
    return Bench(package, Model.of(shape), compiled, copy_rate)


def _cases(shape: shapes.Expert, bench: Callable[[], Bench], *, closely: bool) -> Iterator[Case]:
    if closely:
        yield Case(shape.name, lambda: bench().everybody())
        yield Case(f"{shape.name} main_grad", lambda: bench().added())
        yield Case(f"{shape.name} permuted", lambda: bench().permuted())
    else:
        yield Case(shape.name, lambda: bench().recipes())
    for draw in shapes.DRAWS if closely else DRAWS_OF_ALL:
        if draw != shapes.DRAW:
            yield Case(shapes.drawn(shape.name, draw), partial(_drawn, bench, draw))


def _drawn(bench: Callable[[], Bench], draw: str) -> list[Outcome]:
    return bench().drawn(draw)
