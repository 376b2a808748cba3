"""Printed PyTorch of every activation against autograd of formulas written by hand."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path

import mpmath
import pytest
import torch
import yaml
from torch import Tensor
from torch.nn import functional

from fusegen.math import backward_program, forward_program, parse, to_torch

_ROOT = Path(__file__).parents[2]
_MODULE = runpy.run_path(str(_ROOT / "tests" / "pointwise_cases.py"))
ACTIVATIONS = _MODULE["ACTIVATIONS"]
CASES = {**ACTIVATIONS, **_MODULE["EXTRAS"]}
RUNTIME_VALUES = _MODULE["RUNTIME_VALUES"]

Case = tuple[str, tuple[str, ...], dict[str, float | None]]


def _shipped() -> dict[str, Case]:
    """The expressions of `specs/ops`."""
    cases: dict[str, Case] = {}
    for path in sorted((_ROOT / "specs" / "ops").glob("*.yaml")):
        op = yaml.safe_load(path.read_text())
        tensors = op["inputs"] | op.get("parameters", {})
        operands = [h for n, t in tensors.items() for h in t.get("halves", [n])]
        values = {n: a["default"] for n, a in op.get("attributes", {}).items()}
        for text in op.get("pointwise", {}).values():
            cases[f"specs/{path.stem}"] = (text, tuple(operands), values)
    return cases


SHIPPED = _shipped()
Env = dict[str, Tensor]
Point = dict[str, float]
EPS = 2.0**-23
FLOAT32_MAX = torch.finfo(torch.float32).max
BFLOAT16_MAX = torch.finfo(torch.bfloat16).max


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate = torch.clamp(gate, max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (torch.clamp(up, -7.0, 7.0) + 1.0)


def _situ(gate: Tensor, up: Tensor) -> Tensor:
    return 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate) * 25.0 * torch.tanh(up / 25.0)


# Written from the definitions of the activations, with torch.nn.functional where it has one.
REFERENCE: dict[str, Callable[..., Tensor]] = {
    "gelu": _gelu,
    "relu": functional.relu,
    "srelu": lambda x: functional.relu(x).square(),
    "silu": functional.silu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "glu": lambda gate, up: functional.glu(torch.stack([up, gate]), dim=0).squeeze(0),
    "geglu": lambda gate, up: _gelu(gate) * up,
    "qgeglu": lambda gate, up: gate * torch.sigmoid(1.702 * gate) * up,
    "reglu": lambda gate, up: functional.relu(gate) * up,
    "sreglu": lambda gate, up: functional.relu(gate).square() * up,
    "swiglu": lambda gate, up: functional.silu(gate) * up,
    "clamped_swiglu": _clamped,
    "situglu": _situ,
    "scaled_swiglu": lambda gate, up, scales: functional.silu(gate) * up * scales,
    "scaled_clamped_qgeglu": lambda gate, up, scales: _clamped(gate, up) * scales,
    "scaled_situglu": lambda gate, up, scales: _situ(gate, up) * scales,
    "scaled_srelu": lambda x, scales: functional.relu(x).square() * scales,
    "scaled_tanh_srelu": lambda x, scales: (
        (8.0 * torch.tanh(functional.relu(x) / 8.0)).square() * scales
    ),
    "gelu_erf": functional.gelu,
    "mish": lambda x: x * torch.tanh(functional.softplus(x, threshold=700.0)),
    "hardswish": lambda x: x * torch.clamp(x + 3.0, 0.0, 6.0) / 6.0,
    "leaky_relu": lambda x: functional.relu(x) - 0.3 * functional.relu(-x),
    "bell": lambda x: torch.exp(-x.square()),
    "root": lambda x: torch.sqrt(1.0 + x * x) - torch.abs(x),
    "inverse_root": lambda x: x * torch.rsqrt(1.0 + x * x),
    "softsign": functional.softsign,
    "floor": lambda x: torch.clamp(x, min=-2.0) * 0.5,
    "smaller": lambda gate, up: torch.minimum(gate, up) * up,
    "larger": lambda gate, up: torch.maximum(gate, up) - gate,
    "ratio": lambda gate, up: gate / (1.0 + up * up),
    "runtime_limit": _clamped,
}


def _execute(lines: list[str], env: Env) -> Env:
    namespace: dict[str, object] = {"torch": torch, **env, **RUNTIME_VALUES}
    before = set(namespace)
    exec("\n".join(lines), namespace)
    return {k: v for k, v in namespace.items() if k not in before and isinstance(v, Tensor)}


def _ours(name: str, env: Env) -> Env:
    text, operands, attributes = SHIPPED[name] if name in SHIPPED else CASES[name]
    expression = parse(text, operands, attributes)
    values = _execute(to_torch(backward_program(expression, operands)), env)
    values |= _execute(to_torch(forward_program(expression)), env)
    return {key: values[key] for key in ("y", *(f"d{o}" for o in operands))}


def _autograd(name: str, env: Env) -> Env:
    operands = CASES[name][1]
    leaves = [env[o].detach().clone().requires_grad_() for o in operands]
    y = REFERENCE[name](*leaves)
    gradients = torch.autograd.grad(y, leaves, env["dy"])
    return {"y": y.detach(), **{f"d{o}": g for o, g in zip(operands, gradients, strict=True)}}


def _edges() -> Tensor:
    """Finite places where a formula or its slope is easily wrong, all clamp edges included."""
    magnitudes = [0.0, 1e-30, 1e-8, 1e-3, 0.5, 1.0, 3.0, 7.0, 20.0, 88.0, 100.0, 700.0]
    return torch.tensor([*magnitudes, *(-m for m in magnitudes)], dtype=torch.float64)


def _inputs(name: str, kind: str) -> Env:
    operands = CASES[name][1]
    rng = torch.Generator().manual_seed(len(name))
    shape = (20_000,)
    env: Env = {}
    for operand in (*operands, "dy"):
        normal = torch.randn(shape, generator=rng, dtype=torch.float64)
        if kind == "random":
            env[operand] = normal * 3.0
        elif kind == "heavy":
            env[operand] = normal / torch.randn(shape, generator=rng, dtype=torch.float64).abs()
        else:
            pick = torch.randint(0, len(_edges()), shape, generator=rng)
            env[operand] = _edges()[pick]
    # The same float32 values in every precision; ties with constants stay exact.
    return {key: value.float().double() for key, value in env.items()}


def test_every_case_has_a_reference() -> None:
    assert REFERENCE.keys() == CASES.keys()


@pytest.mark.parametrize("kind", ["random", "heavy", "edges"])
@pytest.mark.parametrize("name", CASES)
def test_float64_agrees_with_autograd(name: str, kind: str) -> None:
    env = _inputs(name, kind)
    ours, truth = _ours(name, env), _autograd(name, env)
    scale = _amplitude(name, env)
    for key, expected in truth.items():
        error = (ours[key] - expected).abs()
        assert bool((error <= 1e-12 * (expected.abs() + scale[key])).all()), (key, error.max())


def _amplitude(name: str, env: Env) -> Env:
    """What one unit of rounding is measured against: the result's factors other than its own slope.

    The slopes of activations pass through 0 where their terms do not, so an error relative to the
    result alone would be unbounded for every implementation.
    """
    operands = CASES[name][1]
    scale: Env = {}
    for key in ("y", *(f"d{o}" for o in operands)):
        others = [o for o in operands[1:] if key != f"d{o}"]
        value = torch.ones_like(env["dy"]) if key == "y" else env["dy"].abs()
        for other in others:
            value = value * (1.0 + env[other].abs())
        scale[key] = value
    return scale


@pytest.mark.parametrize("name", CASES)
def test_float32_is_as_accurate_as_torch(name: str) -> None:
    """Within a few units of rounding, and no worse than float32 autograd of the reference."""
    env = _inputs(name, "random")
    env32 = {key: value.float() for key, value in env.items()}
    truth, scale = _ours(name, env), _amplitude(name, env)
    ours, torchs = _ours(name, env32), _autograd(name, env32)
    for key, expected in truth.items():
        unit = EPS * (expected.abs() + scale[key])
        our_error = ((ours[key].double() - expected).abs() / unit).max()
        torch_error = ((torchs[key].double() - expected).abs() / unit).max()
        assert ours[key].dtype == torch.float32
        # The result of `root` is a difference of two large values.
        assert our_error <= (8.0 if key == "y" else 5.0), (key, float(our_error))
        assert our_error <= torch_error + 1.5, (key, float(our_error), float(torch_error))


# Gradients that saturate and cancel nowhere; `root` and the like cancel as they are written.
SATURATING = {
    **{name: CASES[name] for name in (*ACTIVATIONS, "gelu_erf", "mish")},
    **SHIPPED,
}
SATURATED_ERROR = 2.0**-16


def _saturating_inputs(name: str, operand: str, other: float) -> Env:
    """One operand on a dense grid that reaches far past saturation, the others at one value."""
    positive = torch.cat(
        (
            torch.linspace(0.0, 130.0, 13_001, dtype=torch.float64),
            torch.logspace(2.0, 5.0, 1_500, dtype=torch.float64),
        )
    )
    grid = torch.cat((-positive, positive)).float().double()
    env = {key: torch.full_like(grid, other) for key in (*SATURATING[name][1], "dy")}
    return {**env, operand: grid}


@pytest.mark.parametrize("other", [0.75, -1.5])
@pytest.mark.parametrize("name", SATURATING)
def test_saturated_gradients_are_as_accurate_as_others(name: str, other: float) -> None:
    """Relative to the gradient itself, to 2^-16: a 32nd of the rounding to fp16 that follows.

    From 4 on no slope passes through 0, so its own size is the measure. What is left of the error
    is that of the argument of an exponential, which grows with it.
    """
    for operand in SATURATING[name][1]:
        env = _saturating_inputs(name, operand, other)
        truth, ours = _ours(name, env), _ours(name, {k: v.float() for k, v in env.items()})
        saturated = env[operand].abs() >= 4.0
        for key in (f"d{o}" for o in SATURATING[name][1]):
            want = truth[key]
            error = (ours[key].double() - want).abs()
            bound = SATURATED_ERROR * torch.where(saturated, want.abs(), want.abs() + 1.0)
            # Near the end of the range a term's factors are subnormal before the term is.
            assert bool((error <= bound + 1e-35).all()), (key, operand)


_MP_FUNCTIONS: dict[str, Callable[..., mpmath.mpf]] = {
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "tanh": mpmath.tanh,
    "erf": mpmath.erf,
    "softplus": lambda x: mpmath.log1p(mpmath.exp(x)),
    "relu": lambda x: max(x, mpmath.mpf(0)),
    "square": lambda x: x * x,
    "minimum": min,
    "clamp": lambda x, low, high: min(max(x, low), high),
}


@pytest.mark.parametrize("name", SATURATING)
def test_float64_gradients_are_those_of_the_formula(name: str) -> None:
    """Against differences of 500 digits, where autograd in float64 has cancelled to 0."""
    text, operands, attributes = SATURATING[name]
    code = compile(text, name, "eval")
    with mpmath.workdps(500):
        for operand in operands:
            for place in (-80.0, -45.0, -17.0, -6.5, -0.3, 0.4, 4.5, 17.0, 45.0, 80.0):
                point = {**dict.fromkeys(operands, 0.75), operand: place}
                env = {
                    key: torch.tensor([value], dtype=torch.float64) for key, value in point.items()
                }
                ours = _ours(name, {**env, "dy": torch.ones(1).double()})
                for wrt in operands:

                    def value(x: mpmath.mpf, wrt: str = wrt, point: Point = point) -> mpmath.mpf:
                        values = {**attributes, **point, wrt: x}
                        return eval(code, {**_MP_FUNCTIONS, **values})

                    want = float(mpmath.diff(value, mpmath.mpf(point[wrt])))
                    got = ours[f"d{wrt}"].item()
                    assert got == pytest.approx(want, rel=1e-12, abs=1e-290), (wrt, operand, place)


@pytest.mark.parametrize(
    ("name", "operand", "dtype"),
    [
        ("glu", "gate", torch.float16),
        ("situglu", "gate", torch.float16),
        ("situglu", "up", torch.bfloat16),
        ("scaled_tanh_srelu", "x", torch.bfloat16),
    ],
)
def test_no_gradient_is_lost_that_16_bits_hold(name: str, operand: str, dtype: torch.dtype) -> None:
    env = _saturating_inputs(name, operand, 0.75)
    truth, ours = _ours(name, env), _ours(name, {k: v.float() for k, v in env.items()})
    held = truth[f"d{operand}"].to(dtype)
    assert bool((held != 0).any())
    assert bool((ours[f"d{operand}"].to(dtype) != 0)[held.abs() > torch.finfo(dtype).tiny].all())


def _limit(name: str, env: Env, operand: str, sign: float) -> Env:
    """Float64 limits as one operand goes to infinity; NaN where there is none that is finite."""
    near = _autograd(name, {**env, operand: torch.full_like(env["dy"], sign * 1e12)})
    far = _autograd(name, {**env, operand: torch.full_like(env["dy"], sign * 1e14)})
    settled = {k: (near[k] - far[k]).abs() <= 1e-6 for k in far}
    if operand != CASES[name][1][0]:
        # An exact 0 of relu times this operand's infinity: NaN by IEEE, in PyTorch as here.
        settled = {k: settled[k] & (far[k] != 0.0) for k in far}
    return {k: torch.where(settled[k], far[k], math.nan) for k in far}


@pytest.mark.parametrize(
    "edge", [math.inf, FLOAT32_MAX, BFLOAT16_MAX, 1e30, 100.0, 20.0, 1e-30, 0.0]
)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_float32_is_finite_where_the_limit_is(name: str, edge: float) -> None:
    """One operand at a time goes to the edge, either sign, the others taking ordinary values."""
    operands = CASES[name][1]
    ordinary = torch.tensor([-2.0, -0.5, 0.25, 1.5], dtype=torch.float64)
    grid = torch.cartesian_prod(*[ordinary] * (len(operands) + 1)).unbind(-1)
    base = dict(zip((*operands, "dy"), grid, strict=True))
    for operand in operands:
        for sign in (1.0, -1.0):
            env = {**base, operand: torch.full_like(base["dy"], sign * edge)}
            ours = _ours(name, {key: value.float() for key, value in env.items()})
            infinite = math.isinf(edge)
            truth = _limit(name, base, operand, sign) if infinite else _autograd(name, env)
            for key, expected in truth.items():
                # Below the range's last six bits no product of the ordinary values overflows.
                finite = expected.isfinite() & (expected.abs() <= FLOAT32_MAX / 64)
                got, want = ours[key].double()[finite], expected[finite]
                close = (got - want).abs() <= 1e-5 * (1.0 + want.abs())
                assert bool(close.all()), (key, operand, sign * edge)


@pytest.mark.parametrize("name", ["silu", "gelu", "qgelu", "gelu_erf", "mish", "srelu"])
def test_infinite_inputs(name: str) -> None:
    """Both ends of a one-operand activation: 0 and infinity, slopes 0 and 1 (2x for srelu)."""
    x = torch.tensor([-math.inf, math.inf])
    got = _ours(name, {"x": x, "dy": torch.ones(2)})
    assert got["y"].tolist() == [0.0, math.inf]
    assert got["dx"].tolist() == [0.0, math.inf if name == "srelu" else 1.0]


@pytest.mark.parametrize("name", ["silu", "mish"])
def test_a_limit_is_taken_where_torch_has_nan(name: str) -> None:
    env = {"x": torch.tensor([-math.inf]), "dy": torch.ones(1)}
    assert all(value.isnan().all() for value in _autograd(name, env).values())
    assert {key: value.tolist() for key, value in _ours(name, env).items()} == {
        "y": [0.0],
        "dx": [0.0],
    }


@pytest.mark.parametrize("name", CASES)
def test_nan_stays_visible(name: str) -> None:
    operands = CASES[name][1]
    for operand in operands:
        env = {o: torch.ones(1) for o in (*operands, "dy")}
        env[operand] = torch.full((1,), math.nan)
        assert _ours(name, env)["y"].isnan().all(), operand


def test_masked_gradients_ignore_infinite_factors() -> None:
    env = {"gate": torch.tensor([-1.0]), "up": torch.tensor([math.inf]), "dy": torch.ones(1)}
    assert _ours("reglu", env)["dgate"].item() == 0.0
    assert _autograd("reglu", env)["dgate"].item() == 0.0


@pytest.mark.parametrize("name", CASES)
def test_recomputed_forward_is_bit_equal(name: str) -> None:
    text, operands, attributes = CASES[name]
    env = {key: value.float() for key, value in _inputs(name, "random").items()}
    program = backward_program(parse(text, operands, attributes), operands, recompute="y")
    assert torch.equal(_execute(to_torch(program), env)["y"], _ours(name, env)["y"])


def test_broadcast_scales() -> None:
    """One scale per row: its gradient stays elementwise, for the caller to sum."""
    env = {name: torch.randn(3, 5) for name in ("gate", "up", "dy")} | {"scales": torch.randn(3, 1)}
    got = _ours("scaled_swiglu", env)
    assert got.keys() == {"y", "dgate", "dup", "dscales"}
    assert all(value.shape == (3, 5) for value in got.values())
    truth = _autograd("scaled_swiglu", env)
    torch.testing.assert_close(got["dscales"].sum(1, keepdim=True), truth["dscales"])
