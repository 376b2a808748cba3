"""Configurations of kernels, and how they store what they read and write."""

from __future__ import annotations

import re
from enum import Enum

from pydantic.dataclasses import dataclass

from .fields import STRICT, Positive


class Store(str, Enum):
    """What becomes of a product: written in the module's own type or in fp32, or added in one.

    SCALED_BIAS is the module's own type after a bias times a scale of each row was added.
    """

    IO = "io"
    SCALED_BIAS = "scaled_bias"
    FP32 = "fp32"
    ADD = "add"
    ADD_IO = "add_io"


class GemmKind(str, Enum):
    """Which of the three products of a linear layer."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class Schedule(str, Enum):
    """How the math warpgroups of a kernel share the work."""

    COOPERATIVE = "cooperative"
    PINGPONG = "pingpong"


_POINT = re.compile(r"([a-z]+)_(\d+)x(\d+)x(\d+)_(\d+)x(\d+)")


@dataclass(frozen=True, slots=True, config=STRICT)
class PointSpec:
    """One configuration of a kernel.

    Attributes:
        tile: rows, columns and depth of the result tile a step computes.
        cluster: thread blocks along rows and columns that share loads.
        schedule: of the math warpgroups.
    """

    tile: tuple[Positive, Positive, Positive]
    cluster: tuple[Positive, Positive]
    schedule: Schedule

    @property
    def name(self) -> str:
        """``cooperative_128x256x64_2x1``: everything the point says."""
        tile = "x".join(str(extent) for extent in self.tile)
        cluster = "x".join(str(extent) for extent in self.cluster)
        return f"{self.schedule.value}_{tile}_{cluster}"

    @classmethod
    def parse(cls, name: str) -> PointSpec:
        """The point of a name.

        Raises:
            ValueError: it is not a point's name.
        """
        match = _POINT.fullmatch(name)
        if match is None:
            raise ValueError(f"point {name!r}: expected one like cooperative_128x256x64_2x1")
        m, n, k, rows, columns = map(int, match.groups()[1:])
        return cls((m, n, k), (rows, columns), Schedule(match[1]))


@dataclass(frozen=True, slots=True, config=STRICT)
class LayoutSpec:
    """How an architecture's kernels store quantised copies.

    Attributes:
        transposed: columnwise data is ``[K, rows]``, because the MMA reads one major only.
        token_alignment: elements that a group's transposed data starts at a multiple of.
        pitch: bytes that rows of data are padded to a multiple of.
        token_major: fp32 scales of blocks along a row are stored ``[blocks, tokens]``, groups where
            transposed data has them, because the MMA's scales are loaded for many tokens at once.
    """

    transposed: bool = True
    token_alignment: Positive = 32
    pitch: Positive = 16
    token_major: bool = False
