"""Formulas of the floating-point operations of ops, for PyTorch's counter of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...ir.plan import ModulePlan
from ...ir.program import Program
from ...ir.shapes import evaluate, symbols, to_code
from ...ir.step import Step
from ...steps import is_gemm
from .conditions import Conditions, named_conditions
from .words import FlopsText, bind_lines, tensor_text


def flops_texts(plan: ModulePlan) -> dict[str, FlopsText]:
    """The formula of each op that multiplies matrices, by the op's function."""
    found = ((program, _text(plan, program)) for _, program in plan.unmerged.ops)
    return {program.function: text for program, text in found if text is not None}


def step_flops(plan: ModulePlan, sizes: Mapping[str, int]) -> int:
    """What the ops of a training step with every gradient come to, by the size of each symbol."""
    steps = (step for _, program in plan.unmerged.ops for step in program.steps)
    return sum(evaluate(step.flops, sizes) for step in steps if is_gemm(step) and step.flops)


def _text(plan: ModulePlan, program: Program) -> FlopsText | None:
    gemms = [step for step in program.steps if is_gemm(step) and step.flops is not None]
    if not gemms:
        return None
    used = {name for step in gemms if step.flops is not None for name in symbols(step.flops)}
    conditions = named_conditions(program, lambda names: (_term(step, names) for step in gemms))
    lines = (*bind_lines(program, used), *conditions.lines)
    terms = tuple(_term(step, conditions) for step in gemms)
    words = {word for line in (*lines, *terms) for word in re.findall(r"\w+", line)}
    tensors = (tensor_text(plan, each) for each in program.arguments)
    return FlopsText(
        parameters=(
            *(f"{each.name}: {each.annotation}" for each in tensors if each.name in words),
            *(f"{flag}: bool" for flag in program.flags if flag in words),
        ),
        lines=lines,
        terms=terms,
    )


def _term(step: Step, conditions: Conditions) -> str:
    assert step.flops is not None
    flops = to_code(step.flops)
    return f"({flops} if {conditions.text(step.when)} else 0)" if step.when else flops
