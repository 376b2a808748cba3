"""Contexts of dispatch headers, kernel units and the list of sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...families.family import ATOMS, UNTRANSPOSED
from ...families.registry import enumerator, known_family
from ...ir import dtypes
from ...ir.dtypes import DType
from ...ir.kernel import Store
from ...ir.kernel_set import Candidate, EpilogueMath, KernelSet, KernelUnit, SelectionRule, Variant
from ...ir.quantization import Accumulation, Extent, ScaleRule, Scaling
from ...ir.step import Access, Pointwise, PointwiseOperand
from ...steps.gathered_gemm import gathered_slot
from ..text.escape import comment

_ACCESS = {
    Access.FULL: "full",
    Access.FIRST_HALF: "first_half",
    Access.SECOND_HALF: "second_half",
    Access.FIRST_OF_32: "first_of_32",
    Access.SECOND_OF_32: "second_of_32",
    Access.ROW: "row",
    Access.COLUMN: "column",
}


_ACCUMULATIONS = tuple(each.value for each in Accumulation)


@dataclass(frozen=True, slots=True)
class DispatchCall:
    """Kernels of one configuration, by element type."""

    bfloat16: str
    float16: str


@dataclass(frozen=True, slots=True)
class DispatchRule:
    """A rule of a dispatch header: condition source, what it may call, and their estimates.

    Attributes:
        calls: one, or as many as there are estimates.
        times: C++ initialisers of ``fusegen::WaveTime``; empty where there is one call.
        last: whether it has no condition.
    """

    condition: str
    calls: tuple[DispatchCall, ...]
    times: tuple[str, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class DispatchContext:
    """Everything a dispatch header states.

    Attributes:
        template: of the family, or of all that are known.
        header: that declares the arguments; of a family that is known, as the next two.
        arguments: their struct.
        summary: what the kernels do.
        asks_memory: whether a rule asks what shared memory a CTA may have on the device.
        estimates: whether a rule compares estimates of times.
    """

    template: str
    header: str
    arguments: str
    summary: str
    namespace: str
    name: str
    kind: str
    kernels: tuple[str, ...]
    variables: tuple[str, ...]
    asks_memory: bool
    estimates: bool
    rules: tuple[DispatchRule, ...]


@dataclass(frozen=True, slots=True)
class KernelOperand:
    """An operand or result of a pointwise kernel: its place, symbol, access and type."""

    index: int
    symbol: str
    access: str
    wide: str


@dataclass(frozen=True, slots=True)
class ExpressionText:
    """An expression that a unit has device code of.

    Attributes:
        name: of its struct.
        formula: for people.
        body: statements from operands to results.
        of: indices of the operands that are a GEMM's result: one, or both halves of its rows.
        first_scalar: how many scalars the expressions before it have.
    """

    name: str
    formula: str
    operands: tuple[KernelOperand, ...]
    results: tuple[KernelOperand, ...]
    scalars: tuple[str, ...]
    body: tuple[str, ...]
    of: tuple[int, ...] = ()
    first_scalar: int = 0

    @property
    def gated(self) -> bool:
        """Whether both halves of a row are its operands."""
        return len(self.of) > 1


@dataclass(frozen=True, slots=True)
class QuantizedText:
    """C++ names of what a kernel of quantised tensors is instantiated for.

    Attributes:
        format: of a kernel that encodes or decodes.
        scaling: of one, ``Scaling`` of quantize/config.cuh; ``Unscaled`` of codes as they are.
        stochastic, hadamard: of a quantise kernel, ``true`` or ``false``.
        columnwise: whether a kernel reads a columnwise copy.
        transposed: whether a kernel that decodes transposes matrices.
        by_group: whether blocks of lines begin with their groups.
        untransposed: whether columnwise copies that a kernel writes or reads lie as rows.
        atoms: the last argument of a kernel whose scales lie in atoms; empty of another.
        a, b: element types of a GEMM's operands.
        gemm_scaling: scales of a GEMM.
        accumulation: of a GEMM.
    """

    format: str = ""
    scaling: str = ""
    stochastic: str = ""
    hadamard: str = ""
    columnwise: str = ""
    transposed: str = ""
    by_group: str = ""
    untransposed: bool = False
    atoms: str = ""
    a: str = ""
    b: str = ""
    gemm_scaling: str = ""
    accumulation: str = ""


@dataclass(frozen=True, slots=True)
class KernelFunction:
    """A function of a kernel unit: its name and the element type it is instantiated for."""

    name: str
    element: str


@dataclass(frozen=True, slots=True)
class UnitContext:
    """Everything a kernel unit states.

    Attributes:
        template: of the family, or of those whose kernels need no more than an element type.
        family: its name.
        device: header of device code of a family that has no template of its own.
        arguments: struct of a known family's launch.
        ends: scales that a GEMM of decoded operands multiplies its result by, for each of them.
        gather: the operand of a GEMM whose rows are gathered, ``a`` or ``b``; empty for none.
        cost: operations per element of a pointwise kernel.
        expressions: of a pointwise kernel, or those that the result of a GEMM goes through.
    """

    template: str
    family: str
    device: str
    arguments: str
    namespace: str
    kernels: tuple[KernelFunction, ...]
    kind: str
    config: str
    constants: tuple[tuple[str, int], ...]
    store: str
    ends: tuple[str, ...]
    gather: str
    cost: int
    expressions: tuple[ExpressionText, ...]
    grouped: bool
    quantized: QuantizedText


@dataclass(frozen=True, slots=True)
class CellSources:
    """A cell in ``sources.cmake``: its digest, and the units it is compiled from."""

    name: str
    digest: str
    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SourcesContext:
    """Everything ``sources.cmake`` states."""

    namespace: str
    gencode: str
    cells: tuple[CellSources, ...]


def dispatch_context(kernels: KernelSet, namespace: str) -> DispatchContext:
    """What ``csrc/dispatch/<set>.h`` states."""
    variables = sorted(
        {c.variable.value for rule in kernels.rules for c in rule.predicate.conditions}
    )
    last = len(kernels.rules) - 1
    known = known_family(kernels.template)
    kind = kernels.kind.value if kernels.kind else ""
    return DispatchContext(
        template=f"csrc/{'family' if known else kernels.template}.h.j2",
        header=known.launch.header if known else "",
        arguments=known.launch.arguments if known else "",
        summary=known.summary.format(kind=kind) if known else "",
        namespace=namespace,
        name=kernels.name,
        kind=kind,
        kernels=tuple(kernel.name for kernel in kernels.kernels),
        variables=tuple(variables),
        asks_memory=any(rule.shared_bytes for rule in kernels.rules),
        estimates=any(len(rule.candidates) > 1 for rule in kernels.rules),
        rules=tuple(_rule(rule, i == last) for i, rule in enumerate(kernels.rules)),
    )


def _rule(rule: SelectionRule, last: bool) -> DispatchRule:
    return DispatchRule(
        condition=_condition(rule),
        calls=tuple(_call(each) for each in rule.candidates),
        times=tuple(_time(each) for each in rule.candidates if each.time),
        last=last,
    )


def _call(candidate: Candidate) -> DispatchCall:
    names = dict(candidate.kernels)
    return DispatchCall(bfloat16=names[DType.BFLOAT16], float16=names[DType.FLOAT16])


def _time(candidate: Candidate) -> str:
    work, time = candidate.work, candidate.time
    assert work and time
    numbers = (work.rows, work.columns, work.sms, work.clusters, time.launch, time.wave, time.k)
    return f"{{{', '.join(map(str, numbers))}}}"


def _condition(rule: SelectionRule) -> str:
    """C++ of the sizes, and of the device's memory last: it is asked for where it matters."""
    if not rule.shared_bytes:
        return rule.predicate.to_cpp()
    memory = f"fusegen::cta_shared_memory() >= {rule.shared_bytes}"
    return f"{rule.predicate.to_cpp()} && {memory}" if rule.predicate.conditions else memory


def unit_context(unit: KernelUnit, namespace: str) -> UnitContext:
    """What ``csrc/kernels/<unit>.cu`` states."""
    math = unit.pointwise
    known = known_family(unit.template)
    device = known.device if known else ""
    return UnitContext(
        template=f"csrc/{'plain' if device else unit.template}.cu.j2",
        family=unit.template,
        device=device,
        arguments=known.launch.arguments if known else "",
        namespace=namespace,
        kernels=tuple(KernelFunction(k.name, dtypes.info(k.dtype).cuda) for k in unit.kernels),
        kind=unit.kind.value if unit.kind else "",
        config=unit.config,
        constants=unit.constants,
        store=unit.variant.store.value if unit.variant else Store.IO.value,
        ends=tuple(end.value for end in unit.variant.ends) if unit.variant else (),
        gather=gathered_slot(unit.variant.traits) if unit.variant else "",
        cost=math.cost if math else 0,
        expressions=(_expression(math, "Math"),) if math else tuple(_epilogue(unit.epilogue)),
        grouped=math.grouped if math else False,
        quantized=_quantized_text(unit.template, unit.variant),
    )


def _epilogue(maths: tuple[EpilogueMath, ...]) -> Iterator[ExpressionText]:
    """The expressions of a GEMM's result; where they are several, their structs are numbered."""
    scalars = 0
    for number, each in enumerate(maths, 1):
        text = _expression(each.math, f"Math{number}" if len(maths) > 1 else "Math")
        yield replace(text, of=each.of, first_scalar=scalars)
        scalars += len(each.math.attributes)


def _expression(math: Pointwise, name: str) -> ExpressionText:
    return ExpressionText(
        name=name,
        formula=comment(math.formula),
        operands=_operands(math.operands),
        results=_operands(math.results),
        scalars=math.attributes,
        body=math.cuda,
    )


def _quantized_text(template: str, variant: Variant | None) -> QuantizedText:
    """Every field; those that a kernel's template does not use are empty."""
    formats = [f for f in variant.formats if f is not DType.IO] if variant else []
    if variant is None or not formats:
        return QuantizedText()
    cuda = [dtypes.info(format).cuda for format in formats]
    scaling = variant.scalings[0] if variant.scalings else ""
    ways = [trait for trait in variant.traits if trait in _ACCUMULATIONS]

    def has(trait: str) -> str:
        return "true" if trait in variant.traits else "false"

    return QuantizedText(
        format=formats[0].value.upper(),
        scaling=_scaling_type(scaling),
        stochastic=has("stochastic"),
        hadamard=has("hadamard"),
        columnwise=has("columnwise"),
        transposed=has("transposed"),
        by_group=has("by_group"),
        untransposed=UNTRANSPOSED in variant.traits,
        atoms=", true" if ATOMS in variant.traits else "",
        a=cuda[0],
        b=cuda[-1],
        gemm_scaling=enumerator(template, scaling),
        accumulation=enumerator(template, next(iter(ways), "")),
    )


_RULES = {
    ScaleRule.MAX_OVER_AMAX: "ratio",
    ScaleRule.MX: "mx",
    ScaleRule.NVFP4: "nvfp4",
}
_STORED = {DType.FLOAT32: "float", DType.E8M0: "fusegen::E8M0", DType.E4M3: "fusegen::E4M3"}


def _scaling_type(name: str) -> str:
    """The C++ type of a scaling, or of none."""
    scaling = Scaling.parse(name)
    if scaling is None:
        return "fusegen::Unscaled"
    extents = ("fusegen::kWhole" if e is Extent.ALL else str(e) for e in scaling.extents)
    rule = f"fusegen::Rule::{_RULES[scaling.rule]}"
    return f"fusegen::Scaling<{', '.join((*extents, _STORED[scaling.dtype], rule))}>"


def _operands(operands: tuple[PointwiseOperand, ...]) -> tuple[KernelOperand, ...]:
    return tuple(
        KernelOperand(
            index, o.symbol, _ACCESS[o.access], "true" if o.dtype is DType.FLOAT32 else "false"
        )
        for index, o in enumerate(operands)
    )
