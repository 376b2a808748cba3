"""Pointwise expressions: a line of text to forward and backward programs for PyTorch and CUDA.

    expression = parse("gate * sigmoid(gate) * up", operands=("gate", "up"))
    to_cuda(forward_program(expression))  # const float t0 = fusegen::sigmoid(gate); ...
    to_torch(backward_program(expression, ("gate", "up")))  # t0 = torch.sigmoid(gate) ...

Parsing and printing are plain Python. Only `derive`, `forward_program` and `backward_program`
import sympy, and only when they are called. `Derivations` keeps what they gave between runs.

What a printed program promises
* Every operand is float32 and is read as a real number; every step is one IEEE float32 operation or
  one function of `fusegen/math.cuh`, in the same order on every device. A compiler that contracts
  `a * b + c` (nvcc does, unless told `-fmad=false`) rounds once there instead of twice.
* Gradients at kinks: `relu` 0 at 0; `clamp`, and `minimum` or `maximum` with a constant, 1 on the
  edge; `minimum` and `maximum` of two operands one half each on a tie; `abs` 0 at 0. PyTorch does
  the same. A masked gradient is a select, never a product with 0, so an infinite factor cannot turn
  it into NaN.
* A product whose factors fight over the limit of one operand (`x * sigmoid(x)` at -inf) takes the
  value of that limit: where the vanishing factor is exactly 0 the product is 0. PyTorch gives NaN
  for `silu(-inf)` and for the gradient of `gelu` beyond 1e19.
* `1 + tanh(u)`, `1 + erf(u)`, `1 - sigmoid(u)` and `1 - tanh(u)**2` are rewritten as
  `2 * sigmoid(2 * u)`, `erfc(-u)`, `sigmoid(-u)` and `4 * e / (1 + e)**2` with `e = exp(-2 * |u|)`,
  which neither cancel nor keep a tail that should be 0. Slopes of `sigmoid` and `tanh` are computed
  so, too: a saturated gradient is right to a few units in its own last place.
* Across operands the arithmetic is IEEE: 0 of one operand times infinity of another is NaN, and so
  is an infinite incoming gradient times an exact 0 that is not a mask.
"""

from __future__ import annotations

from .degrees import degrees
from .derivations import Derivations
from .derive import backward_program, derive, forward_program, joint_backward, joint_forward
from .expression import (
    Call,
    Expr,
    Expression,
    ExpressionError,
    Name,
    Number,
    Op,
    Program,
    names_in,
)
from .parse import is_reserved, parse
from .printers import to_cuda, to_math, to_torch
from .zeros import jumps, zero_results

__all__ = [
    "Call",
    "Derivations",
    "Expr",
    "Expression",
    "ExpressionError",
    "Name",
    "Number",
    "Op",
    "Program",
    "backward_program",
    "degrees",
    "derive",
    "forward_program",
    "is_reserved",
    "joint_backward",
    "joint_forward",
    "jumps",
    "names_in",
    "parse",
    "to_cuda",
    "to_math",
    "to_torch",
    "zero_results",
]
