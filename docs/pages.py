"""Pages of the documentation that are printed from the code: `python docs/pages.py [--check]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fusegen.spec.kinds import SpecKind
from fusegen.spec.reference import reference

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
NOTE = "<!-- printed by docs/pages.py -->"
EXAMPLES = {
    SpecKind.OPS: "swiglu",
    SpecKind.FUSIONS: "linear_scale",
    SpecKind.MODULES: "mlp",
    SpecKind.RECIPES: "fp8_block",
    SpecKind.ARCHS: "cpu",
    SpecKind.TARGETS: "ampere_lean",
}
"""Shipped specs that the reference shows."""


def specs() -> Iterator[str]:
    """The reference of the spec format."""
    yield "# The spec format"
    yield NOTE
    yield ""
    yield (
        "A spec is a YAML file in the folder of its kind, named after what it defines: built-in"
        " ones in `specs`, yours in a folder that `--specs` names. `fusegen new` begins one,"
        " `fusegen validate` says everything that is wrong with all of them, with its place, and"
        " `fusegen schema --specs DIR` writes the JSON Schemas by which editors complete and check"
        " them; the first line of a spec from `fusegen new` names its schema:"
    )
    yield "```yaml"
    yield "# yaml-language-server: $schema=../schema/recipe.schema.json"
    yield "```"
    yield "Anchors, aliases and tags of YAML are refused, and so are keys that nothing reads."
    examples = {
        kind: (ROOT / "specs" / kind.folder / f"{name}.yaml").read_text("utf-8")
        for kind, name in EXAMPLES.items()
    }
    yield from reference(examples)


PAGES: Mapping[str, Callable[[], Iterator[str]]] = {"specs.md": specs}
"""Pages by the names of their files."""


def main(words: Sequence[str], folder: Path = FOLDER) -> int:
    """Write the pages, or with ``--check`` say whether they are as they would be written."""
    stale = 0
    for name, lines in PAGES.items():
        page, wanted = folder / name, "\n".join(lines()).rstrip("\n") + "\n"
        if page.is_file() and page.read_text(encoding="utf-8") == wanted:
            continue
        if "--check" in words:
            print(f"{name} is out of date; run: python docs/pages.py", file=sys.stderr)
            stale = 1
        else:
            page.write_text(wanted, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
