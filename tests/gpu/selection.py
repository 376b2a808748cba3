"""Which kernel a plan chooses, which kernel ran, and sizes that reach every choice.

Rules are read from `describe()`, the plan that a module prints, so that nothing here repeats them.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}
_CONDITION = re.compile(r"(\w+) (?:% (\d+) )?(<=|>=|<|>|==) (\d+)")
_HEADING = "kernels, first rule that holds"

# As profilers print the kernels of gemm/gemm{,_fp8,_decoded}.sm90.cuh.
_GEMM = re.compile(
    r"ragged_(?:fp8_|decoded_)?gemm<\(fusegen::Gemm\)(\d), (?:__nv_fp8_\w+, __nv_fp8_\w+, )?(\w+), "
    r"(?:\(fusegen::Fp8Scaling\)\d, \(fusegen::Accumulation\)\d, )?fusegen::Config<"
    r"(\d+), (\d+), (\d+), (\d+), \(fusegen::Schedule\)(\d)"
)
# As they print those of gemm/gemm{,_fp8,_scaled}.mma.cuh.
_MMA_GEMM = re.compile(
    r"ragged_(?:fp8_|decoded_|scaled_)?mma_gemm<\(fusegen::Gemm\)(\d), "
    r"(?:__nv_fp8_\w+, __nv_fp8_\w+, |fusegen::MxWarpMma<__nv_fp8_\w+, __nv_fp8_\w+ ?>, "
    r"|fusegen::NvWarpMma, )?(\w+), "
    r"(?:\(fusegen::Fp8Scaling\)\d, )?(?:\(fusegen::Accumulation\)\d, )?fusegen::MmaConfig<"
    r"(\d+), (\d+), (\d+), (\d+), (\d+), (\d+), (\d+)"
)
# As they print those of gemm/gemm{,_fp8,_scaled}.sm100.cuh.
_TCGEN05_GEMM = re.compile(
    r"ragged_(?:fp8_|decoded_|scaled_)?tcgen05_gemm<\(fusegen::Gemm\)(\d), "
    r"(?:__nv_fp[84]_\w+, __nv_fp[84]_\w+, )?(\w+), (?:\(fusegen::Fp8Scaling\)\d, )?"
    r"fusegen::Tcgen05Config<(\d+), (\d+), (\d+), (\d+), (\d+)"
)
_OF_CODES = re.compile(r"gemm_decoded_\w+_(tensor|row)_(tensor|row)")
KINDS = ("fprop", "dgrad", "wgrad")
_SCHEDULES = ("cooperative", "pingpong")
_ELEMENTS = {"__nv_bfloat16": "bfloat16", "__half": "float16"}


_ESTIMATE = re.compile(
    r"(\d+) \+ waves \* \((\d+) \+ (\d+) \* k / 1024\) ns; (\d+) x (\d+) on ([\d.]+) SMs"
)


@dataclass(frozen=True)
class Estimate:
    """What a plan prints of the time of a point."""

    launch: int
    wave: int
    k: int
    rows: int
    columns: int
    sms: float

    @classmethod
    def parse(cls, text: str) -> Estimate:
        match = _ESTIMATE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no estimate of a plan")
        return cls(*map(int, match.groups()[:5]), float(match[6]))

    def of(self, sizes: Mapping[str, int]) -> int:
        """Nanoseconds of a GEMM."""
        tiles = -(-sizes["rows"] // self.rows) * -(-sizes["columns"] // self.columns)
        waves = -(-tiles // int(sizes["sms"] // self.sms))
        return self.launch + waves * (self.wave + sizes["k"] * self.k // 1024)


@dataclass(frozen=True)
class Rule:
    """A condition as the plan prints it, and the schedule points that it leads to.

    Attributes:
        condition: on sizes.
        points: with estimates of their times where they are several; those may change.
    """

    condition: str
    points: dict[str, Estimate | None]

    @classmethod
    def of(cls, condition: str, point: str) -> Rule:
        """That leads to one point."""
        return cls(condition, {point: None})

    def choose(self, sizes: Mapping[str, int]) -> str:
        """The point of the least estimate, the first of several."""

        def time(point: str) -> int:
            estimate = self.points[point]
            return estimate.of(sizes) if estimate else 0

        return min(self.points, key=time)

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether the rule is the case for these sizes."""
        if self.condition == "always":
            return True
        return all(_holds(part, sizes) for part in self.condition.split(" and "))


def _holds(condition: str, sizes: Mapping[str, int]) -> bool:
    match = _CONDITION.fullmatch(condition)
    if match is None:
        raise ValueError(f"{condition!r} is no condition of a plan: <size> [% n] <comparison> <n>")
    size = sizes[match[1]] % int(match[2]) if match[2] else sizes[match[1]]
    return _COMPARISONS[match[3]](size, int(match[4]))


def read_rules(plan: str) -> dict[str, list[Rule]]:
    """Rules by kernel set, in order, from the text of a plan."""
    rules: dict[str, list[Rule]] = {}
    lines = iter(plan.splitlines())
    for line in lines:
        if line.startswith(_HEADING):
            break
    name = ""
    for line in lines:
        if line.startswith("      "):
            point, _, estimate = line.strip().partition(": ")
            rules[name][-1].points[point] = Estimate.parse(estimate)
        elif line.startswith("    "):
            condition, _, point = line.strip().rpartition(": ")
            several = point == "least of"
            rules[name].append(Rule(condition, {}) if several else Rule.of(condition, point))
        elif line.strip():  # the name may be followed by where its rules are from
            name = line.strip().partition(",")[0]
            rules[name] = []
    return rules


def kind_of(name: str) -> str | None:
    """Which GEMM a kernel set is of; None for one of no GEMM."""
    if not name.startswith("gemm_"):
        return None
    return next((word for word in name.split("_") if word in KINDS), None)


def gemm_rules(plan: str, kind: str) -> list[Rule]:
    """Rules of a plan's one set of matrix kernels of this kind."""
    (rules,) = [rules for name, rules in read_rules(plan).items() if kind_of(name) == kind]
    return rules


def multiplies_codes(plan: str) -> bool:
    """Whether every GEMM of a plan is one of codes as they are, with all scales at its end."""
    gemms = [name for name in read_rules(plan) if kind_of(name)]
    return bool(gemms) and all(map(_OF_CODES.fullmatch, gemms))


def chosen(rules: list[Rule], sizes: Mapping[str, int]) -> str:
    """The point of the first rule that holds."""
    return next(rule for rule in rules if rule.holds(sizes)).choose(sizes)


def gemm_sizes(
    kind: str, tokens: int, groups: int, n: int, k: int, sms: int = 132
) -> dict[str, int]:
    """What rules ask about, as gemm.h states it."""
    mean = tokens // groups
    rows, columns, contracted = {
        "fprop": (tokens, n, k),
        "dgrad": (tokens, k, n),
        "wgrad": (n, k, mean),
    }[kind]
    return {
        "tokens": tokens,
        "groups": groups,
        "mean_group_tokens": mean,
        "rows": rows,
        "columns": columns,
        "k": contracted,
        "sms": sms,
    }


@dataclass(frozen=True)
class Launch:
    """One kernel of ours, as a profiler saw it."""

    kind: str
    element: str
    point: str


def launch_of(kernel: str) -> Launch | None:
    """The GEMM behind a demangled kernel name, or None for any other kernel."""
    if match := _GEMM.search(kernel):
        m, n, k, cluster = match.group(3, 4, 5, 6)
        point = f"{_SCHEDULES[int(match[7])]}_{m}x{n}x{k}_{cluster}x1"
    elif match := _MMA_GEMM.search(kernel):
        m, n, k, rows, columns, stages, ctas = match.groups()[2:]
        point = f"mma_{m}x{n}x{k}_{rows}x{columns}_{stages}_{ctas}"
    elif match := _TCGEN05_GEMM.search(kernel):
        m, n, k, sums, ctas = match.groups()[2:]
        pair = "_2" if ctas == "2" else ""
        point = f"umma_{m}x{n}x{k}_{sums}{pair}"
    else:
        return None
    return Launch(KINDS[int(match[1])], _ELEMENTS[match[2]], point)


@dataclass(frozen=True)
class Reach:
    """Sizes that lead to a point."""

    tokens: int
    groups: int
    n: int
    k: int

    @property
    def work(self) -> int:
        return self.tokens * self.n * self.k + self.groups * self.n * self.k

    @property
    def simple(self) -> bool:
        """Whether one group or one tile is all there is, which exercises little of a kernel."""
        return self.groups == 1 or self.tokens < 280 or min(self.n, self.k) < 264


_GROUPS = (1, 4, 64)
_MEANS = (5, 20, 40, 70, 130, 300, 600, 1100, 2100, 4200, 8400)
_WIDTHS = (40, 136, 264, 520, 1032, 2056, 4096, 7168, 14336)


def _candidates() -> Iterator[Reach]:
    for groups in _GROUPS:
        for mean in _MEANS:
            for n in _WIDTHS:
                for k in _WIDTHS:
                    yield Reach(mean * groups, groups, n, k)


def _device() -> dict[str, int]:
    """What rules ask about the device at hand: its SMs, and bytes of shared memory of a CTA."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    memory = properties.shared_memory_per_block_optin
    return {"sms": properties.multi_processor_count, "shared_memory": memory}


def reach_every_point(kind: str, rules: list[Rule]) -> dict[str, Reach]:
    """The cheapest sizes for every point of a kernel set, several groups and tiles where possible.

    Raises:
        LookupError: a point that no sizes lead to, so nothing could ever run it.
    """
    found: dict[str, Reach] = {}
    device = _device()
    for sizes in sorted(_candidates(), key=lambda sizes: (sizes.simple, sizes.work)):
        facts = gemm_sizes(kind, sizes.tokens, sizes.groups, sizes.n, sizes.k) | device
        found.setdefault(chosen(rules, facts), sizes)
    missing = {point for rule in rules for point in rule.points} - found.keys()
    if missing:
        raise LookupError(f"{kind}: no sizes lead to {', '.join(sorted(missing))}")
    return found
