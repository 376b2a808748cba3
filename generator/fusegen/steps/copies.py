"""Quantised copies of a tensor as steps store them: what ``reference/_quantize.py`` lays out.

Rowwise data has the tensor's shape with its rows padded to the pitch, and so has columnwise data
but where the architecture's MMA reads one major only.  There it is transposed, and rows in groups
start at multiples of the alignment, in the padded token space ``a * (T // a + E)``.  Scales are in
logical order, but for those of tokens where the layout says so, and for those that lie in atoms of
128 rows by 4 blocks: ``[rows / 128, blocks / 4, 32, 4, 4]``, the rows of a columnwise copy being
the tensor's columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..ir import dtypes
from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.kernel import ATOM_BLOCKS, ATOM_ROWS, LayoutSpec
from ..ir.quantization import Extent, Orientation, QuantizationSpec, Role, Rounding
from ..ir.shapes import Const, Expr, Shape, add, align, ceildiv, floordiv, mul, product
from ..ir.step import Copy, Operand

AMAX_PARTIALS = Const(384)
"""Partial amaxes of a group, at most: ``kAmaxPartials`` of quantize.h."""
_ROWS = 16
"""Dense tokens are rounded up to them: every columnwise copy has codes and scales of so many."""


@dataclass(frozen=True, slots=True)
class Formats:
    """How copies are stored: by the recipe, and as the architecture lays them out."""

    roles: Mapping[Role, QuantizationSpec]
    layout: LayoutSpec


@dataclass(frozen=True, slots=True)
class Stored:
    """A result as it is stored; the type is None where whoever reads it decides."""

    dtype: DType | None
    shape: Shape

    @property
    def typed(self) -> DType:
        """The type, of what has one whoever reads it."""
        assert self.dtype is not None, self
        return self.dtype


Results = Mapping[str, Stored]
"""Results by slot."""


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

    @classmethod
    def of_copy(cls, copy: Copy, buffers: Mapping[str, Buffer]) -> Original:
        """What a copy is of."""
        groups = buffers[copy.groups].shape.dims[0] if copy.groups else None
        return cls.of(buffers[copy.original].shape, copy.role, groups)

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

    def padded_rows(self, layout: LayoutSpec) -> Expr:
        """Length of the padded token space; rows without groups are one group."""
        groups = self.groups if self.groups is not None else Const(1)
        starts = add(floordiv(self.rows, layout.token_alignment), groups)
        return mul(Const(layout.token_alignment), starts)


def serves_both(spec: QuantizationSpec, layout: LayoutSpec) -> bool:
    """Whether a rowwise copy is the columnwise one, too.

    Blocks that are as high as wide are the same blocks in either orientation, and so are codes that
    lie as the tensor does.  In atoms the scales of the two would follow each other otherwise.
    """
    rows, columns = spec.block
    alike = rows == columns and spec.hadamard is None and spec.rounding is Rounding.NEAREST
    return alike and not layout.scale_atoms and not layout.transposes(spec.format)


def copy_slots(slot: str, copy: Copy) -> list[Operand]:
    """Data, scale and, where there is one, amax of a copy as operands."""
    names = (slot, f"{slot}_scale", f"{slot}_amax")
    return [Operand(name, buffer) for name, buffer in zip(names, copy.buffers, strict=False)]


def stored_copy(
    tensor: Original, role: Role, orientation: Orientation, formats: Formats
) -> tuple[Stored, ...]:
    """Data, scale and, where the format keeps it, amax of a copy."""
    spec, layout = formats.roles[role], formats.layout
    data = Stored(spec.format, _data_shape(tensor, orientation, spec.format, layout))
    scales = _scale_shape(tensor, orientation, spec)
    if layout.scale_atoms:
        scales = _atoms_shape(tensor, orientation, spec)
    elif layout.token_major and spec.along_tokens(role, orientation):
        scales = Shape(None, (scales.dims[1], tensor.padded_rows(layout)))
    scale = Stored(spec.scale.dtype, scales)
    if spec.tensor_scale is None:
        return data, scale
    return data, scale, Stored(DType.FLOAT32, Shape(None, (tensor.parts,)))


def stored_amaxes(
    tensor: Original, copies: tuple[Copy, ...], spec: QuantizationSpec
) -> Iterator[tuple[str, Stored]]:
    """(slot, amaxes) that kernels need before they can quantise.

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
    for slot, dims in shapes.items():
        yield slot, Stored(DType.FLOAT32, Shape(None, dims))


def decoded_rows(tensor: Original, copy: Copy, layout: LayoutSpec) -> Expr:
    """Rows of a matrix that a copy is decoded to: all that transposed tokens have codes of."""
    as_they_are = copy.orientation is Orientation.ROWWISE or copy.untransposed
    if as_they_are or copy.role is Role.WEIGHT:
        return tensor.rows
    return tensor.padded_rows(layout) if copy.groups else align(tensor.rows, _ROWS)


def _pitched(elements: Expr, format: DType, layout: LayoutSpec) -> Expr:
    """Stored length of a run of codes, in elements of the torch dtype (two E2M1 codes a byte)."""
    per_byte = 8 // dtypes.bits(format)
    padded = align(elements, layout.pitch * per_byte)
    return floordiv(padded, per_byte) if per_byte > 1 else padded


def _data_shape(
    tensor: Original, orientation: Orientation, format: DType, layout: LayoutSpec
) -> Shape:
    if orientation is Orientation.ROWWISE or not layout.transposes(format):
        return Shape(None, (*tensor.stack, tensor.rows, _pitched(tensor.columns, format, layout)))
    length = tensor.rows if tensor.groups is None else tensor.padded_rows(layout)
    return Shape(None, (*tensor.stack, tensor.columns, _pitched(length, format, layout)))


def _scale_shape(tensor: Original, orientation: Orientation, spec: QuantizationSpec) -> Shape:
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


def _atoms_shape(tensor: Original, orientation: Orientation, spec: QuantizationSpec) -> Shape:
    """Atoms of all rows, and of all blocks along each; groups of rows begin one of their own."""
    depth = ATOM_BLOCKS * spec.shares.atom_block
    row_atoms, along = ceildiv(tensor.rows, ATOM_ROWS), ceildiv(tensor.rows, depth)
    if tensor.groups is not None:
        row_atoms = add(floordiv(tensor.rows, ATOM_ROWS), tensor.groups)
        along = mul(Const(ATOM_ROWS // depth), row_atoms)
    places = (row_atoms, ceildiv(tensor.columns, depth))
    if orientation is Orientation.COLUMNWISE:
        places = (ceildiv(tensor.columns, ATOM_ROWS), along)
    inner = (ATOM_ROWS // ATOM_BLOCKS, ATOM_BLOCKS, ATOM_BLOCKS)
    return Shape(None, (*tensor.stack, *places, *map(Const, inner)))
