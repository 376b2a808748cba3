"""Chains drawn at random out of shipped ops, valid by construction."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random

SPECS = Path(__file__).parent / "chains" / "specs"
"""Ops and modules of chains that are not shipped."""

_SAME_WIDTH = ("silu", "gelu", "relu", "srelu", "residual", "soft_sign")
_AROUND = ("add_extra_input", "constant_scale", "identity", "make_extra_output")
"""What stands around GEMMs and activations."""
_AROUND_DENSE = (*_AROUND, "bias", "reshape")
_OF_ROWS = ("rms_norm", "layer_norm", "l2_normalization", "softmax", "dropout")
"""What reads whole rows, or numbers of its own for each element."""
_ADDED = {"residual": "residual", "add_extra_input": "extra"}
"""Ops that add a tensor of the chain, and what they call it."""
_HALF_WIDTH = ("swiglu", "geglu")
_PARTS = ("q", "k", "v")
"""What packed rows are parted into, of which two parts are rotated."""
_SCALED = {"H": "scaled_srelu", "2 * H": "scaled_swiglu"}
_DRAWN = "{shape: [2], dtype: int64, drawn: true}"


@dataclass
class _Chain:
    """What is drawn so far.

    Attributes:
        rng: what decides.
        grouped: whether linear layers are of groups.
        leading: whether there are several leading dimensions, which ops with scales do not have.
        widths: of every tensor, by its name.
        read: names of tensors that an op reads.
        items: of the chain, as YAML.
    """

    rng: Random
    grouped: bool
    leading: bool
    widths: dict[str, str] = field(default_factory=lambda: {"x": "H"})
    read: set[str] = field(default_factory=set)
    items: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)

    def add(self) -> None:
        """One more op, which reads any tensors that are there."""
        number = len(self.items)
        read = "x" if not number else self.rng.choice([*self.widths])
        width = self.widths[read]
        words = {"x": read}
        op, result, dims = self._op(width)
        if op in _ADDED:
            words[_ADDED[op]] = self.rng.choice([n for n, w in self.widths.items() if w == width])
        if op in _SCALED.values():
            words["scales"] = "probs"
        if op == "dropout":
            self.drawn.append("random" if not self.drawn else f"random{number}")
            words["random"] = self.drawn[-1]  # two of one state would drop the same elements
        self.read |= {*words.values()}
        out = f"t{number}"
        self.widths[out] = result
        if op == "reshape":
            self._cut(out, read, width)
            return
        if op == "rotary_qkv":
            self._part(out, read, width)
            return
        if op == "make_extra_output":
            self.widths[f"{out}e"] = result
            out = f"{{y: {out}, extra: {out}e}}"
        with_ = ", ".join(f"{name}: {tensor}" for name, tensor in words.items())
        self.items.append(
            f"  - {{op: {op}, as: o{number}, out: {out}, with: {{{with_}}}, dims: {{{dims}}}}}"
        )

    def _cut(self, out: str, read: str, width: str) -> None:
        """Rows in parts and whole again; where there is one part, in one dimension more."""
        rows, parts = "T..." if self.leading else "T", width.partition(" * ")[0].replace("H", "1")
        for name, given, shape in (
            (f"{out}c", read, f"{rows}, {parts}, H"),
            (out, f"{out}c", f"{rows}, {width}"),
        ):
            self.items.append(
                f"  - {{op: reshape, as: o{name}, out: {name}, with: {{x: {given}}},"
                f" shape: [{shape}]}}"
            )

    def _part(self, out: str, read: str, width: str) -> None:
        """A linear layer of packed rows, and its parts in the place of one result."""
        del self.widths[out]
        self.widths |= {f"{out}{part}": "H" for part in _PARTS}
        parts = ", ".join(f"{part}: {out}{part}" for part in _PARTS)
        interleaved = self.rng.choice(("false", "true"))
        self.items += [
            f"  - {{op: linear, as: p{out}, out: {out}p, with: {{x: {read}}},"
            f" dims: {{K: {width}, N: 3 * H}}}}",
            f"  - {{op: rotary_qkv, as: o{out}, out: {{{parts}}}, with: {{x: {out}p}},"
            f" dims: {{V: H}}, attributes: {{interleaved: {interleaved}}}}}",
        ]

    def _op(self, width: str) -> tuple[str, str, str]:
        """An op that reads such a width first, the width of its result, and its dimensions."""
        kinds = ["linear", "linear", "same", "around"]
        kinds += [] if self.grouped else ["rows"]  # of groups, none says what rows past them are
        kinds += [] if self.grouped else ["parts"]
        kinds += ["half"] if width == "2 * H" else []
        kinds += [] if self.leading else ["scaled"]
        match self.rng.choice(kinds):
            case "linear":
                wide = self.rng.choice(["H", "2 * H"])
                return "grouped_linear" * self.grouped or "linear", wide, f"K: {width}, N: {wide}"
            case "scaled":
                return _SCALED[width], "H", "D: H"
            case "half":
                return self.rng.choice(_HALF_WIDTH), "H", "D: H"
            case "parts":
                return "rotary_qkv", "", ""
            case "around":
                around = _AROUND if self.grouped else _AROUND_DENSE
                return self.rng.choice(around), width, f"D: {width}"
            case "rows":
                return self.rng.choice(_OF_ROWS), width, f"D: {width}"
        op = self.rng.choice(_SAME_WIDTH)
        return op, width, "" if op == "silu" else f"D: {width}"

    def outputs(self) -> list[str]:
        """Every result that no op reads, and some of the others, in any order."""
        results = [name for name in self.widths if name != "x"]
        chosen = [n for n in results if n not in self.read or self.rng.random() < 0.2]
        self.rng.shuffle(chosen)
        return chosen


def draw_chain(name: str, rng: Random) -> str:
    """The spec of a module that any recipe can be asked for."""
    grouped = rng.random() < 0.4
    chain = _Chain(rng, grouped, leading=not grouped and rng.random() < 0.5)
    for _ in range(rng.randint(1, 7)):
        chain.add()
    items = "\n".join(chain.items)
    sizes, tables = "grouped_linear" in items, "rotary_qkv" in items
    rows = "T..." if chain.leading else "T"
    table = f"{{shape: [{rows}, P], dtype: float32, differentiable: false}}"
    symbols = f"T: tokens, {'E: groups, ' if sizes else ''}H: hidden{', P: pairs' * tables}"
    lines = [
        f"edition: 2\nmodule: {name}\nclass: Drawn\nsummary: drawn at random",
        f"dims: {{{symbols}}}",
        f"inputs:\n  x: {{shape: [{rows}, H], role: input}}",
        *([f"  cos: {table}\n  sin: {table}"] if tables else []),
        *(["  split_sizes: {shape: [E], dtype: int64}"] if sizes else []),
        *(["  probs: {shape: [T], dtype: float32}"] if "probs" in items else []),
        *(f"  {name}: {_DRAWN}" for name in chain.drawn),
        f"outputs: [{', '.join(chain.outputs())}]\nchain:\n{items}\n",
    ]
    return "\n".join(lines)
