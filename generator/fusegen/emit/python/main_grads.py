"""Texts of gradients that go to buffers of the caller's."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.dtypes import DType
from ...ir.naming import main_grad, need
from ...ir.plan import ModulePlan


@dataclass(frozen=True, slots=True)
class MainGradText:
    """A parameter whose gradient goes to a buffer of the caller's.

    Attributes:
        argument: of the function.
        path: source of the parameter in the class.
        name: of the buffer's argument.
        dummy: of the argument that asks for zeros as the parameter's gradient.
        overwrite: of the argument that asks for what the buffer holds to be replaced; empty where
            it always is.
        flag: that asks for the gradient.
        about: of the buffer, for a docstring.
    """

    argument: str
    path: str
    name: str
    dummy: str
    overwrite: str
    flag: str
    about: str


def main_grad_texts(plan: ModulePlan) -> tuple[MainGradText, ...]:
    return tuple(_main_grad_text(plan, leaf, name) for leaf, name in plan.main_grads)


def _main_grad_text(plan: ModulePlan, leaf: str, name: str) -> MainGradText:
    paths = {parameter.buffer: parameter.path for parameter in plan.parameters}
    buffer = plan.buffer(name)
    dtype = "bfloat16 or float16" if buffer.dtype is DType.IO else "float32"
    about = f"{buffer.shape} {dtype}"
    return MainGradText(
        leaf, paths[leaf], name, dummy(leaf), overwrite(plan, leaf), need(leaf), about
    )


def main_grad_call(plan: ModulePlan, helper: str, leaf: str, path: str, weight: str) -> str:
    """The buffer of the parameter at `path`, which `weight` is, of the type that it is to have."""
    narrow = plan.buffer(main_grad(leaf)).dtype is DType.IO
    dtype = f"{weight}.dtype" if narrow else "torch.float32"
    return f'{helper}.main_grad("{plan.cell}", "{path}", {weight}, {dtype})'


def dummy(parameter: str) -> str:
    return f"{parameter}_dummy_grad"


def overwrite(plan: ModulePlan, parameter: str) -> str:
    """The argument's name, where kernels add to the parameter's buffer."""
    return f"{parameter}_overwrite_main_grad" if adds(plan) else ""


def adds(plan: ModulePlan) -> bool:
    """Whether kernels add to buffers of the caller's; otherwise they replace what those hold."""
    return any(step.input("accumulate") for step in plan.unmerged.steps)
