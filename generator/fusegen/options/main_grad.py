"""Where GEMMs leave the gradients of weights."""

from __future__ import annotations

from enum import Enum

from .option import Choice, ModuleFacts, Option


class MainGrad(str, Enum):
    """Where a GEMM leaves the gradient of a weight: in fp32 where the type is not named."""

    RETURNED = "returned_grad"
    ADD = "add_to_main_grad"
    WRITE = "write_main_grad"
    ADD_16 = "add_to_16_bit_main_grad"
    WRITE_16 = "write_16_bit_main_grad"

    @property
    def adds(self) -> bool:
        """Whether to what is there."""
        return self in (MainGrad.ADD, MainGrad.ADD_16)

    @property
    def narrow(self) -> bool:
        """Whether in the type of the weight."""
        return self in (MainGrad.ADD_16, MainGrad.WRITE_16)


def _applies_to(facts: ModuleFacts) -> str | None:
    return None if facts.weight_gradients else "no GEMM gives the gradient of a weight"


def _added_once(facts: ModuleFacts) -> str | None:
    if facts.chunks:
        return "an op adds up chunks of rows, each of which would be rounded; add in fp32"
    return None


MAIN_GRAD = Option(
    "main_grad",
    "Where GEMMs leave the gradients of weights",
    (
        Choice(MainGrad.RETURNED.value, "The backward returns them, in the type of the weights"),
        Choice(MainGrad.ADD.value, "Added to an fp32 buffer of the caller's"),
        Choice(MainGrad.WRITE.value, "Written to an fp32 buffer of the caller's"),
        Choice(
            MainGrad.ADD_16.value,
            "Added to a caller's buffer of the weights' type",
            applies_to=_added_once,
        ),
        Choice(MainGrad.WRITE_16.value, "Written to a caller's buffer of the weights' type"),
    ),
    _applies_to,
)
