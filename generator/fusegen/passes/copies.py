"""Quantised copies of a tensor: their buffers, as ``reference/_quantize.py`` lays them out.

Rowwise data has the tensor's shape with its rows padded to the pitch; columnwise data is transposed
where the architecture's MMA reads one major only, and rows in groups then start at multiples of the
alignment, in the padded token space ``a * (T // a + E)``.  Scales are in logical order.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import dtypes
from ..ir.dtypes import DType
from ..ir.kernel import LayoutSpec
from ..ir.plan import Buffer, Copy, Operand, Step
from ..ir.quantization import Extent, Orientation, QuantizationSpec, Role
from ..ir.shapes import Const, Expr, Shape, add, align, ceildiv, floordiv, mul, product
from ..steps.quantize import QUANTIZE
from .draft import NotPossible

AMAX_PARTIALS = Const(384)
"""Partial amaxes of a group, at most: ``kAmaxPartials`` of quantize.h."""


@dataclass(frozen=True, slots=True)
class Original:
    """A tensor to be quantised: matrices of rows by columns, or rows in groups.

    Attributes:
        matrices: number of matrices of a stack; None for one.
        rows, columns: of a matrix.
        groups: number of groups that the rows are in; None where they are not.
    """

    matrices: Expr | None
    rows: Expr
    columns: Expr
    groups: Expr | None

    @classmethod
    def of(cls, shape: Shape, role: Role, groups: Expr | None) -> Original:
        """A weight ``[E, N, K]`` is a stack; everything else is rows of its last dimension."""
        flat = shape.flat
        if role is Role.WEIGHT and len(flat) == 3:
            return cls(flat[0], flat[1], flat[2], None)
        return cls(None, product(flat[:-1]), flat[-1], groups if role is not Role.WEIGHT else None)

    @property
    def stack(self) -> tuple[Expr, ...]:
        """Leading dimensions of its copies."""
        return (self.matrices,) if self.matrices is not None else ()

    @property
    def parts(self) -> Expr:
        """How many groups or matrices have amaxes and scales of their own."""
        return self.groups or self.matrices or Const(1)

    def row_blocks(self, block: int) -> Expr:
        """How many blocks of rows: each group starts its own."""
        if block == 1:
            return self.rows
        if self.groups is None:
            return ceildiv(self.rows, block)
        return add(floordiv(self.rows, block), self.groups)


def make_copy(
    source: Buffer,
    role: Role,
    orientation: Orientation,
    spec: QuantizationSpec,
    layout: LayoutSpec,
    groups: Buffer | None,
) -> tuple[Copy, tuple[Buffer, ...]]:
    """The buffers of one copy, named after their source.

    Raises:
        NotPossible: the layout has no room for such a copy.
    """
    if orientation is Orientation.COLUMNWISE:
        _check_layout(spec, layout)
    name = f"{source.name}_{orientation.value}"
    grouped = groups if role is not Role.WEIGHT else None
    tensor = Original.of(source.shape, role, grouped.shape.dims[0] if grouped else None)
    data = Buffer(name, spec.format, _data_shape(tensor, orientation, spec.format, layout))
    scales = scale_shape(tensor, orientation, spec)
    if layout.token_major and spec.along_tokens(role, orientation):
        scales = Shape(None, (scales.dims[1], padded_tokens(tensor, layout)))
    scale = Buffer(f"{name}_scale", spec.scale.dtype, scales)
    buffers = [data, scale]
    if spec.tensor_scale is not None:
        buffers.append(Buffer(f"{name}_amax", DType.FLOAT32, Shape(None, (tensor.parts,))))
    names = [buffer.name for buffer in buffers]
    copy = Copy(
        source.name,
        role,
        orientation,
        data=names[0],
        scale=names[1],
        amax=names[2] if len(names) > 2 else None,
        groups=grouped.name if grouped else None,
    )
    return copy, tuple(buffers)


def _check_layout(spec: QuantizationSpec, layout: LayoutSpec) -> None:
    if not layout.transposed and (spec.format is DType.E2M1 or spec.hadamard):
        raise NotPossible("columnwise copies of e2m1, and transformed ones, are transposed alone")
    if spec.hadamard and layout.token_alignment % spec.hadamard.size:
        raise NotPossible(
            f"a transform needs a token_alignment of a multiple of {spec.hadamard.size}, got"
            f" {layout.token_alignment}"
        )


def padded_tokens(tensor: Original, layout: LayoutSpec) -> Expr:
    """Length of the padded token space; rows without groups are one group."""
    groups = tensor.groups if tensor.groups is not None else Const(1)
    starts = add(floordiv(tensor.rows, layout.token_alignment), groups)
    return mul(Const(layout.token_alignment), starts)


def scratch(
    tensor: Original, copies: tuple[Copy, ...], spec: QuantizationSpec
) -> tuple[tuple[str, Buffer], ...]:
    """(slot, buffer) of the amaxes that kernels need before they can quantise.

    Those of a group come as partial amaxes of blocks of threads: of the tensor, and of each copy
    where those have amaxes of their own.
    """
    rows = product((*tensor.stack, tensor.rows))
    shapes: dict[str, tuple[Expr, ...]] = {}
    if spec.tensor_scale is not None:
        shapes["partial_amax"] = (Const(len(copies)), tensor.parts, AMAX_PARTIALS)
    elif spec.scaling == "tensor":
        shapes["amax"] = (tensor.parts,)
        if spec.amax_pass:
            shapes["partial_amax"] = (tensor.parts, AMAX_PARTIALS)
    elif spec.scaling == "row":
        made = {copy.orientation for copy in copies}
        shapes |= {"row_amax": (rows,)} if Orientation.ROWWISE in made else {}
        columnwise = Orientation.COLUMNWISE in made
        shapes |= {"column_amax": (tensor.parts, tensor.columns)} if columnwise else {}
    return tuple(
        (slot, Buffer(f"{copies[0].source}_{slot}", DType.FLOAT32, Shape(None, dims)))
        for slot, dims in shapes.items()
    )


def copy_slots(slot: str, copy: Copy) -> list[Operand]:
    """Data, scale and, where there is one, amax of a copy as operands."""
    names = (slot, f"{slot}_scale", f"{slot}_amax")
    return [Operand(name, buffer) for name, buffer in zip(names, copy.buffers, strict=False)]


def quantize_step(
    tensor: Original,
    copies: tuple[Copy, ...],
    kept: tuple[Operand, ...],
    needed: tuple[tuple[str, Buffer], ...],
) -> Step:
    """The step that makes all copies of a tensor.

    Args:
        tensor: the tensor.
        copies: of it.
        kept: operands that outlive the step: scales from a history, random numbers.
        needed: amaxes by slot, as ``scratch`` says.
    """
    groups = copies[0].groups
    return Step(
        primitive=QUANTIZE.name,
        kind=None,
        item="",
        inputs=(
            Operand("a", copies[0].source),
            *([Operand("groups", groups)] if groups else []),
            *kept,
        ),
        outputs=(
            *(operand for copy in copies for operand in copy_slots(copy.orientation.value, copy)),
            *(Operand(slot, buffer.name) for slot, buffer in needed),
        ),
        sizes=(("rows", tensor.rows), ("columns", tensor.columns), ("groups", tensor.parts)),
        copies=copies,
    )


def _pitched(elements: Expr, format: DType, layout: LayoutSpec) -> Expr:
    """Stored length of a run of codes, in elements of the torch dtype (two E2M1 codes a byte)."""
    per_byte = 8 // dtypes.bits(format)
    padded = align(elements, layout.pitch * per_byte)
    return floordiv(padded, per_byte) if per_byte > 1 else padded


def _data_shape(
    tensor: Original, orientation: Orientation, format: DType, layout: LayoutSpec
) -> Shape:
    if orientation is Orientation.ROWWISE or not layout.transposed:
        return Shape(None, (*tensor.stack, tensor.rows, _pitched(tensor.columns, format, layout)))
    length = tensor.rows if tensor.groups is None else padded_tokens(tensor, layout)
    return Shape(None, (*tensor.stack, tensor.columns, _pitched(length, format, layout)))


def scale_shape(tensor: Original, orientation: Orientation, spec: QuantizationSpec) -> Shape:
    """Logical order, row block first; an extent that spans everything has no dimension."""
    rows, columns = spec.block if orientation is Orientation.ROWWISE else spec.block[::-1]
    dims: list[Expr] = [*tensor.stack]
    if rows is Extent.ALL:
        dims += [tensor.groups] if tensor.groups is not None else []
    else:
        dims.append(tensor.row_blocks(rows))
    if columns is not Extent.ALL:
        dims.append(ceildiv(tensor.columns, columns))
    return Shape(None, tuple(dims) or (Const(1),))
