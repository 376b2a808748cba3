"""What records call things, in words: models, recipes, contenders and cases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from common import OURS

MODELS: Mapping[str, str] = {
    "mixtral": "Mixtral 8x7B",
    "dsv3": "DeepSeek-V3, 32 experts",
    "dsv3_all": "DeepSeek-V3, all experts",
    "qwen3": "Qwen3-30B-A3B",
    "qwen2moe": "Qwen1.5-MoE-A2.7B",
    "dsv2": "DeepSeek-V2",
    "gptoss": "gpt-oss-20b",
}
RECIPES: Mapping[str, str] = {
    "bf16": "bf16",
    "fp8_delayed": "FP8, delayed scaling",
    "fp8_current": "FP8, current scaling",
    "fp8_rowwise": "FP8, a scale per row",
    "fp8_block": "FP8, scales per block",
    "mxfp8": "MXFP8, emulated",
    "nvfp4": "NVFP4, emulated",
}
LAYERS = {"up": "fc1", "down": "fc2"}
KINDS = {
    "fprop": "forward",
    "dgrad": "gradient of x",
    "wgrad": "gradient of W",
    "wgrad, added": "gradient of W, added",
}
SCALINGS = {
    "tensor": "one scale",
    "row": "a scale per row",
    "block": "scales per block",
    "block_1x64": "scales per 1 x 64",
    "block_1x128": "scales per 1 x 128",
    "block_128x128": "scales per 128 x 128",
    "mx_1x32": "MXFP8",
    "nv_1x16": "NVFP4, scales per 1 x 16",
    "nv_16x16": "NVFP4, scales per 16 x 16",
    "nv_1x16_both": "NVFP4, both transformed",
}
ACCUMULATIONS = {"split": "split accumulation", "fast": "fast accumulation"}


@dataclass(frozen=True)
class Contender:
    """Whose time a row is.

    Attributes:
        library: ours or another.
        recipe: bf16 where none is named.
        choices: words after the recipe.
    """

    library: str
    recipe: str
    choices: tuple[str, ...]

    @classmethod
    def parse(cls, name: str) -> Contender:
        """Read the name of a row's contender."""
        words = name.split()
        named = [place for place, word in enumerate(words) if word in RECIPES]
        if named:
            place = named[0]
            return cls(" ".join(words[:place]), words[place], tuple(words[place + 1 :]))
        if words[0] == OURS:
            return cls(OURS, "bf16", tuple(words[1:]))
        return cls(name, "bf16", ())

    @property
    def ours(self) -> bool:
        return self.library == OURS


def model(name: str) -> str:
    """A model in words; one that is not known stays as it is."""
    return MODELS.get(name, name.replace("_", " "))


_GEMM = re.compile(
    r"(?P<shape>\S+?)(_(?P<layer>up|down))?( (?P<draw>.+))? (?P<kind>fprop|[dw]grad.*)"
)


def gemm(case: str) -> tuple[str, str]:
    """A case such as "mixtral_up zipf fprop" as its model and what is computed of it."""
    read = _GEMM.fullmatch(case)
    if read is None:
        return model(case), ""
    kind, layer = read["kind"], LAYERS.get(read["layer"])
    return model(read["shape"]), ", ".join(
        filter(None, [layer, read["draw"], KINDS.get(kind, kind)])
    )


def quantised(case: str) -> tuple[str, str]:
    """A case such as "tensor both row_sums" as how it scales and what it makes."""
    scaling, *words = case.split()
    said = [{"both": "both copies"}.get(word, word.replace("_", " ")) for word in words]
    return SCALINGS.get(scaling, scaling.replace("_", " ")), " ".join(said)
