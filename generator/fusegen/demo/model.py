"""The model that `fusegen demo` trains: everything of the demo that needs torch.

Shapes: B sequences of S bytes make N = B * S tokens of width H; each goes to k of E experts, so
the experts see T = N * k rows, sorted by expert into E ragged groups.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from .experiment import Corpus, DemoConfig, DemoError, HeldOut, Probe, Sample, Step

CLASSES = {"router_mixtral": "MixtralRouter", "moe_layer": "MoELayer"}
"""Modules of the generated layer, and their classes."""
NAMES = " and ".join(CLASSES.values())
TOP_K = 2
"""Experts of a token that this router chooses."""
BYTES = 256
BALANCE = 0.01
"""Weight of the load-balancing term; without one, top-k routing starves most experts."""
WARMUP = 0.15
"""Share of the steps over which the learning rate rises; it then falls as a cosine to a tenth."""
CLIP = 1.0


class LayerFactory(Protocol):
    """What makes the mixture-of-experts layer of a block: plain, or from a bundle.

    A layer takes x [N, H] and gives y [N, H] in x's type and the balance term, a number.  Its
    parameters are router.weight [E, H], experts.fc1.weight [E, 2I, H] (gate rows, then up rows) and
    experts.fc2.weight [E, H, I], all bfloat16.
    """

    def __call__(self, config: DemoConfig, device: str) -> nn.Module: ...


@dataclass(frozen=True, slots=True)
class Routing:
    """Where each of N tokens goes.

    order: int64 [T]; row r of the sorted rows is the copy `order[r]` of the N * k token copies
        (token `order[r] // k`).
    inverse: int64 [T]; the inverse permutation.
    split_sizes: int64 [E]; rows per expert, on the device of the tokens, adding up to T.
    probs: [T]; the weight of each sorted row, differentiable towards the router.
    balance: scalar; E * sum_e (share of rows of e) * (mean probability of e), 1 when even
        (Switch Transformer, arXiv:2101.03961, eq. 4).
    """

    order: Tensor
    inverse: Tensor
    split_sizes: Tensor
    probs: Tensor
    balance: Tensor


def route(logits: Tensor, top_k: int) -> Routing:
    """Route tokens by router `logits` [N, E]: softmax, the `top_k` largest, weights made to add
    up to one. Nothing is read back to the host.
    """
    experts = logits.shape[1]
    probabilities = logits.softmax(dim=1)
    weights, chosen = probabilities.topk(top_k, dim=1)
    weights = weights / weights.sum(dim=1, keepdim=True)
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    split_sizes = torch.zeros(experts, dtype=torch.int64, device=flat.device)
    split_sizes.scatter_add_(0, flat, torch.ones_like(flat))
    share = split_sizes / flat.numel()
    return Routing(
        order=order,
        inverse=inverse,
        split_sizes=split_sizes,
        probs=weights.reshape(-1)[order],
        balance=experts * (share * probabilities.mean(dim=0)).sum(),
    )


class _StackedWeight(nn.Module):
    """One weight per expert, stacked: [E, out, in]."""

    def __init__(
        self, groups: int, rows: int, columns: int, *, device: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, rows, columns, device=device, dtype=dtype))


class PlainExperts(nn.Module):
    """The experts as one would write them in PyTorch: a loop over the experts."""

    def __init__(self, config: DemoConfig, device: str) -> None:
        super().__init__()
        wide, narrow = config.intermediate, config.hidden
        made = partial(_StackedWeight, config.experts, device=device, dtype=torch.bfloat16)
        self.fc1, self.fc2 = made(2 * wide, narrow), made(narrow, wide)

    def forward(self, x: Tensor, split_sizes: Tensor, probs: Tensor) -> Tensor:
        """x [T, H] sorted by expert, split_sizes int64 [E], probs [T] -> [T, H] in x's dtype."""
        sizes = split_sizes.tolist()
        # `unbind` has one backward for all experts; indexing one expert at a time would add E
        # full-size gradients, E - 1 of them zero.
        experts = zip(
            torch.split(x, sizes),
            torch.split(probs, sizes),
            self.fc1.weight.unbind(),
            self.fc2.weight.unbind(),
            strict=True,
        )
        return torch.cat([expert(rows, prob, fc1, fc2) for rows, prob, fc1, fc2 in experts])


def expert(x: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    """One expert: x [t, H], probs [t], fc1 [2I, H], fc2 [H, I] -> [t, H].

    SwiGLU and the weighting are done in fp32 at least and rounded once.
    """
    hidden = functional.linear(x, fc1)
    gate, up = hidden.to(torch.promote_types(hidden.dtype, torch.float32)).chunk(2, dim=1)
    return functional.linear((functional.silu(gate) * up * probs[:, None]).to(x.dtype), fc2)


class PlainLayer(nn.Module):
    """The layer as one would write it in PyTorch: route, sort, experts, sort back, add up.

    Args:
        config: sizes.
        device: of its parameters.
        experts: others than plain ones, with the same parameters and call.
    """

    def __init__(self, config: DemoConfig, device: str, experts: nn.Module | None = None) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(
            config.hidden, config.experts, bias=False, device=device, dtype=torch.bfloat16
        )
        self.experts = experts or PlainExperts(config, device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, H] -> (y [N, H] in x's dtype, balance term)."""
        # Routing is a hard choice: made from bfloat16 logits it would flip on rounding.
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = functional.linear(x.to(wide), self.router.weight.to(wide))
        routing = route(logits, self.top_k)
        # Copy first, then permute: a permutation's gradient writes each row once, where gathering
        # `x[order // k]` would add up rows in an order that changes from run to run on a GPU.
        copies = x.repeat_interleave(self.top_k, dim=0)
        rows = copies.index_select(0, routing.order)
        y = self.experts(rows, routing.split_sizes, routing.probs)
        y = y.index_select(0, routing.inverse)
        return y.view(x.shape[0], self.top_k, -1).sum(dim=1), routing.balance


class GeneratedLayer(nn.Module):
    """The layer of two generated modules: the router, and all between it and the residual."""

    def __init__(self, router: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, H] -> (y [N, H] in x's dtype, balance term)."""
        probs, balance, _, ids, counts = self.router(x)
        return self.experts(x, probs, ids, counts), balance


class Block(nn.Module):
    """Causal attention, then the mixture of experts, each on a normalised residual."""

    def __init__(self, config: DemoConfig, layer: nn.Module) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        self.moe_norm = nn.LayerNorm(config.hidden)
        self.moe = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, H] -> (x [B, S, H], balance term)."""
        x = x + self._attend(self.attention_norm(x))
        y, balance = self.moe(self.moe_norm(x).flatten(0, 1).bfloat16())
        return x + y.view_as(x).to(x.dtype), balance

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.out(y.transpose(1, 2).reshape(batch, length, hidden)))


class ByteModel(nn.Module):
    """Next-byte model: embeddings, blocks, a linear head. fp32 but for the layers of experts."""

    def __init__(self, config: DemoConfig, factory: LayerFactory, device: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, config.hidden)
        self.position = nn.Embedding(config.context, config.hidden)
        self.blocks = nn.ModuleList(
            Block(config, factory(config, device)) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, BYTES, bias=False)
        self.to(device)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """tokens, targets int64 [B, S] -> (cross entropy in nats per byte, mean balance term)."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        logits = self.head(self.norm(x))
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return loss, torch.stack(balances).mean()


def initialise(model: nn.Module, seed: int) -> None:
    """Fill every matrix from N(0, 1 / columns), embeddings from N(0, 0.02^2), on the CPU, so that
    every device starts from the same numbers. Norms keep ones and zeros.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                continue
            std = 0.02 if id(parameter) in embeddings else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the parameters of `source`.

    Raises:
        DemoError: names or shapes differ, so the generated module breaks its contract.
    """
    expected = {name: tuple(p.shape) for name, p in source.named_parameters()}
    got = {name: tuple(p.shape) for name, p in target.named_parameters()}
    if expected != got:
        wrong = sorted(set(expected.items()) ^ set(got.items()))
        raise DemoError(
            f"{NAMES}: expected the parameters router.weight [E, H], experts.fc1.weight "
            f"[E, 2*I, H] and experts.fc2.weight [E, H, I] alone, got differences at {wrong}; "
            f"generate the bundle again"
        )
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            target.get_parameter(name).copy_(parameter)


class MasterAdamW:
    """AdamW on fp32 copies of the low-precision parameters, as large models are trained.

    Updating bfloat16 weights in place would lose every update below 1/256 of the weight.
    """

    def __init__(self, model: nn.Module, steps: int, peak: float) -> None:
        self._steps = steps
        self._peak = peak
        self._taken = 0
        self._pairs = [(p, _master(p)) for p in model.parameters()]
        self._masters = [master for _, master in self._pairs]
        self._adam = torch.optim.AdamW(
            self._masters, lr=peak, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self) -> None:
        """Clip, update, copy back, and drop the gradients."""
        for parameter, master in self._pairs:
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
                parameter.grad = None
        nn.utils.clip_grad_norm_(self._masters, CLIP)
        for group in self._adam.param_groups:
            group["lr"] = self._peak * schedule(self._taken, self._steps)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self._taken += 1
        with torch.no_grad():
            for parameter, master in self._pairs:
                if master is not parameter:
                    parameter.copy_(master)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float())


def schedule(step: int, steps: int) -> float:
    """Learning rate of `step` (from 0) as a share of the peak: linear rise, cosine fall to 0.1."""
    rise = max(1, round(WARMUP * steps))
    if step < rise:
        return (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, done))


class Batches:
    """Windows of the corpus at random places that depend on seed and step alone."""

    def __init__(self, corpus: Corpus, config: DemoConfig, device: str, seed: int) -> None:
        self._train = _as_tensor(corpus.train)
        self._held_out = _as_tensor(corpus.held_out)
        self._config = config
        self._device = device
        self._seed = seed

    def train(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of a step, int64 [B, S] each; targets are tokens one byte on."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        last = self._train.numel() - self._config.context
        return self._windows(
            self._train, torch.randint(last, (self._config.batch,), generator=generator)
        )

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of windows spread evenly over the held-out text."""
        config = self._config
        count = config.held_out_batches * config.batch
        last = self._held_out.numel() - config.context - 1
        starts = torch.linspace(0, last, count, dtype=torch.float64).long()
        for batch in torch.split(starts, config.batch):
            yield self._windows(self._held_out, batch)

    def _windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        span = torch.arange(self._config.context + 1)
        windows = text[starts[:, None] + span].long().to(self._device)
        return windows[:, :-1], windows[:, 1:]


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Trainee:
    """One of the two models with its optimiser."""

    model: ByteModel
    optimiser: MasterAdamW
    device: str

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with precision(self.device):
            loss, balance = self.model(tokens, targets)
        return loss, balance

    def step(self, tokens: Tensor, targets: Tensor) -> Sample:
        """One update on a batch."""
        start, held = _start(self.device)
        loss, balance = self.forward(tokens, targets)
        torch.autograd.backward(loss + BALANCE * balance)
        self.optimiser.step()
        milliseconds, peak_mib = _stop(self.device, start, held)
        return Sample(loss.item(), milliseconds, peak_mib)

    def saved_mib(self, tokens: Tensor, targets: Tensor) -> float:
        """Forward and backward without update; gradients stay. Memory autograd saved, MiB."""
        weights = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, balance = self.forward(tokens, targets)
        torch.autograd.backward(loss + BALANCE * balance)
        return sum(saved.values()) / 2**20

    @torch.no_grad()
    def held_out(self, data: Batches) -> float:
        """Mean loss on the held-out text, nats per byte."""
        losses = [self.forward(tokens, targets)[0] for tokens, targets in data.held_out()]
        return torch.stack(losses).mean().item()


@dataclass(frozen=True, slots=True)
class Pair:
    """Both models, trained in turn on each batch so that the machine's mood hits both alike."""

    plain: Trainee
    generated: Trainee
    steps: int

    @classmethod
    def build(
        cls, config: DemoConfig, factory: LayerFactory, device: str, steps: int, seed: int
    ) -> Pair:
        """Two models with equal parameters.

        Raises:
            DemoError: `factory` makes other parameters than the contract says.
        """
        plain = ByteModel(config, PlainLayer, device)
        initialise(plain, seed)
        generated = ByteModel(config, factory, device)
        copy_parameters(plain, generated)
        rate = config.learning_rate
        return cls(
            Trainee(plain, MasterAdamW(plain, steps, rate), device),
            Trainee(generated, MasterAdamW(generated, steps, rate), device),
            steps,
        )

    def probe(self, data: Batches) -> Probe:
        """Compare gradients and saved memory on the first batch; leaves both models unchanged.

        Raises:
            DemoError: a parameter of the generated model gets no gradient, or not a finite one.
        """
        batch = data.train(0)
        plain_mib = self.plain.saved_mib(*batch)
        generated_mib = self.generated.saved_mib(*batch)
        differences = dict(_gradient_differences(self.plain.model, self.generated.model))
        worst = max(differences, key=lambda name: differences[name])
        self.plain.model.zero_grad(set_to_none=True)
        self.generated.model.zero_grad(set_to_none=True)
        return Probe(plain_mib, generated_mib, differences[worst], worst)

    def train(
        self, data: Batches, time_limit_s: float, report: Callable[[Step], None]
    ) -> list[Step]:
        """Train both until the steps or the seconds are used up; at least one step."""
        steps: list[Step] = []
        end = time.perf_counter() + time_limit_s
        for number in range(1, self.steps + 1):
            batch = data.train(number - 1)
            # Whoever runs second finds the batch in cache: take turns.
            if number % 2:
                plain, generated = self.plain.step(*batch), self.generated.step(*batch)
            else:
                generated, plain = self.generated.step(*batch), self.plain.step(*batch)
            steps.append(Step(number, plain, generated))
            report(steps[-1])
            if time.perf_counter() > end:
                break
        return steps

    def held_out(self, data: Batches) -> HeldOut:
        """Held-out loss of both models."""
        return HeldOut(self.plain.held_out(data), self.generated.held_out(data))


def _gradient_differences(plain: nn.Module, generated: nn.Module) -> Iterator[tuple[str, float]]:
    for name, parameter in plain.named_parameters():
        expected = parameter.grad
        got = generated.get_parameter(name).grad
        if expected is None or got is None:
            raise DemoError(
                f"{NAMES}: expected a gradient for {name}, got none; run the bundle's "
                f"own tests to see which operand loses it"
            )
        difference = ((got.float() - expected.float()).norm() / expected.float().norm()).item()
        if not math.isfinite(difference):
            raise DemoError(
                f"{NAMES}: expected a finite gradient for {name}, got a relative "
                f"difference of {difference}; run the bundle's own tests"
            )
        yield name, difference


def precision(device: str) -> AbstractContextManager[object]:
    """On a GPU attention and head run in bfloat16 too; a CPU gains nothing from it."""
    if torch.device(device).type == "cuda":
        return torch.autocast("cuda", torch.bfloat16)
    return nullcontext()


def _start(device: str) -> tuple[float, int]:
    """Begin timing a step: seconds, and bytes allocated on a GPU."""
    held = 0
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    return time.perf_counter(), held


def _stop(device: str, start: float, held: int) -> tuple[float, float | None]:
    """End timing a step: milliseconds, and MiB needed above `held` on a GPU."""
    peak = None
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        peak = (torch.cuda.max_memory_allocated(device) - held) / 2**20
    return (time.perf_counter() - start) * 1e3, peak


def check_device(device: str, arch: str) -> None:
    """Refuse a GPU that torch does not see.

    Raises:
        DemoError: with the way out.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise DemoError(
            f"device {device} (arch {arch}): expected a CUDA GPU, torch {torch.__version__} sees "
            f"none; run: fusegen demo --arch cpu"
        )


def device_name(device: str) -> str:
    """The GPU's name, or the CPU with the number of threads torch uses."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def load_layer(bundle: Path, arch: str, recipe: str = "bf16") -> LayerFactory:
    """Import the modules of the layer from the bundle's folder, which need not be on `sys.path`.

    Args:
        bundle: the folder.
        arch: its architecture, for messages.
        recipe: of the experts, with options behind two underscores each; that of the router is
            bf16, as recipes leave routers alone.

    Raises:
        DemoError: the folder or a module is not there, or has no such class.
    """
    folder = bundle.resolve()
    router, experts = (
        _class_of(folder, module, word, arch)
        for module, word in zip(CLASSES, ("bf16", recipe), strict=True)
    )
    return layer_of(router, experts)


def layer_of(router: Callable[..., nn.Module], experts: Callable[..., nn.Module]) -> LayerFactory:
    """The factory of layers of two generated classes."""

    def made(config: DemoConfig, device: str) -> nn.Module:
        if config.top_k != TOP_K:
            raise DemoError(f"DemoConfig.top_k: expected {TOP_K}, got {config.top_k}")
        sizes = {"num_experts": config.experts, "hidden": config.hidden, "device": device}
        own = {"intermediate": config.intermediate, "bias": False}
        return GeneratedLayer(
            router(**sizes, aux_coefficient=1.0, dtype=torch.bfloat16),
            experts(**sizes, **own, dtype=torch.bfloat16),
        )

    return made


def _class_of(folder: Path, module: str, recipe: str, arch: str) -> Callable[..., nn.Module]:
    cell, words = f"{module}__{recipe}", recipe.split("__")
    for needed in (folder / "__init__.py", folder / f"{cell}.py"):
        if not needed.is_file():
            raise DemoError(
                f"{needed}: expected a file of a generated bundle, got none; run: fusegen "
                f"generate --arch {arch} --module {module} --recipe {' --option '.join(words)} "
                f"--out {folder.parent}"
            )
    package = _import_package(folder)
    found = getattr(importlib.import_module(f"{package.__name__}.{cell}"), CLASSES[module], None)
    if found is None:
        raise DemoError(
            f"{folder / f'{cell}.py'}: expected a class {CLASSES[module]}, got none; generate it "
            f"again"
        )
    return cast(Callable[..., nn.Module], found)


def _import_package(folder: Path) -> ModuleType:
    # The name follows from the path: importing one folder twice must not define its ops twice.
    name = f"_fusegen_demo_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise DemoError(f"{folder / '__init__.py'}: expected an importable Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
