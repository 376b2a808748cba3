"""Numbers of the device code, read from its text and computed as a C++ compiler would."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fusegen.families.wgmma import Schedule, WgmmaConfig
from fusegen.publish.paths import builtin_templates

CSRC = builtin_templates() / "static" / "csrc" / "fusegen"


def constant(file: str, name: str) -> int:
    found = re.search(rf"\b{name} = (\d+);", (CSRC / file).read_text(encoding="utf-8"))
    assert found, name
    return int(found[1])


def traits(
    point: WgmmaConfig,
    element_bytes: int,
    loads: bool,
    extra: int,
    control: int,
    limits: Mapping[str, int],
) -> dict[str, int]:
    """`TileTraits`, read from the text of gemm/config.sm90.cuh and computed as C++ would.

    Only sums, products, comparisons, ``&&``, ``||`` and ``?:`` of integers occur.

    Returns:
        the constants by name, and each ``static_assert`` by its condition: whether it holds.
    """
    text = (CSRC / "gemm/config.sm90.cuh").read_text(encoding="utf-8")
    buffers = re.search(r"int Buffers = (\d+)>", text)
    body = re.sub(r"//.*", "", text[text.index("struct TileTraits") :])
    body = body[: body.index("static_assert")]
    beside = re.search(r"stages_beside\(int buffers\) {\s*return (.*?);", body, re.S)
    definitions = re.findall(r"static constexpr \w+ (k\w+) =\s*([^;]*);", body)
    assert buffers and beside and len(definitions) > 20
    chunk_columns = constant("sink/chunk.sm90.cuh", "kChunkColumns")
    names: dict[str, int] = {
        "tile_m": point.tile[0],
        "tile_n": point.tile[1],
        "tile_k": point.tile[2],
        "buffers": int(buffers[1]),
        **limits,
        "ElementBytes": element_bytes,
        "BoxesB": 2,
        "ExtraBytes": extra,
        "ControlBytes": control,
        "cluster": point.cluster[0] * point.cluster[1],
        "kSwizzleBytes": constant("mainloop/wgmma.sm90.cuh", "kSwizzleBytes"),
        "pingpong": point.schedule is Schedule.PINGPONG,
        "loads": loads,
        "kMmaRows": constant("mainloop/wgmma.sm90.cuh", "kMmaRows"),
        "kMmaKBytes": constant("mainloop/wgmma.sm90.cuh", "kMmaKBytes"),
        "kChunkColumns": chunk_columns,
        "kChunkBytes": constant("sink/chunk.sm90.cuh", "kChunkRows") * chunk_columns * 2,
    }

    def stages_beside(least: int) -> int:
        return int(eval(in_python(beside[1]), {}, {**names, "buffers": least}))

    for name, expression in definitions:
        names[name] = int(eval(in_python(expression), {"stages_beside": stages_beside}, names))
    asserted = text[text.index("struct TileTraits") : text.index("kBoxesOfB")]
    for claim in re.findall(r"static_assert\(([^;]*?)(?:,\s*\"[^\"]*\")?\);", asserted):
        names[f"assert {' '.join(claim.split())}"] = bool(eval(in_python(claim), {}, names))
    return names


def in_python(expression: str) -> str:
    """A C++ expression in Python's words."""
    text = expression.replace("Config::schedule == Schedule::pingpong", "pingpong")
    text = (
        text.replace("loads(store)", "loads")
        .replace("&&", " and ")
        .replace("||", " or ")
        .replace("/", "//")
    )
    text = re.sub(r"!(?!=)", " not ", text.replace("Config::", ""))
    text = re.sub(r"\(([^()]*\?[^()]*)\)", lambda inner: f"({chosen(inner[1])})", text)
    return chosen(" ".join(text.split()))


def chosen(text: str) -> str:
    """``a ? b : c`` in Python's order; ``c`` may be a choice again."""
    condition, found, choices = text.partition("?")
    first, _, second = choices.partition(":")
    return f"({first}) if ({condition}) else ({chosen(second)})" if found else text
