"""Launches of kernels of 16-bit elements as C functions, which `cuda_on_cpu` runs."""

from __future__ import annotations

from pathlib import Path

from .quantize_harness import Kernels, compile_for_cpu

RUN = """
#define FUSEGEN_RUN(name, Arguments)                                                            \\
  extern "C" int run_##name(int half, const fusegen::Arguments* in, fusegen::Stream* stream,    \\
                            const char** call) {                                                \\
    const fusegen::Status status = half ? fusegen::launch_##name<__half>(*in, *stream)          \\
                                        : fusegen::launch_##name<__nv_bfloat16>(*in, *stream);  \\
    *call = status.call;                                                                        \\
    return status.code;                                                                         \\
  }
"""


def launches(
    folder: Path, room: str, architectures: str | None = None, /, **arguments: str
) -> Kernels:
    """``run_<name>`` of some launches, which takes whether elements are of fp16, and arguments.

    Args:
        folder: where the library goes; what it has of the device code comes before the templates'.
        room: of the device code, such as ``norm``.
        architectures: that the code is for, as `compile_for_cpu` has them.
        arguments: struct that each launch takes, by its name, which its header has, too.
    """
    includes = [f'#include "fusegen/{room}/{name}.cuh"\n' for name in arguments]
    runs = [f"FUSEGEN_RUN({name}, {struct})\n" for name, struct in arguments.items()]
    header = folder / f"{room}_launches.h"
    header.write_text("".join((*includes, RUN, *runs)))
    return Kernels(compile_for_cpu(str(header), folder, architectures=architectures), "cpu")
