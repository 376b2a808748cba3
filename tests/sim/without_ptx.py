"""Copies of the device headers that a host compiler takes: PTX becomes calls of the simulation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Replacement:
    """The statement of a header that holds `instruction`, and the C++ that takes its place."""

    instruction: str
    code: str


def _multiply(a: str, b: str) -> Replacement:
    """An MMA of a warp, by the formats of its operands."""
    a_in_sim, b_in_sim = (f"sim::Format::{each}" for each in (a, b))
    return Replacement(f"f32.{a}.{b}.f32", f"sim::multiply_add<{a_in_sim}, {b_in_sim}>(d, a, b);")


REPLACEMENTS: dict[str, tuple[Replacement, ...]] = {
    "sink/chunk.sm90.cuh": (
        Replacement(
            "stmatrix.sync", "sim::store_matrices(address, {out[0], out[1], out[2], out[3]});"
        ),
        Replacement("ldmatrix.sync", "sim::load_matrices(address, old);"),
        Replacement("st.shared.v2.f32", "sim::store_shared(address, out);"),
    ),
    "sink/tma_store.sm90.cuh": (
        Replacement("tensor.4d.global", "sim::store_box(map, buffer, {at.x, at.y, at.z, at.w});"),
        Replacement("cp.async.bulk.tensor.3d", "sim::store_box(map, buffer, {at.x, at.y, at.z});"),
        Replacement(
            "cp.reduce.async.bulk.tensor.3d",
            "sim::store_box(map, buffer, {at.x, at.y, at.z}, true);",
        ),
    ),
    "sink/gated_codes.sm90.cuh": (
        Replacement("st.shared.b16", "sim::store_shared(address, value);"),
    ),
    "sink/columnwise_codes.sm90.cuh": (
        Replacement("movmatrix.sync", "column = sim::transposed_matrix(row);"),
        Replacement("st.shared.b32", "sim::store_shared(address, value);"),
        Replacement("ld.shared.v4.b32", "in = sim::load_shared<uint4>(place_of(buffer, column));"),
    ),
    "load/gathered.sm90.cuh": (
        Replacement("cp.async.mbarrier.arrive.noinc", "sim::arrive_when_copied(address);"),
        Replacement("mad.wide.u32", "found = address + uint64_t(place) * 16;"),
    ),
    "load/scale_atoms.sm90.cuh": (
        Replacement("cp.async.bulk", "sim::load_bytes(to, from, kAtomBytes, &barrier);"),
    ),
    "mainloop/promotion.sm90.cuh": (
        Replacement("ld.global.nc.f32", "value = sim::load_global(from);"),
    ),
    "load/async.mma.cuh": (
        Replacement("cp.async.cg", "sim::copy_async(to, from, bytes);"),
        Replacement("cp.async.commit_group", "sim::commit_copies();"),
        Replacement("cp.async.wait_group", "sim::wait_for_copies(Left);"),
        Replacement("ld.shared.u32", "value = sim::load_shared<uint32_t>(address);"),
        Replacement("ld.shared.u8", "value = sim::load_shared<uint8_t>(address);"),
    ),
    "mainloop/mma.mma.cuh": (
        Replacement("m8n8.x4.trans", "sim::load_four_matrices<true>(address, out);"),
        Replacement("m8n8.x4.shared", "sim::load_four_matrices<false>(address, out);"),
    ),
    "mainloop/warp_mma.mma.cuh": (
        _multiply("bf16", "bf16"),
        _multiply("f16", "f16"),
    ),
    "mainloop/warp_mma_fp8.mma.cuh": tuple(
        _multiply(a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")
    ),
}
_SCALED = "d, a, b, scale_a, scale_b"
REPLACEMENTS["mainloop/warp_mma_scaled.mma.cuh"] = (
    *(
        Replacement(
            f"f32.{a}.{b}.f32.ue8m0",
            f"sim::multiply_scaled<sim::Format::{a}, sim::Format::{b}>({_SCALED});",
        )
        for a in ("e4m3", "e5m2")
        for b in ("e4m3", "e5m2")
    ),
    Replacement(
        "f32.e2m1.e2m1.f32.ue4m3",
        f"sim::multiply_scaled<sim::Format::e2m1, sim::Format::e2m1>({_SCALED});",
    ),
)
STAND_INS = Path(__file__).with_name("stand_ins")
"""Headers that take the place of those of the same name: of instructions alone."""
OF_THE_HOST = ("quantize/math.cuh", "quantize/pairs.cuh")
"""Headers that compile for the host as they are: what is for a GPU alone is left out there."""
SHARED = "extern __shared__ __align__(1024) uint8_t shared[];"
SHARED_ON_CPU = "uint8_t* const shared = sim::shared_memory();"
ASM = re.compile(r"\basm( volatile)?\(")


def _included(folder: Path, name: str) -> Iterator[str]:
    yield name
    for other in re.findall(
        r'^#include "fusegen/(.+)"$', (folder / name).read_text(), re.MULTILINE
    ):
        yield from _included(folder, other)


def _replace(text: str, replacement: Replacement, name: str) -> str:
    quoted = re.findall(rf'"[^"\n]*{re.escape(replacement.instruction)}', text)
    assert len(quoted) == 1, f"{name} no longer has one {replacement.instruction}"
    inside = text.index(quoted[0])
    begin = [match.start() for match in ASM.finditer(text, 0, inside)][-1]
    end = text.index(");", inside) + len(");")
    return text[:begin] + replacement.code + text[end:]


def _on_cpu(name: str, text: str) -> str:
    for replacement in REPLACEMENTS.get(name, ()):
        text = _replace(text, replacement, name)
    text = text.replace(SHARED, SHARED_ON_CPU)
    code = "" if name in OF_THE_HOST else re.sub(r"//.*", "", text)
    rest = ASM.search(code) or re.search("__shared__", code)
    assert not rest, f"{name} holds {rest} that {Path(__file__).name} does not replace"
    return text


def headers_on_cpu(
    folder: Path, first: Sequence[str], others: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Name -> text of some headers of a folder and of all that they include from there.

    Args:
        folder: of the headers.
        first: names of those.
        others: texts that take the place of some.
    """
    stand_ins = {path.relative_to(STAND_INS).as_posix(): path for path in STAND_INS.rglob("*.cuh")}
    taken = {name: path.read_text("utf-8") for name, path in stand_ins.items()} | dict(others or {})
    names = sorted({name for each in first for name in _included(folder, each)})
    gone = [name for name in (*REPLACEMENTS, *stand_ins) if not (folder / name).is_file()]
    assert not gone, f"no longer there: {gone}"
    return {
        name: _on_cpu(name, taken.get(name) or (folder / name).read_text("utf-8")) for name in names
    }
