"""The activations of the catalogue, and formulas that reach the rest of the expression language.

Each case is (text, operands, attributes); loaded with runpy, so that it needs no import path.
"""

from __future__ import annotations

Case = tuple[str, tuple[str, ...], dict[str, float | None]]

_GELU = "0.5 * {0} * (1 + tanh(0.7978845608028654 * ({0} + 0.044715 * {0}**3)))"
_CLAMPED = (
    "minimum(gate, limit) * sigmoid(alpha * minimum(gate, limit)) "
    "* (clamp(up, -limit, limit) + offset)"
)
_CLAMPED_VALUES: dict[str, float | None] = {"limit": 7, "alpha": 1.702, "offset": 1}
_SITU = "beta1 * tanh(gate / beta1) * sigmoid(gate) * beta2 * tanh(up / beta2)"
_SITU_VALUES: dict[str, float | None] = {"beta1": 4, "beta2": 25}
_X = ("x",)
_GLU = ("gate", "up")
_SCALED = ("gate", "up", "scales")

ACTIVATIONS: dict[str, Case] = {
    "gelu": (_GELU.format("x"), _X, {}),
    "relu": ("relu(x)", _X, {}),
    "srelu": ("relu(x)**2", _X, {}),
    "silu": ("x * sigmoid(x)", _X, {}),
    "qgelu": ("x * sigmoid(1.702 * x)", _X, {}),
    "glu": ("sigmoid(gate) * up", _GLU, {}),
    "geglu": (_GELU.format("gate") + " * up", _GLU, {}),
    "qgeglu": ("gate * sigmoid(1.702 * gate) * up", _GLU, {}),
    "reglu": ("relu(gate) * up", _GLU, {}),
    "sreglu": ("square(relu(gate)) * up", _GLU, {}),
    "swiglu": ("gate * sigmoid(gate) * up", _GLU, {}),
    "clamped_swiglu": (_CLAMPED, _GLU, _CLAMPED_VALUES),
    "situglu": (_SITU, _GLU, _SITU_VALUES),
    "scaled_swiglu": ("gate * sigmoid(gate) * up * scales", _SCALED, {}),
    "scaled_clamped_qgeglu": (_CLAMPED + " * scales", _SCALED, _CLAMPED_VALUES),
    "scaled_situglu": (_SITU + " * scales", _SCALED, _SITU_VALUES),
    "scaled_srelu": ("relu(x)**2 * scales", ("x", "scales"), {}),
    "scaled_tanh_srelu": ("(s * tanh(relu(x) / s))**2 * scales", ("x", "scales"), {"s": 8}),
}

EXTRAS: dict[str, Case] = {
    "gelu_erf": ("0.5 * x * (1 + erf(x * 0.7071067811865476))", _X, {}),
    "mish": ("x * tanh(softplus(x))", _X, {}),
    "hardswish": ("x * clamp(x + 3, 0, 6) / 6", _X, {}),
    "leaky_relu": ("relu(x) - 0.3 * relu(-x)", _X, {}),
    "bell": ("exp(-square(x))", _X, {}),
    "root": ("sqrt(1 + x * x) - abs(x)", _X, {}),
    "inverse_root": ("x * rsqrt(1 + x**2)", _X, {}),
    "softsign": ("x / (1 + abs(x))", _X, {}),
    "floor": ("maximum(x, floor) * 0.5", _X, {"floor": -2}),
    "smaller": ("minimum(gate, up) * up", _GLU, {}),
    "larger": ("maximum(gate, up) - gate", _GLU, {}),
    "ratio": ("gate / (1 + up**2)", _GLU, {}),
    "runtime_limit": (_CLAMPED, _GLU, {"limit": None, "alpha": None, "offset": None}),
}

# Values of the attributes that stay symbolic above.
RUNTIME_VALUES: dict[str, float] = {"limit": 7.0, "alpha": 1.702, "offset": 1.0}
