"""`fusegen new`: one commented YAML file to start a spec from."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..build.toolchain import MIN_NVCC, dotted
from ..checks.load import SpecWarning, load_usable
from ..emit.text.fold import LINE_LENGTH, fold
from ..families.gpus import gpu_called
from ..families.limits import hardware_limits
from ..families.registry import known_family
from ..ir.naming import camel
from ..math.expression import CALLABLE
from ..publish import paths
from ..spec.arch import ArchSpec, Reach, capability_of, isa_of
from ..spec.editions import CURRENT
from ..spec.files import named, resolve
from ..spec.kinds import SCHEMA_FOLDER, SpecKind
from ..spec.load import SpecSet, adapter
from ..spec.meanings import meanings_in
from ..spec.schema import editor_line, file_of
from ..spec.usage import UsageError, command_line, known, spec_named
from .fitting import with_fitting_points
from .fix_specs import rewrite_of

KINDS = (SpecKind.RECIPES, SpecKind.OPS, SpecKind.ARCHS, SpecKind.MODULES)


class ExistsError(Exception):
    """The file to write is already there; it stays as it is."""


@dataclass(frozen=True, slots=True)
class Scaffold:
    """A new spec file.

    Attributes:
        path: of the file.
        text: what it holds.
        steps: what to do next, one line each.
    """

    path: Path
    text: str
    steps: tuple[str, ...]


def new(kind: str, name: str, *, origin: str | None = None, folder: Path | None = None) -> Scaffold:
    """Write `<folder>/<kind>s/<name>.yaml` and check it against all other specs.

    Args:
        kind: recipe, op, arch or module.
        name: of the spec and its file.
        origin: spec to copy with its comments; above every key without one stands what it means.
            Without an origin a minimal spec is written.
        folder: spec folder to write to; the checkout's own inside a checkout, else `specs`.

    Raises:
        UsageError: an unknown kind or origin, or a name that no such spec can have.
        ExistsError: the file, or a spec of that name, exists.
        SpecError: the new file would not be valid, or what it is made from is not.
    """
    which = {each.key: each for each in KINDS}[known("kind", kind, [each.key for each in KINDS])]
    target = folder or default_folder()
    _check_name(which, name)
    path = target / which.folder / f"{name}.yaml"
    if os.path.lexists(path):
        raise ExistsError(f"{path} exists; choose another name, or edit that file")
    folders = _folders(target)
    specs = load_usable(folders)
    if name in specs.of(which):
        place = specs.source(which, name).loc(which.key)
        raise ExistsError(f"{which.key} {name!r} is already at {place}; choose another name")
    text = _copy(which, name, origin, specs, folders) if origin else _MINIMAL[which](name, specs)
    text = f"{editor_line(which.key)}\n{text}"
    _validate(which, name, text, folders)
    path.parent.mkdir(parents=True, exist_ok=True)
    with named(path):
        path.write_text(text, encoding="utf-8", newline="\n")
    steps = _next(which, name, path, target)
    if not (target / SCHEMA_FOLDER / file_of(which.key)).is_file():
        steps = (command_line("schema", "--specs", target), *steps)
    return Scaffold(path, text, steps)


def default_folder() -> Path:
    """The checkout's spec folder inside a checkout, `specs` in the working directory elsewhere."""
    if paths.inside_checkout(Path.cwd()):
        return paths.builtin_specs()
    return Path(paths.SPECS)


def _folders(target: Path) -> tuple[Path, ...]:
    builtin = paths.builtin_specs()
    resolved = resolve(target)
    return (builtin, resolved) if resolved.is_dir() and resolved != builtin else (builtin,)


def _check_name(kind: SpecKind, name: str) -> None:
    schema = adapter(kind.spec).json_schema()["properties"][kind.key]
    pattern, longest = schema["pattern"], schema.get("maxLength", 40)
    if not re.fullmatch(pattern, name) or len(name) > longest:
        raise UsageError(
            f"{name!r} cannot name {_article(kind)}: expected at most {longest} characters that "
            f"match {pattern}{_meant(kind, name)}"
        )


def _meant(kind: SpecKind, name: str) -> str:
    """The end of a message about a GPU's name where an architecture's was to be."""
    gpu = gpu_called(name) if kind is SpecKind.ARCHS else None
    return f"; did you mean 'sm_{gpu.capability[0]}{gpu.capability[1]}'?" if gpu else ""


def _article(kind: SpecKind) -> str:
    return f"an {kind.key}" if kind.key[0] in "aeiou" else f"a {kind.key}"


def _copy(kind: SpecKind, name: str, origin: str, specs: SpecSet, folders: Sequence[Path]) -> str:
    spec_named(specs, kind, origin)
    written = Path(specs.source(kind, origin).file)
    if written.stem != origin:
        raise UsageError(
            f"{origin!r} is a variant in {written}; add a variant there, or copy the module:"
            f" --from {written.stem}"
        )
    files = [folder / kind.folder / f"{origin}.yaml" for folder in folders]
    file = next(file for file in files if file.is_file())
    older = rewrite_of(kind, file, str(file))
    text = older.after if older else file.read_text(encoding="utf-8")
    text = _set(text, kind.key, name)
    if kind is SpecKind.MODULES:
        text = _set(text, "class", camel(name))
        text = re.sub(r"^variants:.*\n(?:[ #].*\n|\s*\n)*", "", text, flags=re.MULTILINE)
    if kind is SpecKind.ARCHS and name.startswith("sm_"):
        for key, value in _gpu(name, specs.archs[origin]).items():
            text = _set(text, key, value)
        text = _without_foreign_kernels(text, name, specs.archs[origin])
        text = with_fitting_points(
            text, specs.archs[origin], isa_of(name), capability_of(name) or (0, 0)
        )
    return _explained(kind, text)


_PLAIN = ("edition", "summary")
"""Keys that every spec has, of which a comment would say nothing new."""
_COMMENT = LINE_LENGTH - len("# ")


def _explained(kind: SpecKind, text: str) -> str:
    """The text with the meaning of each key above it, where that stands first, without a comment.

    Keys within braces are left alone.
    """
    text = re.sub(r"^# yaml-language-server:.*\n", "", text, flags=re.MULTILINE)
    meanings = {place.line: place for place in meanings_in(kind, text)}
    lines: list[str] = []
    for number, line in enumerate(text.splitlines()):
        place = meanings.get(number)
        said = bool(lines) and lines[-1].lstrip().startswith("#")
        if place and place.key not in (*_PLAIN, kind.key) and not said:
            indent = " " * place.column
            words = fold(f"{place.key}: {place.meaning}.", 0, _COMMENT - place.column)
            lines += (f"{indent}# {part}" for part in words)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _without_foreign_kernels(text: str, name: str, origin: ArchSpec) -> str:
    """The copy without families that use instructions which the new architecture has not."""
    foreign = {
        family
        for family, spec in origin.kernels.items()
        if (known := known_family(spec.template or family))
        and known.cannot_run_on(isa_of(name), capability_of(name) or (0, 0))
    }
    keys = foreign if foreign < {*origin.kernels} else foreign | {"kernels"}
    for key in sorted(keys):
        # Comments above, the key, and all lines that are indented further.
        text = re.sub(
            rf"^(?:( *)#.*\n)*( *){key}:.*\n(?:\2 .*\n|\s*\n)*", "", text, flags=re.MULTILINE
        )
    return text


def _set(text: str, key: str, value: str) -> str:
    """Replace the value of a top-level key, keeping the comment behind it."""
    return re.sub(
        rf"^{key}:[ \t]*[^#\n]*?([ \t]*#.*)?$",
        lambda match: f"{key}: {value}{match[1] or ''}",
        text,
        count=1,
        flags=re.MULTILINE,
    )


def _gpu(name: str, origin: ArchSpec | None = None) -> dict[str, str]:
    """The facts that the name of a GPU architecture states, with PTX where the origin has it."""
    code = isa_of(name).removeprefix("sm_")
    ptx = origin is not None and origin.reach is Reach.LATER and not code.endswith("a")
    codes = f"[sm_{code},compute_{code}]" if ptx else f"sm_{code}"
    limits = hardware_limits(capability_of(name)).items()
    toolkit = MIN_NVCC.get(isa_of(name), max(MIN_NVCC.values()))
    return {
        "gencode": f"arch=compute_{code},code={codes}",
        "toolkit": f'"{dotted(toolkit)}"',
        "limits": f"{{{', '.join(f'{limit}: {number}' for limit, number in limits)}}}",
    }


def _validate(kind: SpecKind, name: str, text: str, folders: Sequence[Path]) -> None:
    """Check the text among all other specs before anything is written."""
    with tempfile.TemporaryDirectory(prefix="fusegen-") as scratch:
        # A folder of the usual name, so that messages name the file as they would at its place.
        trial = Path(scratch) / paths.SPECS
        (trial / kind.folder).mkdir(parents=True)
        file = trial / kind.folder / f"{name}.yaml"
        with named(file):
            file.write_text(text, encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SpecWarning)
            load_usable((*folders, trial)).require(kind, name)


def _next(kind: SpecKind, name: str, path: Path, target: Path) -> tuple[str, ...]:
    builtin = resolve(target) == paths.builtin_specs()
    option = () if builtin else ("--specs", target)
    edit = f"edit {shlex.quote(str(path))}"
    check = command_line("validate", *option)
    match kind:
        case SpecKind.OPS:
            return (edit, check, command_line("new", "module", name, *option))
        case SpecKind.MODULES:
            module, recipe = name, "bf16"
        case SpecKind.RECIPES:
            module, recipe = "grouped_linear", name
        case _:
            return (edit, check, command_line("plan", "--arch", name, *option))
    words = ("--arch", "cpu", "--module", module, "--recipe", recipe)
    return (edit, check, command_line("generate", *words, *option))


def _minimal_recipe(name: str, specs: SpecSet) -> str:
    return f"""\
edition: {CURRENT}
recipe: {name}
summary: Say in one line what is quantised and how
source: Where the recipe was published
# Where partial sums of each GEMM are kept: fp32, fast or split_128.
gemm: {{fprop: fp32, dgrad: fp32, wgrad: fp32}}
# Largest relative Frobenius errors that the generated tests accept: a GEMM against float64 of
# the operands it read, a whole module against float64 of its inputs, sums kept in fp32.
tolerance: {{gemm: 4.0e-3, end_to_end: 1.0e-2, float32: 5.0e-5}}
# How the operands of the GEMMs are quantised, by role: input, weight, grad_output. A role that
# is not named stays in the module's own type. For example:
# roles:
#   input:
#     format: e4m3
#     block: [1, 128]
#     scale: {{dtype: float32, rule: max_over_amax}}
"""


def _minimal_op(name: str, specs: SpecSet) -> str:
    return f"""\
edition: {CURRENT}
op: {name}
summary: Say in one line what y is
# Symbols of the shapes, each with the keyword it has in a constructor.
dims: {{T: rows, D: width}}
# `T...` stands for any number of leading dimensions.
inputs:
  x: {{shape: [T..., D]}}
outputs:
  y: {{shape: [T..., D]}}
# One expression per output; the backward is derived from it. Known functions:
# {", ".join(CALLABLE)}.
# An op that multiplies matrices has `forward` and `backward` steps instead: begin one with
# `fusegen new op NAME --from grouped_linear`.
pointwise:
  y: relu(x) * relu(x)
"""


def _minimal_module(name: str, specs: SpecSet) -> str:
    specs.require(SpecKind.OPS, name)
    op = name if name in specs.ops else next(iter(specs.ops))
    return f"""\
edition: {CURRENT}
module: {name}
# The name of the generated torch.nn.Module.
class: {camel(name)}
# One op, whose sizes and inputs become the module's. For several ops in a row write `summary`,
# `dims`, `inputs` and a `chain` instead: begin one with `fusegen new module NAME --from mlp`, an
# expert MLP with `--from grouped_mlp`.
op: {op}
"""


def _minimal_arch(name: str, specs: SpecSet) -> str:
    if not name.startswith("sm_"):
        raise UsageError(f"{name!r} cannot be added; expected the name of a GPU, such as sm_86")
    facts = _gpu(name)
    return f"""\
edition: {CURRENT}
arch: {name}
summary: Say which GPUs these are
# What nvcc is told, and the oldest CUDA toolkit that knows the architecture.
gencode: {facts["gencode"]}
toolkit: {facts["toolkit"]}
# Hardware limits by name, for people and tests: shared memory of a block in bytes, registers.
limits: {facts["limits"]}
# Families of kernels, by the template that prints them. Until one implements the steps of a module,
# that module is unsupported here; `fusegen plan --arch {name}` says why. The templates that come
# with fusegen need compute capability 8.0. For example:
# kernels:
#   group_sum:
#     implements: [group_sum, column_sum]
#     row_alignment: 8
#   pointwise:
#     implements: [pointwise, pointwise_grad]
"""


_MINIMAL: dict[SpecKind, Callable[[str, SpecSet], str]] = {
    SpecKind.RECIPES: _minimal_recipe,
    SpecKind.OPS: _minimal_op,
    SpecKind.MODULES: _minimal_module,
    SpecKind.ARCHS: _minimal_arch,
}
