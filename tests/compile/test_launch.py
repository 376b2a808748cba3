"""How kernels follow each other, by the architectures that code is compiled for."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from .quantize_harness import compile_for_cpu

HEADER = """
#include "fusegen/launch/launch.cuh"

namespace {

void kernel(int* runs) {
  fusegen::wait_for_previous_kernel();
  ++*runs;
  fusegen::let_next_kernel_start();
}

}  // namespace

// Attributes of the first launch of a call, and of the one behind it; how often both have waited.
extern "C" int launch_two(int* attributes, int* waits) {
  fusegen::Stream stream{};
  int runs = 0;
  const int before = on_cpu::waits;
  for (int i = 0; i < 2; ++i) {
    const fusegen::Grid grid{dim3(1), 1};
    if (!fusegen::launch_kernel("two", &kernel, grid, stream, &runs).ok()) return -1;
    attributes[i] = on_cpu::attributes;
  }
  *waits = on_cpu::waits - before;
  return runs;
}
"""


@pytest.mark.parametrize(
    ("architectures", "early"),
    [
        pytest.param("800", False, id="sm_80"),
        pytest.param("890", False, id="sm_89"),
        pytest.param("900", True, id="sm_90"),
        pytest.param("1000,1200", True, id="later ones"),
        pytest.param("800,900", False, id="one of them below"),
        pytest.param(None, True, id="a CPU"),
    ],
)
def test_only_code_for_hopper_starts_early(
    tmp_path: Path, architectures: str | None, early: bool
) -> None:
    header = tmp_path / "launch_functions.h"
    header.write_text(HEADER)
    library = ctypes.CDLL(str(compile_for_cpu(str(header), tmp_path, architectures=architectures)))
    attributes, waits = (ctypes.c_int * 2)(), ctypes.c_int()
    assert library.launch_two(attributes, ctypes.byref(waits)) == 2
    assert [*attributes] == [0, int(early)]
    assert waits.value == 2 * early  # before sm_90 there is nothing that a kernel could wait by
