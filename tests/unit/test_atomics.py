"""Atomics decide no value and no order: what they do comes out alike whatever comes first."""

from __future__ import annotations

import re

import pytest

from fusegen.publish.paths import builtin_templates

FOLDERS = ("static/csrc", "csrc")
CALL = re.compile(r"\batomic([A-Z]\w*)\(([^;]*)\);")
COUNTS = re.compile(r", 1u$")
"""What an addition of integers adds, of which sums are exact."""
PTX = re.compile(r'"[^"\n]*\b(?:red|atom|multimem|cp\.reduce)\.[^"\n]*')
ONCE = "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group"
"""Each element of a main gradient is added to by one tile, once."""
GENERIC = re.compile(r"\b(?:cuda::)?(?:std::)?atomic_ref\b|\bcuda::atomic\b")


def orders(code: str) -> list[str]:
    """Atomics of device code whose result may follow from what comes first."""
    calls = CALL.finditer(code)
    added = (c[0] for c in calls if c[1] != "Max" and not (c[1] == "Add" and COUNTS.search(c[2])))
    written = (c[0] for c in PTX.finditer(code) if ONCE not in c[0])
    return [*added, *written, *(c[0] for c in GENERIC.finditer(code))]


def test_no_atomic_of_a_kernel_orders_anything() -> None:
    folders = [builtin_templates() / each for each in FOLDERS]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    assert any(CALL.search(text) for text in texts.values())
    assert {path.name: orders(text) for path, text in texts.items() if orders(text)} == {}


@pytest.mark.parametrize(
    "code",
    (
        "atomicAdd(sums + group, value);",
        "const int place = atomicAdd(&next, 2);",
        "atomicCAS(lock, 0u, 1u);",
        'asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(value));',
        'asm volatile("cp.reduce.async.bulk.global.shared::cta.add.bulk_group.f32 [%0]");',
        "cuda::atomic_ref<float> sum(*to);",
    ),
)
def test_others_are_found(code: str) -> None:
    assert orders(code)


@pytest.mark.parametrize(
    "code",
    (
        "atomicAdd(counts + own.expert, 1u);",
        "if (amax > 0) atomicMax(of_group, amax);",
        "static std::atomic<uint64_t> shared_memory_allowed{0};",
    ),
)
def test_counts_and_maxima_are_exact(code: str) -> None:
    assert not orders(code)
