"""What the generated tests share: devices, random inputs, exact results and comparisons."""

from __future__ import annotations

import atexit
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _library

DTYPES = (torch.bfloat16, torch.float16)

Argument = Any
"""A tensor that a function is called with; None, where it may be left out."""

Tensors = dict[str, Argument]
"""Those of a call, by name."""

Layer = Any
"""A module of the bundle, and what it has besides that of every `nn.Module`."""

Weight = Any
"""A parameter, and what frameworks put on it, such as `main_grad`."""


def devices() -> list[str]:
    """The CPU always; the GPU where this bundle has compiled kernels for it."""
    usable = _library.ARCH != "cpu" and torch.cuda.is_available()
    return ["cpu", "cuda"] if usable else ["cpu"]


def form_group() -> None:
    """A process group of this process alone, for modules that reduce over all ranks."""
    if not torch.distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        # Gloo's threads may hold tensors; left to the end, they free them after Python is gone.
        atexit.register(torch.distributed.destroy_process_group)


def give_main_grads(layer: torch.nn.Module, paths: Sequence[str], dtype: torch.dtype) -> None:
    """Buffers of zeros for gradients that go to the caller's."""
    for path in paths:
        weight: Weight = layer.get_parameter(path)
        weight.main_grad = torch.zeros_like(weight, dtype=dtype)


def op(name: str) -> Any:
    """An op of this bundle."""
    return getattr(getattr(torch.ops, _library.NAMESPACE), name).default


class Calls(TorchDispatchMode):
    """Keeps each op whose name begins so, and what it is called with first, by its name."""

    def __init__(self, begin: str) -> None:
        super().__init__()
        self.begin = begin
        self.calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name().rpartition("::")[2]
        if name.startswith(self.begin):
            kept = (a.clone() if isinstance(a, Tensor) else a for a in args)
            self.calls.setdefault(name, (func, tuple(kept)))
        return func(*args, **(kwargs or {}))


def opcheck(checked: Any, arguments: tuple[Any, ...]) -> None:
    """PyTorch's own tests of an op.

    The one for schemas does arithmetic on its arguments, which float8 tensors do not have.
    """
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if all(a.element_size() > 1 for a in arguments if isinstance(a, Tensor)):
        tests.append("test_schema")
    torch.library.opcheck(checked, arguments, test_utils=tests)


def random_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: str, seed: int, scale: float = 1.0
) -> Tensor:
    """Normal values, the same on every device; integers count something, from 0 on."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float32) * scale
    if not dtype.is_floating_point:
        values = (8 * values).abs()
    return values.to(dtype).to(device)


def places(shape: Sequence[int], seed: int) -> Tensor:
    """A map from so many places to as many others, each to its own; every seventh to none."""
    count = math.prod(shape)
    found = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    found[::7] = -1
    return found.to(torch.int32).view(*shape)


def inverse(places: Tensor) -> Tensor:
    """The map from others to places, [n], -1 where no place has one."""
    flat = places.flatten().long()
    found = torch.full_like(flat, -1, dtype=torch.int32)
    found[flat[flat >= 0]] = torch.arange(len(flat), dtype=torch.int32)[flat >= 0]
    return found


def stacked_groups(own: Tensors, names: Iterable[str]) -> Tensors:
    """Parameters `weight0`, `weight1`, ... as one by the name `weight`; others as they are."""
    found = dict(own)
    for name in names:
        count = sum(each.removeprefix(name).isdigit() for each in own)
        found[name] = torch.stack([found.pop(f"{name}{group}") for group in range(count)])
    return found


def fresh(tensors: Tensors, states: Iterable[str]) -> Tensors:
    """The same tensors with copies of those that a call changes."""
    return {**tensors, **{name: tensors[name].clone() for name in states}}


def pick(tensors: Tensors, names: Sequence[str]) -> list[Any]:
    """Those of these names, in this order."""
    return [tensors[name] for name in names]


def narrowed(tensor: Tensor) -> Tensor:
    """In a narrower type, of those that modules widen."""
    return tensor.to(torch.bfloat16 if tensor.is_floating_point() else torch.int32)


def state_rows(*states: Tensor) -> Tensor:
    """States of delayed scaling, ``[n, E]`` or ``[E]``, as rows of one tensor."""
    return torch.cat([torch.atleast_2d(state) for state in states])


def without(tensors: Tensors, states: Sequence[str]) -> Tensors:
    """The tensors that no call changes."""
    return {name: tensor for name, tensor in tensors.items() if name not in states}


def split_cases(groups: int, tokens: int) -> list[list[int]]:
    """Ragged, empty, single, short and out-of-range group sizes."""
    ragged = [(7 * group * group + 3) % (2 * tokens // groups + 1) for group in range(groups)]
    return [
        ragged,
        [0] * groups,
        [tokens] + [0] * (groups - 1),
        [0] * (groups - 1) + [tokens],
        [tokens // groups] * groups,
        [1] * groups,
        [-3] + [tokens] * (groups - 1),
    ]


def joined(outputs: Sequence[Tensor]) -> Tensor:
    """Tensors side by side, [..., D] each; further dimensions of one count as its columns.

    Integers are left out; beside a single number, all elements of one count as its columns.
    """
    own = [output for output in outputs if output.is_floating_point()]
    first = max(min(output.dim() for output in own) - 1, 0)
    return torch.cat([output.flatten(min(first, output.dim())) for output in own], dim=-1)


class _Decoded(torch.autograd.Function):
    """Values of copies, whose gradient is that of the tensor which stands beside them."""

    @staticmethod
    def forward(ctx, tensor: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx, *grads):
        return grads[0], None


def decoded(copies: Any, decode: Callable[..., Tensor], *groups: Tensor) -> Tensor:
    """What a module's copies of its output stand for; nobody reads what stands in its place."""
    if not torch.compiler.is_compiling():
        tensor = copies.tensor
        capturing = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
        assert capturing or tensor.isnan().all()
    amax = () if copies.rowwise_amax is None else (copies.rowwise_amax,)
    stored = (copies.rowwise_data, copies.rowwise_scale_inv, *amax, *groups)
    return _Decoded.apply(copies.tensor, decode(copies.tensor, *stored))


def parts(whole: Tensor, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A tensor cut as wide as the outputs are; inverse of `joined`."""
    own = [output for output in outputs if output.is_floating_point()]
    first = max(min(output.dim() for output in own) - 1, 0)
    columns = [output.shape[first:] for output in own]
    pieces = whole.split([shape.numel() for shape in columns], dim=-1)
    pairs = zip(pieces, own, strict=True)
    return tuple(piece.reshape(output.shape).to(output.dtype) for piece, output in pairs)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error in float64; infinite where anything is not finite."""
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    if not torch.isfinite(got).all():
        return float("inf")
    scale = expected.norm()
    error = (got - expected).norm()
    return float(error / scale) if scale > 0 else float(error)


def exact(
    forward: Callable[..., Tensor],
    tensors: Tensors,
    wanted: Sequence[str],
    dy: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Result and gradients of a reference in float64, by autograd rather than its own rules."""
    wide: Tensors = {}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.is_floating_point():
            wide[name] = tensor.detach().cpu().double().requires_grad_(name in wanted)
        else:
            wide[name] = None if tensor is None else tensor.cpu()
    y = forward(**wide)
    leaves = [wide[name] for name in wanted]
    if not y.requires_grad or not wanted:  # every group is empty, so nothing was read
        return y, {name: torch.zeros_like(leaf) for name, leaf in zip(wanted, leaves, strict=True)}
    gradients = torch.autograd.grad(y, leaves, dy.cpu().double(), materialize_grads=True)
    return y, dict(zip(wanted, gradients, strict=True))


def deeper(tensor: Tensor) -> Tensor:
    """With one more dimension in front."""
    return tensor[None]


def longer(axis: int, by: int) -> Callable[[Tensor], Tensor]:
    """Makes a tensor longer along an axis by its first slice, several times."""

    def change(tensor: Tensor) -> Tensor:
        return torch.cat((tensor, tensor.narrow(axis, 0, 1).repeat_interleave(by, axis)), axis)

    return change


def with_gaps(tensor: Tensor) -> Tensor:
    """The same values, at every second place of a tensor of twice the length."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


def refuses(call: Callable[[], object], message: str) -> None:
    """The call raises RuntimeError with exactly this message."""
    with pytest.raises(RuntimeError) as caught:
        call()
    assert str(caught.value).splitlines()[0] == message
