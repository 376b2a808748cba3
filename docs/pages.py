"""Pages of the documentation that are printed from the code: `python docs/pages.py [--check]`."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fusegen.checks.load import load
from fusegen.cli import TRACEBACK, program
from fusegen.cli.exits import EXTENSION, INTERNAL, INTERRUPTED, MEANINGS, known_errors
from fusegen.cli.output import JSON_VERSION
from fusegen.cli.verbs import VERBS
from fusegen.families.contract import Contract
from fusegen.families.limits import SHARED_MEMORY
from fusegen.families.registry import known_family
from fusegen.spec.arch import ArchSpec
from fusegen.spec.editions import CURRENT, STEPS
from fusegen.spec.kinds import SpecKind
from fusegen.spec.reference import escaped, reference

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
    yield from editions()
    examples = {
        kind: (ROOT / "specs" / kind.folder / f"{name}.yaml").read_text("utf-8")
        for kind, name in EXAMPLES.items()
    }
    yield from reference(examples)


def editions() -> Iterator[str]:
    """What the editions of the format are."""
    yield ""
    yield "## Editions"
    yield (
        f"`edition` says which version of this format a file is of; the current one is {CURRENT}."
        " Files of an older edition are read as if they were of the current one, with one warning"
        " that names them, and mean what they meant. `fusegen fix-specs DIR` rewrites them:"
        " comments, order and layout stay. A file of a newer edition is an error that asks for a"
        " newer fusegen."
    )
    yield ""
    yield "| edition | what it changed |"
    yield "|---|---|"
    yield from (f"| {step.edition} | {step.summary} |" for step in STEPS)


# ---- the command line


SHELLS = {
    "bash": ("~/.bashrc", 'eval "$(_FUSEGEN_COMPLETE=bash_source fusegen)"'),
    "zsh": ("~/.zshrc", 'eval "$(_FUSEGEN_COMPLETE=zsh_source fusegen)"'),
    "fish": (
        "~/.config/fish/completions/fusegen.fish",
        "_FUSEGEN_COMPLETE=fish_source fusegen | source",
    ),
}
"""What turns completion on, and in which file."""
VARIABLES = {
    "FUSEGEN_CACHE_DIR": "folder of compiled objects and of the demo; else `fusegen` below"
    " `XDG_CACHE_HOME`, else `~/.cache/fusegen`",
    TRACEBACK: "`1` shows the Python traceback of any error",
    "NO_COLOR": "anything keeps colours away, which otherwise a terminal has",
    "CUDA_HOME, CUDA_PATH, CXX": "where `build` looks for its tools",
    "CUDA_VISIBLE_DEVICES": "whose first GPU is `native`",
}
"""Of the environment."""


def command_line() -> Iterator[str]:
    """The reference of the command line."""
    yield "# The command line"
    yield NOTE
    yield ""
    yield "| command | |"
    yield "|---|---|"
    for name, verb in VERBS.items():
        yield f"| [`fusegen {name}`](#fusegen-{name}) | {verb.summary} |"
    yield ""
    for name in VERBS:
        yield from _verb(name)
    yield from _answers()
    yield "## Shell completion"
    yield (
        "Shells complete verbs, options and values: behind `--module gro` Tab gives all modules"
        " whose names begin so, those of a folder that `--specs` has named on the line, too. Put"
        " the line of your shell into its file:"
    )
    yield ""
    yield "| shell | file | line |"
    yield "|---|---|---|"
    for shell, (file, line) in SHELLS.items():
        yield f"| {shell} | `{file}` | `{escaped(line)}` |"
    yield ""
    yield "## Environment"
    yield "| variable | |"
    yield "|---|---|"
    for variable, text in VARIABLES.items():
        yield f"| {', '.join(f'`{word}`' for word in variable.split(', '))} | {text} |"


def _verb(name: str) -> Iterator[str]:
    """A section: what `--help` says, with every parameter in a table."""
    found = program.get_command(click.Context(program), name)
    assert found is not None
    settings = program.context_settings  # a command keeps the words of its first help
    context = click.Context(found, info_name=f"fusegen {name}", **settings)
    yield f"## fusegen {name}"
    yield "```"
    yield " ".join(("fusegen", name, *found.collect_usage_pieces(context)))
    yield "```"
    paragraphs = inspect.cleandoc(found.help or "").split("\n\n")
    for paragraph in paragraphs:
        yield escaped(" ".join(paragraph.split()))
        yield ""
    yield "| option | default | |"
    yield "|---|---|---|"
    for parameter in found.params:
        if isinstance(parameter, click.Option):
            yield _option(parameter, context)
    yield ""
    yield "```"
    yield from (line.strip() for line in (found.epilog or "").splitlines()[2:])
    yield "```"
    yield ""


def _option(option: click.Option, context: click.Context) -> str:
    value = "" if option.is_flag else f" {option.make_metavar(context)}"
    default = option.default if option.show_default else None
    words = escaped(f"`{', '.join(option.opts)}{value}`")
    return f"| {words} | {_code(default)} | {escaped(option.help or '')} |"


def _code(value: object) -> str:
    return "" if value is None else f"`{value}`"


def _answers() -> Iterator[str]:
    yield "## Answers"
    yield (
        "An answer goes to stdout, all messages go to stderr. With `--json` the answer is one"
        " object whose first keys are `version`, that of its format, and `fusegen`, that of the"
        f" program: under version {JSON_VERSION} keys may be added, and none is taken away or"
        " changes its meaning. An error is an answer, too:"
    )
    yield "```json"
    problem = {"file": "mine/recipes/toy.yaml", "line": 3, "column": 1}
    error = {"kind": "spec", "exit_code": 3, "message": "..."}
    problems = [{**problem, "message": "unknown key 'colour'"}]
    example = {"version": JSON_VERSION, "fusegen": "...", "error": {**error, "problems": problems}}
    yield from json.dumps(example, indent=2).split("\n")
    yield "```"
    yield ""
    yield "| exit code | | kinds of errors |"
    yield "|---|---|---|"
    failures = [*(found for _, found in known_errors()), EXTENSION, INTERNAL, INTERRUPTED]
    for code, text in MEANINGS.items():
        kinds = dict.fromkeys(each.kind for each in failures if each.code is code)
        links = ", ".join(f"[`{kind}`](troubleshooting.md#{kind})" for kind in kinds)
        yield f"| {int(code)} | {text} | {links} |"
    yield ""


# ---- architectures

RECORD = FOLDER / "architectures.json"
README = ROOT / "README.md"


def architectures() -> Iterator[str]:
    """What there is for each architecture, what its units are held to, and what they came to."""
    yield "# Architectures"
    yield NOTE
    yield ""
    yield (
        "What is generated for each GPU, in which families of kernels, and what every compiled unit"
        " of a family has to be: its contract, which `make test-kernels` and `make compile-all`"
        " enforce.  Besides what stands here, no unit has a warning, a spilled register or other"
        " memory of single threads, but for those that are named with what they break: they are"
        " right, and slower than they could be.  Behind a bar stands the most that some unit came"
        " to, as"
        f" [{RECORD.name}]({RECORD.name}) has it of each; `make compile-all` writes that, for every"
        " module, recipe and option.  Times are those of a processor, on the machine that compiled."
    )
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else {}
    said = dict(re.findall(r"^- `(\w+)`: (.*)$", README.read_text("utf-8"), re.MULTILINE))
    archs = (arch for arch in load([ROOT / "specs"]).archs.values() if arch.capability)
    for arch in sorted(archs, key=lambda each: (each.capability, each.name)):
        yield from _architecture(arch, record.get(arch.name, {}), said.get(arch.name, ""))


def _architecture(arch: ArchSpec, record: Mapping[str, Any], evidence: str) -> Iterator[str]:
    units = record.get("units", {})
    limits = ", ".join(
        f"{arch.limits[limit] >> 10} KiB of shared memory for a CTA"
        if limit == SHARED_MEMORY
        else f"{arch.limits[limit]} {escaped(limit)} of an SM"
        for limit in arch.limits
    )
    yield ""
    yield f"## {arch.name}"
    yield f"{escaped(arch.summary)}."
    yield ""
    yield f"- Code: `{arch.gencode}`, CUDA {arch.toolkit or 'of any version'} or newer"
    yield f"- Limits: {limits or 'none stated'}"
    yield f"- Evidence: {evidence or 'no bundle is committed'}"
    yield f"- Compiled: {_extent(record)}"
    for name, what in record.get("broken", {}).items():
        yield f"- Breaks its contract: `{name}`, {escaped('; '.join(what))}"
    yield ""
    yield (
        "| family | units | registers of a thread | KiB of shared memory | instructions"
        " | processor seconds | MiB of the compiler | kB of an object |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for family in _families(arch, units):
        own = [unit for unit in units.values() if unit["family"] == family]
        yield _family(family, own, arch.name)


def _extent(record: Mapping[str, Any]) -> str:
    """How much of an architecture is on record."""
    if not record:
        return "not on record"
    count, toolkit = len(record["units"]) + len(record["broken"]), record["toolkit"]
    if record["complete"]:
        return f"all {count} units of all {record['cells']} cells, with CUDA {toolkit}"
    if record["whole"]:
        return f"{count} units of {record['whole']} that all cells have, with CUDA {toolkit}"
    return f"{count} units of {record['cells']} cells with CUDA {toolkit}, a part of all"


def _families(arch: ArchSpec, units: Mapping[str, Any]) -> list[str]:
    """Templates of the families that an architecture lists or has units of, sorted."""
    listed = (family.template or name for name, family in arch.kernels.items())
    return sorted({*listed, *(unit["family"] for unit in units.values())})


def _family(name: str, units: Sequence[Mapping[str, Any]], arch: str) -> str:
    known = known_family(name)
    contracts = known.contracts if known else ()

    def most(key: str, scale: int = 1) -> str:
        found = [unit[key] for unit in units if unit[key] is not None]
        return f" \\| {max(found) / scale:.3g}" if found else ""

    def stated(text: Callable[[Contract], str]) -> str:
        words = {each.of: text(each) for each in contracts}
        if len({*words.values()}) == 1:
            return next(iter(words.values()))
        parts = (f"{word} where `{escaped(of)}`" if of else word for of, word in words.items())
        return ", ".join(part for part in parts if part)

    configured = known is not None and known.configured is not None

    def registers(contract: Contract) -> str:
        found = contract.registers_of(arch)
        return "as threads leave" if found is None else str(found)

    memory = "as stated" if configured else stated(lambda each: f"{each.shared_memory / 1024:g}")
    cells = (
        f"`{name}`",
        str(len(units)),
        stated(registers) + most("registers"),
        memory + most("shared_memory", 1024),
        stated(lambda each: " ".join(f"`{escaped(code)}`" for code in each.opcodes)),
        stated(lambda each: f"{each.cpu_seconds:g}") + most("cpu_seconds"),
        stated(lambda each: f"{each.gibibytes * 1024:g}") + most("mebibytes"),
        most("kilobytes").removeprefix(" \\| "),
    )
    return f"| {' | '.join(cells)} |"


PAGES: Mapping[str, Callable[[], Iterator[str]]] = {
    "specs.md": specs,
    "cli.md": command_line,
    "architectures.md": architectures,
}
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
