"""Ops of the public function ``quantize``: a tensor by itself into a role's format.

One op per role and form of tensor, since each has shapes of its own.  Scales are in logical order:
no GEMM reads these copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.kernel_set import KernelSet
from ..ir.naming import SPLIT_SIZES
from ..ir.plan import Conversion, Form
from ..ir.program import Argument
from ..ir.quantization import AmaxSource, Orientation, QuantizationSpec, Role, Rounding
from ..ir.shapes import Const, Shape, Sym
from ..ir.step import Copy, Operand, Result, Step
from ..spec.arch import ArchSpec
from ..spec.recipe import RecipeSpec
from ..steps.copies import Original
from .copies import make_copy, quantize_step, scratch
from .draft import Draft
from .kernels import choose_kernels
from .programs import program
from .sharding import op_shardings

_T, _N, _K, _E = (Sym(symbol) for symbol in "TNKE")
_DIMS = {"T": "tokens", "N": "rows", "K": "columns", "E": "groups"}
_SHAPES = {
    Form.DENSE: Shape("T", (_K,)),
    Form.GROUPED: Shape(None, (_T, _K)),
    Form.STACK: Shape(None, (_E, _N, _K)),
}


def _forms_of(role: Role) -> tuple[Form, Form]:
    """Tokens may be in groups, weights in a stack."""
    return (Form.DENSE, Form.STACK if role is Role.WEIGHT else Form.GROUPED)


def conversions(
    recipe: RecipeSpec, arch: ArchSpec
) -> tuple[tuple[Conversion, ...], tuple[KernelSet, ...]]:
    """Every op, and the kernels they run.

    Raises:
        NotPossible: the arch has no kernels for a role.
    """
    made = [
        _Maker(recipe, arch, role, form).make() for role in recipe.roles for form in _forms_of(role)
    ]
    sets = {kernels.name: kernels for _, each in made for kernels in each}
    return tuple(conversion for conversion, _ in made), tuple(sets.values())


@dataclass(frozen=True, slots=True)
class _Maker:
    recipe: RecipeSpec
    arch: ArchSpec
    role: Role
    form: Form

    @property
    def spec(self) -> QuantizationSpec:
        return self.recipe.roles[self.role]

    def make(self) -> tuple[Conversion, tuple[KernelSet, ...]]:
        x = Buffer("x", DType.IO, _SHAPES[self.form], self.role)
        groups = Buffer(SPLIT_SIZES, DType.INT64, Shape(None, (_E,)))
        grouped = self.form is Form.GROUPED
        layout = replace(self.arch.layout, token_major=False, scale_atoms=())
        arch = replace(self.arch, layout=layout)
        buffers = {x.name: x} | ({groups.name: groups} if grouped else {})
        copies = []
        for orientation in Orientation:
            copy, parts = make_copy(
                x, self.role, orientation, self.spec, layout, groups if grouped else None
            )
            copies.append(copy)
            buffers |= {buffer.name: buffer for buffer in parts}
        tensor = Original.of(x.shape, self.role, _E if grouped else None)
        needed = dict(self._needed(tensor, tuple(copies)))
        kept = dict(self._kept(tensor))
        buffers |= {buffer.name: buffer for buffer in (*needed.values(), *kept.values())}
        step = quantize_step(
            tensor,
            tuple(copies),
            tuple(Operand(slot, buffer.name) for slot, buffer in kept.items()),
            tuple(needed.items()),
        )
        amax = needed["amax"].name if "amax" in needed else None
        arguments = (
            Argument(x.name, optional=False),
            *([Argument(groups.name, optional=False)] if grouped else []),
            *(Argument(b.name, False, mutated=slot == "rng_state") for slot, b in kept.items()),
        )
        return self._program(arch, buffers, step, arguments, amax)

    def _needed(self, tensor: Original, copies: tuple[Copy, ...]) -> Iterator[tuple[str, Buffer]]:
        """Amaxes: of the tensor or group as a result, others for kernels alone."""
        for slot, buffer in scratch(tensor, copies, self.spec):
            if slot == "amax" or self.arch.has_kernels:
                yield slot, buffer

    def _kept(self, tensor: Original) -> Iterator[tuple[str, Buffer]]:
        """What the caller keeps: a scale from a history, random numbers."""
        if self.spec.scale.source is AmaxSource.HISTORY:
            yield "scale", Buffer("scale", DType.FLOAT32, Shape(None, (tensor.parts,)))
        if self.spec.rounding is Rounding.STOCHASTIC:
            yield "rng_state", Buffer("rng_state", DType.INT64, Shape(None, (Const(2),)))

    def _program(
        self,
        arch: ArchSpec,
        buffers: Mapping[str, Buffer],
        step: Step,
        arguments: tuple[Argument, ...],
        amax: str | None,
    ) -> tuple[Conversion, tuple[KernelSet, ...]]:
        results = tuple(
            Result(name, (copy.orientation.value,)) for copy in step.copies for name in copy.buffers
        )
        step = replace(
            step,
            output_when=results,
            mutates=tuple(argument.buffer for argument in arguments if argument.mutated),
        )
        draft = Draft((), buffers, ("x",), (), (), (), forward=(step,))
        draft, kernel_sets = choose_kernels(draft, arch, self.recipe)
        printed = program(
            f"{self.role.value}_{self.form.value}",
            draft,
            draft.forward,
            arguments,
            tuple(orientation.value for orientation in Orientation),
            (*results, *([Result(amax)] if amax else [])),
            _DIMS,
        )
        conversion = Conversion(
            self.role,
            self.form,
            arch.layout,
            tuple(draft.buffers.values()),
            step.copies,
            amax,
            printed,
            op_shardings(draft.buffers, printed, self.recipe.roles),
        )
        return conversion, kernel_sets
