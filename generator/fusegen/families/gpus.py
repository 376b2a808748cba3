"""GPUs by the names people have for them: what runs on them, and what their data sheets promise.

Bandwidths and rates are those of NVIDIA's data sheets of each product, without sparsity: of the
A100, A30, A10, A40, L4, L40S, H100 (SXM, PCIe, NVL), H200 and GH200; of the RTX 4090 the appendix
of "NVIDIA Ada GPU Architecture", of the RTX 5090 and RTX PRO 6000 that of "NVIDIA RTX Blackwell GPU
Architecture"; of the B200 that of the HGX board.  They were compared with what others print of
them: https://glennklockwood.com/garden/processors (H100, B200), https://hmc-tech.com/gpus (A100,
A40, RTX 4090, B200, RTX PRO 6000), https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html
(both H100), https://store.sourcecode.com (L4, L40S).  Clocks are those at which SMs times the
operations of their matrix instructions per cycle, a power of two, give the rates, which a test
holds; of the H20 that is not so, whose rates are cut.

Where sheets and devices differ, the sheet stands: drivers report 7.67 TB/s of a B200
(https://github.com/pytorch/ao/pull/4002).  Rates of 8 bits are those of sums in fp32, which GeForce
halves; of block-scaled instructions, too, as long as nobody has measured them here, though others
have seen them at twice that (https://github.com/QuantumDrizzy/BLACKWALL, an RTX 5060 Ti).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

TERA = 10**12
GIGA = 10**9


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that is sold.

    Attributes:
        name: what a command line calls it, such as h100_pcie.
        capability: compute capability.
        bandwidth: of its memory, bytes per second.
        sms: multiprocessors.
        gigahertz: of its clock, at which the rates are reached.
        rates: of its matrix instructions without sparsity, operations per second, by the bits of
            an operand's element; sums in fp32.
    """

    name: str
    capability: tuple[int, int]
    bandwidth: float
    sms: int
    gigahertz: float
    rates: Mapping[int, float]


def _gpu(
    name: str,
    capability: tuple[int, int],
    gigabytes: float,
    sms: int,
    gigahertz: float,
    teraflops: Mapping[int, float],
) -> Gpu:
    rates = {bits: rate * TERA for bits, rate in teraflops.items()}
    return Gpu(name, capability, gigabytes * GIGA, sms, gigahertz, rates)


GPUS = (
    _gpu("a100", (8, 0), 2039, 108, 1.41, {16: 312}),
    _gpu("a100_40gb", (8, 0), 1555, 108, 1.41, {16: 312}),
    _gpu("a30", (8, 0), 933, 56, 1.44, {16: 165}),
    _gpu("a10", (8, 6), 600, 72, 1.695, {16: 125}),
    _gpu("a40", (8, 6), 696, 84, 1.74, {16: 149.7}),
    _gpu("l4", (8, 9), 300, 58, 2.04, {16: 121, 8: 242.5}),
    _gpu("l40s", (8, 9), 864, 142, 2.52, {16: 362, 8: 733}),
    _gpu("rtx_4090", (8, 9), 1008, 128, 2.52, {16: 165.2, 8: 330.3}),
    _gpu("h100", (9, 0), 3350, 132, 1.83, {16: 989.4, 8: 1978.9}),
    _gpu("h100_pcie", (9, 0), 2000, 114, 1.62, {16: 756, 8: 1513}),
    _gpu("h100_nvl", (9, 0), 3900, 132, 1.545, {16: 835, 8: 1671}),
    _gpu("h800", (9, 0), 3350, 132, 1.83, {16: 989.4, 8: 1978.9}),
    _gpu("h200", (9, 0), 4800, 132, 1.83, {16: 989.4, 8: 1978.9}),
    _gpu("gh200", (9, 0), 4000, 132, 1.83, {16: 989.4, 8: 1978.9}),
    _gpu("h20", (9, 0), 4000, 78, 1.83, {16: 148, 8: 296}),
    _gpu("b200", (10, 0), 8000, 148, 1.86, {16: 2250, 8: 4500, 4: 9000}),
    _gpu("rtx_5090", (12, 0), 1792, 170, 2.41, {16: 209.5, 8: 419, 4: 1676}),
    _gpu("rtx_pro_6000", (12, 0), 1792, 188, 2.617, {16: 503.8, 8: 1007.6, 4: 2015.2}),
)
"""By compute capability; of each the one that stands for the others first."""

_FILLING = re.compile(r"nvidia|tesla|geforce|sxm[0-9]*")
"""Words that stand around the name that tells GPUs apart."""


def gpu_called(text: str) -> Gpu | None:
    """The GPU that people call so: `H100`, `NVIDIA H100 80GB HBM3`, `h100-pcie`; None for others.

    Of more words than the table knows the first ones count, as many as name a GPU there: what
    follows tells apart what runs the same code.
    """
    words = [
        word for word in re.findall(r"[a-z0-9]+", text.lower()) if not _FILLING.fullmatch(word)
    ]
    named = {gpu.name: gpu for gpu in GPUS}
    names = ("_".join(words[:count]) for count in range(len(words), 0, -1))
    return next((named[name] for name in names if name in named), None)
