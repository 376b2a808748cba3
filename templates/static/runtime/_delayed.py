"""Gradients of weights that wait: what their GEMMs read, from a backward to `backward_dw`."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import _library

_ELEMENTS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_NO_SLOTS = (
    "compiled code keeps what delayed gradients of weights need in preallocated slots; construct "
    "the module with max_in_flight and max_tokens"
)


@dataclass(frozen=True)
class Slot:
    """Room for one operand in every entry of a queue.

    Attributes:
        shape: for the most tokens.
        dtype: of the elements; None for the module's own type.
        stored: whether elements are read, not sizes alone.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    stored: bool = True

    def allocate(self, count: int, device: torch.device | str | None) -> Tensor:
        """Bytes, so that no cast of a module changes them."""
        size = 2 if self.dtype is None else self.dtype.itemsize
        shape = (*self.shape[:-1], self.shape[-1] * size)
        return torch.zeros(count, *shape, dtype=torch.uint8, device=device)


class _Mark:
    """Whether the backward finished that left an entry, and whether it still runs.

    Autograd keeps the callback of a backward until that ends, and calls it if it ends well.
    """

    def __init__(self) -> None:
        self.finished = False
        running = _Running()
        self._running = weakref.ref(running)

        def finish(_: _Running = running) -> None:
            self.finished = True

        torch.autograd.Variable._execution_engine.queue_callback(finish)

    @property
    def failed(self) -> bool:
        return not self.finished and self._running() is None


class _Running:
    pass


@dataclass(frozen=True)
class _Entry:
    mark: _Mark
    weights: tuple[Tensor, ...]
    operands: tuple[Tensor | None, ...]
    needs: tuple[bool, ...]
    versions: tuple[int, ...]
    stream: torch.cuda.Stream | None
    captured: bool


class WgradQueue(nn.Module):
    """What backwards left for `backward_dw`: one entry per backward, oldest first.

    Without slots an entry refers to tensors, and there is no bound; `torch.compile` cannot trace
    that.  With slots a backward copies into tensors allocated once, and a counter on the device
    says which is next, so that compiled code and captured graphs fill and empty it, too.

    Args:
        slots: of each operand, for tensors with the most tokens; None to refer to tensors.
        max_in_flight: how many entries the slots hold.
        device: of the slots.
    """

    def __init__(
        self,
        slots: Sequence[Slot] | None = None,
        max_in_flight: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._entries: deque[_Entry] = deque()
        self._marks: list[_Mark] = []  # of entries in slots
        self.hooks: list[Callable[[], object]] = []
        self.slots = None if slots is None else tuple(slots)
        # No buffers: those are broadcast by DDP and belong into a state dict.
        stored = (slot for slot in self.slots or () if slot.stored)
        self._storage = [slot.allocate(max_in_flight, device) for slot in stored]
        self._counters = torch.zeros(2, dtype=torch.int64, device=device)  # kept, taken

    @property
    def pending(self) -> int:
        """Number of entries.  With slots it reads the device, so the host waits for it."""
        self._settle()
        if self.slots is None:
            return len(self._entries)
        if self._counters.is_meta:
            return 0
        kept, taken = self._counters.tolist()
        return kept - taken

    def clear(self) -> None:
        """Forget every entry, and the gradients that it stands for.

        An eager backward that raises leaves no entry.  A compiled one may leave one in a slot, so
        call this when a step is given up.
        """
        self._entries.clear()
        self._marks.clear()
        self._counters.zero_()

    def _settle(self) -> None:
        """Remove what was left by backwards that failed."""
        if any(entry.mark.failed for entry in self._entries):
            self._entries = deque(entry for entry in self._entries if not entry.mark.failed)
        failed = sum(mark.failed for mark in self._marks)
        if failed:
            if self._counters.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a backward failed before this capture and left entries that wait for "
                    "backward_dw; call wgrad_queue.clear() first"
                )
            self._counters[0].sub_(failed)
        self._marks = [mark for mark in self._marks if not (mark.finished or mark.failed)]

    def keep(
        self,
        cell: str,
        weights: tuple[Tensor, ...],
        operands: tuple[Tensor | None, ...],
        needs: tuple[bool, ...],
    ) -> None:
        """Add an entry, which stays if the backward that runs ends well.

        Args:
            cell: whose backward it is.
            weights: that the forward was called with.
            operands: of the op that gives the gradients of weights.
            needs: for which weights.

        Raises:
            RuntimeError: code is being compiled and there are no slots; or all of them are taken,
                which on a GPU is an assertion on the device.
        """
        if not torch.compiler.is_compiling():
            self._settle()
        if self.slots is not None:
            if not torch.compiler.is_compiling():
                self._marks.append(_Mark())
            first, slots = operands[0], zip(operands, self.slots, strict=True)
            assert first is not None
            tokens, capacity = first.numel() // first.shape[-1], self.slots[0].shape[0]
            stored = [_bytes(operand) for operand, slot in slots if slot.stored]
            _keep(stored, tokens, capacity, self._storage, self._counters)
            return
        if torch.compiler.is_compiling():
            raise RuntimeError(f"{cell}: {_NO_SLOTS}")
        # Apart from the graph that they were made in, which would stay alive with them.
        kept = tuple(each.detach() if each is not None else None for each in operands)
        entry = _Entry(_Mark(), weights, kept, needs, _versions(kept), *_place(kept))
        self._entries.append(entry)

    def oldest(
        self, cell: str, weights: Sequence[Tensor]
    ) -> tuple[tuple[Tensor | None, ...], tuple[bool, ...]]:
        """The oldest entry; it stays.

        Args:
            cell: whose gradients are asked for.
            weights: the weights.  Slots do not know which were asked for: those that require one.

        Returns:
            Operands, and for which weights.

        Raises:
            RuntimeError: there is none, or its tensors have changed since.
        """
        if not torch.compiler.is_compiling():
            self._settle()
        if self.slots is not None:
            return self._read(weights[0]), tuple(weight.requires_grad for weight in weights)
        if torch.compiler.is_compiling():
            raise RuntimeError(f"{cell}: {_NO_SLOTS}")
        if not self._entries:
            raise RuntimeError(
                f"{cell}: backward_dw: nothing is pending; call it once for each backward that "
                "a weight with requires_grad took part in"
            )
        entry = self._entries[0]
        if any(one is not other for one, other in zip(entry.weights, weights, strict=True)):
            raise RuntimeError(
                f"{cell}: backward_dw: the weights are not those of the forward; functional_call "
                "and wrappers that exchange parameters (FSDP) cannot be used with delayed_wgrad"
            )
        stream, captured = _place(entry.operands)
        if captured != entry.captured:
            raise RuntimeError(
                f"{cell}: backward_dw: a backward and its backward_dw have to be in the same "
                "captured graph; construct the module with max_in_flight and max_tokens otherwise"
            )
        if _versions(entry.operands) != entry.versions:
            raise RuntimeError(
                f"{cell}: backward_dw: a tensor that it needs was modified in place after the "
                "backward; change inputs and gradients after backward_dw"
            )
        if stream != entry.stream and stream is not None:
            for operand in entry.operands:
                if operand is not None:
                    operand.record_stream(stream)
        return entry.operands, entry.needs

    def _read(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The oldest entry's slots as operands of a module with such a weight."""
        io = _io_dtype(weight)
        stored = iter(_take(self._storage, self._counters))
        return tuple(
            _as(next(stored), slot.dtype or io)
            if slot.stored
            else weight.new_empty((), dtype=slot.dtype or io).expand(slot.shape)
            for slot in self.slots or ()
        )

    def drop_oldest(self) -> None:
        """Remove the oldest entry."""
        if self.slots is None:
            self._entries.popleft()
        else:
            self._counters[1].add_(1)

    def _refuse_pending(self, what: str) -> None:
        if self.pending:
            raise RuntimeError(
                f"cannot {what} a module while backwards wait for backward_dw() ({self.pending}); "
                "call it once for each of them first"
            )

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_pending("copy")
        return {**self.__dict__, "_marks": []}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WgradQueue:
        self._refuse_pending("move")
        self._storage = [fn(tensor) for tensor in self._storage]
        self._counters = torch.zeros_like(fn(self._counters))  # `to_empty` leaves any number
        return self


def mark(weight: Any) -> None:
    """Say that a weight's gradient comes later; Megatron-LM looks for this name."""
    weight.skip_backward_post_hook = True


def shape_of(tensor: Tensor) -> Tensor:
    """A tensor of the same sizes and type without memory of its own."""
    return tensor.new_empty(()).expand(tensor.shape)


def slot_bounds(max_in_flight: int | None, max_tokens: int | None) -> tuple[int, int] | None:
    """Both sizes of a queue with slots, None of one without; they are given together or not at all.

    Raises:
        ValueError: one is missing, or not positive.
    """
    if max_in_flight is None and max_tokens is None:
        return None
    if not (max_in_flight and max_tokens and max_in_flight > 0 and max_tokens > 0):
        raise ValueError(
            "max_in_flight and max_tokens: expected two positive numbers or neither, "
            f"got {max_in_flight} and {max_tokens}"
        )
    return max_in_flight, max_tokens


def main_grad(cell: str, name: str, weight: nn.Parameter, dtype: torch.dtype) -> Tensor | None:
    """As that of `_library`, whether gradients are being recorded or not, and asked for now."""
    with torch.enable_grad():
        found = _library.main_grad(cell, name, weight, dtype)
    return found() if callable(found) else found


def own(cell: str, name: str, weight: Tensor) -> Tensor:
    """A weight whose gradient may wait: a parameter, not what a wrapper makes of one.

    Raises:
        RuntimeError: its gradient has to go on, in the backward.
    """
    if weight.requires_grad and not weight.is_leaf:
        raise RuntimeError(
            f"{cell}: {name}: expected a parameter, got a tensor that a wrapper (parametrize, "
            "PEFT, FSDP) makes in each forward; its gradient cannot wait: use a module generated "
            "without delayed_wgrad"
        )
    if weight.requires_grad:
        _library.refuse_ddp(cell, name, weight)
    return weight


def accumulate(*gradients: tuple[Tensor, Tensor | None]) -> None:
    """Add gradients to those of the weights as a backward does, hooks included."""
    found = [(weight, gradient) for weight, gradient in gradients if gradient is not None]
    for weight, gradient in found:
        if type(weight.detach()) is not type(gradient):
            raise RuntimeError(
                "backward_dw: a weight became a DTensor after its forward; wrappers that shard "
                "parameters (FSDP) cannot be used with delayed_wgrad"
            )
    if torch.compiler.is_compiling():
        for weight, gradient in found:
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
    elif found:
        weights, values = zip(*found, strict=True)
        torch.autograd.backward(weights, values)


def run_hooks(*weights: tuple[Any, bool]) -> None:
    """Run the hooks of weights that ask for it, as Megatron's do: main_grad is complete."""
    asking = [w for w, need in weights if need and hasattr(w, "grad_added_to_main_grad")]
    for weight in asking:
        weight.grad_added_to_main_grad = True
    if asking:
        torch.autograd.backward(asking, [w.new_zeros(()).expand(w.shape) for w in asking])


def _versions(operands: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    return tuple(each._version for each in operands if each is not None)


def _place(operands: tuple[Tensor | None, ...]) -> tuple[torch.cuda.Stream | None, bool]:
    """The stream that reads operands, and whether a graph is being captured from it."""
    first = next(each for each in operands if each is not None)
    if not first.is_cuda:
        return None, False
    return torch.cuda.current_stream(first.device), torch.cuda.is_current_stream_capturing()


def _io_dtype(weight: Tensor) -> torch.dtype:
    """Type of what a module computes in: its weights', or what autocast makes of them."""
    half = weight.dtype in (torch.bfloat16, torch.float16)
    return weight.dtype if half else torch.get_autocast_dtype(weight.device.type)


def _bytes(tensor: Tensor | None) -> Tensor | None:
    """A tensor as bytes: inductor changes nothing in place next to E8M0 tensors."""
    return None if tensor is None else _as(tensor.contiguous(), torch.uint8)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor with its innermost dimension in elements of another size.

    It is flat in between, as strides of dimensions without length may be any.
    """
    inner = tensor.shape[-1] * tensor.element_size() // dtype.itemsize
    return tensor.reshape(-1).view(dtype).view(*tensor.shape[:-1], inner)


def _wide(*tensors: Tensor) -> list[Tensor]:
    """Tensors of bytes as tensors of the largest elements that fit all of them."""
    length = math.gcd(*(each.shape[-1] for each in tensors))
    element = next(each for each in _ELEMENTS if length % each.itemsize == 0)
    return [_as(each, element) for each in tensors]


def _keep_in_slots(
    values: list[Tensor | None], tokens: int, capacity: int, slots: list[Tensor], counters: Tensor
) -> None:
    if tokens > capacity:
        raise RuntimeError(
            f"slots for gradients of weights hold {capacity} tokens, got {tokens}; construct "
            "the module with a larger max_tokens"
        )
    count = slots[0].shape[0]
    torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
        counters[0] - counters[1] < count,
        f"all {count} slots for gradients of weights are pending; call backward_dw() before "
        "the next backward, or construct the module with a larger max_in_flight",
    )
    place = counters[:1] % count
    for value, slot in zip(values, slots, strict=True):
        if value is None:
            continue
        dims = slot.dim() - 1
        data = value
        if value.dim() != dims:  # all leading dimensions are one in a slot
            data = value.reshape(-1, *value.shape[value.dim() - dims + 1 :])
        data, slot = _wide(data, slot)
        if data.shape != slot.shape[1:]:
            slot.index_fill_(0, place, 0)
            slot = slot[(slice(None), *(slice(size) for size in data.shape))]
        slot.index_copy_(0, place, data[None])
    counters[0].add_(1)


def _take_from_slots(slots: list[Tensor], counters: Tensor) -> list[Tensor]:
    torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
        counters[0] > counters[1],
        "backward_dw: nothing is pending; call it once for each backward",
    )
    found = []
    for slot in slots:
        (wide,) = _wide(slot)
        place = counters[1:] % slot.shape[0]
        found.append(_as(wide.index_select(0, place)[0], torch.uint8))
    return found


_keep = _library.define(
    "wgrad_keep",
    "(Tensor?[] values, SymInt tokens, int capacity, Tensor(a!)[] slots, Tensor(b!) counters)"
    " -> ()",
    _keep_in_slots,
    lambda values, tokens, capacity, slots, counters: None,
)
_take = _library.define(
    "wgrad_take",
    "(Tensor[] slots, Tensor counters) -> Tensor[]",
    _take_from_slots,
    lambda slots, counters: [slot.new_empty(slot.shape[1:]) for slot in slots],
)
