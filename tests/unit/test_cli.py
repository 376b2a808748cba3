"""The command line: what it parses, where it prints, and what it ends with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from fusegen import __version__, cli
from fusegen.build import gpu
from fusegen.build.toolchain import BuildError
from fusegen.checks.load import load
from fusegen.cli.options import KINDS
from fusegen.cli.verbs import VERBS
from fusegen.commands import build, listing
from fusegen.demo import bundle as demo_bundle
from fusegen.publish import paths
from fusegen.publish.publish import BusyError
from fusegen.spec.serving import arch_of

COMMANDS = sorted(VERBS)
SILU = ("--arch", "cpu", "--module", "silu", "--recipe", "bf16")


def run(*words: str | Path, env: dict[str, str | None] | None = None) -> Result:
    result = CliRunner().invoke(cli.program, [str(word) for word in words], env=env)
    print(result.exit_code, result.stderr)  # pytest shows it where a test fails
    return result


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command runs in an empty folder outside the checkout, and sees no GPU."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(gpu, "visible_capability", lambda: None)
    monkeypatch.setattr(demo_bundle, "visible_capability", lambda: None)
    return folder


@pytest.fixture
def bundle(elsewhere: Path) -> Path:
    """A generated bundle, named as a user at its place would name it."""
    assert run("generate", *SILU).exit_code == 0
    return Path("generated/cpu")


# Help


def subprocess_run(code: str) -> subprocess.CompletedProcess[str]:
    root = Path(cli.__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom fusegen.cli import main\nsys.argv = ['fusegen', '--help']\n"
        "try:\n    main()\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess_run(code)
    assert done.returncode == 0 and "Commands:" in done.stdout
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "fusegen" in loaded
    assert not loaded & {"yaml", "jinja2", "pydantic", "sympy", "torch", "rich", "filelock"}


def loaded(verb: str) -> click.Command:
    command = cli.program.get_command(click.Context(cli.program), verb)
    assert command is not None and command.name == verb
    return command


def test_the_verbs_are_listed_without_being_loaded() -> None:
    code = (
        "import sys\nfrom fusegen import cli\nfrom fusegen.cli.verbs import VERBS\n"
        "try:\n    cli.program(['--help'])\nfinally:\n"
        "    print(*({verb.module for verb in VERBS.values()} & {*sys.modules}), file=sys.stderr)"
    )
    done = subprocess_run(code)
    assert done.returncode == 0 and done.stderr.split() == []
    for name, verb in VERBS.items():
        assert re.search(rf"^  {name} +{re.escape(verb.summary)}$", done.stdout, re.MULTILINE)
    assert list(VERBS) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_verb_imports_nothing_heavy(command: str) -> None:
    code = (
        f"import sys\nfrom fusegen import cli\ntry:\n    cli.program(['{command}', '--help'])\n"
        "finally:\n    print(*sys.modules, file=sys.stderr)"
    )
    found = {name.partition(".")[0] for name in subprocess_run(code).stderr.split()}
    assert "fusegen" in found
    assert not found & {"yaml", "jinja2", "pydantic", "sympy", "torch", "rich", "filelock"}


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_ends_in_two_examples_that_parse(command: str, flag: str) -> None:
    done = run(command, flag)
    assert done.exit_code == 0
    head, _, tail = done.stdout.partition("\n  Examples:\n")
    assert head.startswith("Usage: ")
    examples = [line.strip() for line in tail.splitlines()]
    assert len(examples) == 2
    for example in examples:
        name, first, *words = example.split()
        assert (name, first) == ("fusegen", command)
        loaded(command).make_context(command, words)


def test_version() -> None:
    assert run("--version").stdout == f"fusegen, version {__version__}\n"


# Exit codes


@pytest.mark.slow
def test_unknown_words_end_with_the_closest() -> None:
    for words, hint in (
        (["generat"], "unknown command 'generat'; did you mean 'generate'?"),
        (["list", "recipe"], "unknown kind 'recipe'; did you mean 'recipes'?"),
        (["new", "recipes", "x"], "unknown kind 'recipes'; did you mean 'recipe'?"),
        (["explain", "silu", "bf16", "sm_90"], "unknown arch 'sm_90'; did you mean 'sm_90a'?"),
        (["explain", "silu", "bf16", "H100"], "unknown arch 'H100'; did you mean 'sm_90a'?"),
        (["plan", "--arch", "a100-sxm4-80gb"], "did you mean 'sm_80'?"),
        (["generate", "--arch", "h200", *SILU[2:]], "did you mean 'sm_90a'?"),
        (["plan", "--module", "linea"], "unknown module 'linea'; did you mean 'linear'?"),
        (["generate", "--target", "hoper"], "unknown target 'hoper'; did you mean 'hopper'?"),
        (["generate", "--chek"], "--check"),
    ):
        done = run(*words)
        assert done.exit_code == cli.ExitCode.USAGE, done.output
        assert hint.lower() in done.stderr.lower()
        assert done.stdout == ""


@pytest.mark.parametrize("command", ["plan", "generate"])
def test_native_without_a_gpu_lists_the_archs(command: str) -> None:
    done = run(command, "--arch", "native", "--module", "silu", "--recipe", "bf16")
    assert done.exit_code == cli.ExitCode.USAGE
    archs = ", ".join(load([paths.builtin_specs()]).archs)
    assert f"no visible NVIDIA GPU; name one of: {archs}" in done.stderr


def test_native_is_the_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "visible_capability", lambda: (9, 0))
    done = run("generate", "--arch", "native", "--module", "silu", "--recipe", "bf16")
    assert done.exit_code == 0 and Path("generated/sm_90a/silu__bf16.py").exists()
    monkeypatch.setattr(gpu, "visible_capability", lambda: (7, 5))
    done = run("plan", "--arch", "native")
    assert done.exit_code == cli.ExitCode.USAGE
    assert "the GPU has capability 7.5, which no arch runs on" in done.stderr


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_89"),
        ((12, 0), "sm_120a"),
        ((7, 5), None),
    ],
)
def test_the_latest_arch_that_a_gpu_runs_serves_it(
    capability: tuple[int, int], arch: str | None
) -> None:
    assert arch_of(capability, load([paths.builtin_specs()])) == arch
    assert arch_of(None, load([paths.builtin_specs()])) is None


def test_bad_specs() -> None:
    Path("mine/recipes").mkdir(parents=True)
    Path("mine/recipes/toy.yaml").write_text("edition: 2\nrecipe: toy\ncolour: red\n")
    done = run("validate", "--specs", "mine")
    assert done.stdout == ""
    assert "mine/recipes/toy.yaml:3:1: unknown key 'colour'" in done.stderr
    done = run("validate", "--specs", "mine", "--json")
    data = json.loads(done.stdout)
    assert done.exit_code == cli.ExitCode.SPEC and not data["valid"]
    places = [(p["file"], p["line"], p["column"]) for p in data["problems"]]
    assert ("mine/recipes/toy.yaml", 3, 1) in places


def test_a_template_that_is_in_two_folders(elsewhere: Path) -> None:
    Path("mine/bundle").mkdir(parents=True)
    Path("mine/bundle/README.md.j2").write_text("")
    done = run("generate", *SILU, "--templates", "mine")
    assert done.exit_code == cli.ExitCode.SPEC
    assert "template 'bundle/README.md.j2' is in" in done.stderr


def test_an_edited_bundle_is_refused_and_listed(bundle: Path) -> None:
    (bundle / "silu__bf16.py").write_text("mine = 1\n")
    done = run("generate", "--namespace", "acme")
    assert done.exit_code == cli.ExitCode.REFUSED
    assert re.search(r"^  silu__bf16\.py +changed by hand", done.stderr, re.MULTILINE)
    assert (bundle / "silu__bf16.py").read_text() == "mine = 1\n"
    assert 'NAMESPACE = "fusegen_cpu"' in (bundle / "_library.py").read_text()


def test_every_command_that_a_message_names_exists(bundle: Path) -> None:
    root = Path(cli.__file__).parents[3]
    folders = (root / "generator" / "fusegen", root / "templates")
    files = [p for f in folders for p in f.rglob("*") if p.suffix in (".py", ".j2", ".h", ".cuh")]
    texts = [path.read_text() for path in files]
    named = {word for text in texts for word in re.findall(r"`fusegen ([a-z][a-z-]*)", text)}
    named |= {
        word for text in texts for word in re.findall(r"(?:run|build|it): fusegen ([\w-]+)", text)
    }
    assert {"generate", "build"} <= named <= set(COMMANDS)


def test_a_busy_bundle(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object, **__: object) -> None:
        raise BusyError("somebody else is here")

    monkeypatch.setattr("fusegen.commands.generate.publish", busy)
    done = run("generate")
    assert (done.exit_code, done.stderr) == (4, "fusegen: somebody else is here\n")


def test_a_broken_lock(bundle: Path) -> None:
    (bundle / "fusegen.lock").write_text("{")
    for command in ("generate", "check"):
        done = run(command)
        assert done.exit_code == cli.ExitCode.REFUSED and "fusegen.lock" in done.stderr


@pytest.mark.slow
def test_a_target_mends_a_broken_selection(bundle: Path) -> None:
    lock = bundle / "fusegen.lock"
    data = json.loads(lock.read_text())
    lock.write_text(json.dumps(data | {"selection": {}}))
    assert run("generate").exit_code == cli.ExitCode.REFUSED
    assert run("generate", "--target", "cpu").exit_code == 0
    assert run("check").exit_code == 0


def test_nothing_to_build(bundle: Path) -> None:
    done = run("build", bundle)
    assert done.exit_code == cli.ExitCode.BUILD
    assert "generated/cpu: is a bundle for cpu; it has nothing to build" in done.stderr
    done = run("build", "generated")
    assert done.exit_code == cli.ExitCode.BUILD and "its bundles are for cpu" in done.stderr
    done = run("build", "generated/sm_90a")
    assert done.exit_code == cli.ExitCode.USAGE and "does not exist" in done.stderr
    assert run("build").exit_code == cli.ExitCode.USAGE
    assert run("build", bundle, "--jobs", "0").exit_code == cli.ExitCode.USAGE


def test_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the sky fell")

    monkeypatch.setattr(listing, "list_specs", fail)
    done = run("list", env={cli.TRACEBACK: None})
    assert done.exit_code == cli.ExitCode.INTERNAL
    assert "internal error: RuntimeError: the sky fell" in done.stderr
    assert "report it" in done.stderr and "Traceback" not in done.stderr
    assert "Traceback" in run("list", env={cli.TRACEBACK: "1"}).stderr


def test_a_file_where_the_bundle_is_to_be(elsewhere: Path) -> None:
    Path("generated").mkdir()
    Path("generated/cpu").write_text("a file")
    done = run("generate", *SILU)
    assert done.exit_code == cli.ExitCode.REFUSED
    assert done.stderr == "fusegen: generated/cpu/fusegen.lock: Not a directory\n"


def test_a_disk_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "generated/cpu")

    monkeypatch.setattr("fusegen.commands.generate.publish", full)
    done = run("generate", *SILU)
    assert done.exit_code == cli.ExitCode.REFUSED
    assert done.stderr == "fusegen: generated/cpu: No space left on device\n"


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(listing, "list_specs", interrupt)
    assert run("list").exit_code == cli.ExitCode.INTERRUPTED


# Answers


@pytest.mark.slow
def test_list() -> None:
    modules = json.loads(run("list", "modules", "--json").stdout)["modules"]
    names = [entry["name"] for entry in modules]
    assert names == sorted(names) and "grouped_mlp" in names
    everything = json.loads(run("list", "--json").stdout)
    assert (everything.pop("version"), everything.pop("fusegen")) == (1, __version__)
    assert tuple(everything) == KINDS == tuple(kind.folder for kind in generation_kinds())
    for entries in everything.values():
        assert all(entry["name"] and entry["summary"] and entry["file"] for entry in entries)
    options = json.loads(run("list", "options", "--json").stdout)["options"]
    assert [each["name"] for each in options][-1] == "debug"
    assert options[-1]["choices"].keys() == {"no_statistics", "debug"}
    shown = run("list", "options").stdout
    assert "\n  own_amax (default): Those of the rank itself\n" in shown
    assert "\n  recipes: fp8_delayed\n" in shown
    assert re.search(r"^archs/sm_90a +Hopper", run("list").stdout, re.MULTILINE)
    assert re.search(r"^sm_90a +Hopper", run("list", "archs").stdout, re.MULTILINE)


def generation_kinds() -> list[Any]:
    from fusegen.spec.kinds import SpecKind

    return list(SpecKind)


def test_plan() -> None:
    data = json.loads(run("plan", "--target", "hopper", "--json").stdout)
    assert data["version"] == 1
    for row in data["modules"]:
        assert list(row) == ["module", "recipe", "arch", "status", "reason", "kernels", "saved"]
    row = next(row for row in data["modules"] if (row["module"], row["recipe"]) == ("silu", "bf16"))
    assert (row["arch"], row["status"], row["saved"]) == ("sm_90a", "native", ["x"])
    assert len(row["kernels"]) == len(set(row["kernels"])) > 0
    narrowed = json.loads(run("plan", *SILU, "--json").stdout)
    assert [row["kernels"] for row in narrowed["modules"]] == [[]]
    assert not list(Path().iterdir())


def test_explain_says_what_fusions_did() -> None:
    words = ("explain", "grouped_mlp", "fp8_block", "sm_90a")
    done = run(*words, "--no-fusion", "activation_gradient_quantize")
    unwrapped = re.sub(r"\n {9,}", " ", done.stdout.split("\nfusions\n")[1])
    told = {line.split()[0]: line for line in unwrapped.splitlines()}
    assert "fc2: quantize -> a_rowwise" in told["activation_quantize"]
    assert told["activation_quantize"].endswith(" applied")
    assert "left out by --no-fusion" in told["activation_gradient_quantize"]
    assert "not applied: the backward has no pointwise" in told["recomputed_activation_quantize"]
    rewrites = json.loads(run(*words, "--json").stdout)["plan"]["rewrites"]
    assert [each["rule"] for each in rewrites if not each["reason"]] == [
        "activation_quantize",
        "activation_gradient_quantize",
    ]


def test_fusions_are_left_out_or_put_back() -> None:
    done = run("generate", *SILU, "--no-fusion", "activation_quantise")
    assert done.exit_code == cli.ExitCode.USAGE
    assert "did you mean 'activation_quantize'?" in done.stderr
    done = run("generate", *SILU, "--no-fusion", "activation_quantize", "--all-fusions")
    assert done.exit_code == cli.ExitCode.USAGE and "remove it" in done.stderr


def test_explain() -> None:
    text = run("explain", "silu", "bf16", "cpu").stdout
    assert text.startswith("silu__bf16 on cpu: native")
    data = json.loads(run("explain", "silu", "bf16", "cpu", "--json").stdout)
    assert "\n".join(data["text"]) + "\n" == text
    buffers = {buffer["name"]: buffer for buffer in data["plan"]["buffers"]}
    assert buffers["x"]["shape"] == "[T...]"
    forward, _ = data["plan"]["directions"]
    assert [[step["primitive"] for step in each["steps"]] for each in forward["segments"]] == [
        ["pointwise"]
    ]


@pytest.mark.slow
def test_generate_shows_lists_and_diffs_without_writing(bundle: Path) -> None:
    (bundle / "__init__.py").unlink()
    before = sorted(bundle.rglob("*"))
    dry = run("generate", "--dry-run")
    assert dry.exit_code == 0
    assert re.search(r"^create +generated/cpu/__init__\.py$", dry.stdout, re.MULTILINE)
    shown = run("generate", "--diff")
    assert shown.exit_code == 0 and "+++ b/cpu/__init__.py\n" in shown.stdout
    assert "\x1b" not in shown.stdout
    checked = run("generate", "--check", "--json")
    assert checked.exit_code == cli.ExitCode.DRIFT
    data = json.loads(checked.stdout)
    assert data["version"] == 1 and data["drifted"]
    (report,) = data["bundles"]
    assert report["changes"] == [{"path": "__init__.py", "kind": "create"}]
    assert (report["arch"], report["namespace"], report["written"]) == ("cpu", "fusegen_cpu", False)
    assert sorted(bundle.rglob("*")) == before
    written = run("generate")
    assert written.exit_code == 0 and "1 created" in written.stdout
    assert run("generate", "--check").exit_code == 0


@pytest.mark.slow
def test_orphans_go_unless_told_otherwise(bundle: Path) -> None:
    run("generate", "--arch", "cpu", "--module", "swiglu", "--recipe", "bf16")
    kept = run("generate", *SILU, "--remove", "--no-prune")
    assert kept.exit_code == 0 and (bundle / "silu__bf16.py").exists()
    assert run("generate").exit_code == 0 and not (bundle / "silu__bf16.py").exists()


def test_a_new_layout_is_accepted_on_request(bundle: Path) -> None:
    path = bundle / "silu__bf16.py"
    text = path.read_text()
    path.write_text(text.replace("import torch\n", "import   torch\n", 1))
    done = run("generate")
    assert done.exit_code == cli.ExitCode.REFUSED and "--accept-format" in done.stderr
    assert run("generate", "--accept-format").exit_code == 0
    assert path.read_text() == text


@pytest.mark.slow
def test_check_says_what_why_and_how_to_fix(bundle: Path) -> None:
    assert run("check").exit_code == 0
    run("generate", *SILU, "--out", "vendored")
    Path("vendored/cpu/README.md").unlink()
    Path("vendored/cpu/silu__bf16.py").write_text("mine = 1\n")
    done = run("check", "vendored/cpu", bundle)
    assert done.exit_code == cli.ExitCode.DRIFT
    for line in (
        "vendored/cpu is not what its specs and templates give:",
        "  missing         README.md",
        "  edited          silu__bf16.py",
        "+++ b/cpu/README.md",
        "-mine = 1",
    ):
        assert f"{line}\n" in done.stdout
    assert "fusegen generate --out" not in done.stdout, "which would refuse, for the edited file"
    assert "Why it matters: " in done.stdout and "generated/cpu" not in done.stdout
    assert "Ways out:" in done.stderr and "To fix it:" not in done.stdout
    Path("vendored/cpu/silu__bf16.py").unlink()
    done = run("check", "vendored")
    assert done.stdout.endswith("To fix it:\nfusegen generate --out vendored\n")
    assert run("generate", "--out", "vendored").exit_code == 0
    assert run("check", "--out", "vendored").exit_code == 0


def test_check_needs_a_bundle() -> None:
    assert run("check").exit_code == cli.ExitCode.USAGE
    done = run("check", "nowhere")
    assert done.exit_code == cli.ExitCode.USAGE and "is not a bundle" in done.stderr


def test_new_prints_the_path_and_the_next_steps() -> None:
    done = run("new", "recipe", "mine", "--from", "bf16")
    assert (done.exit_code, done.stdout) == (0, "specs/recipes/mine.yaml\n")
    assert "fusegen validate --specs specs" in done.stderr
    assert run("new", "recipe", "mine").exit_code == cli.ExitCode.REFUSED
    assert run("new", "recipe", "Mine").exit_code == cli.ExitCode.USAGE
    assert run("validate", "--specs", "specs").exit_code == 0


# Colour


@pytest.mark.slow
def test_colour_needs_a_terminal_and_no_wish_to_the_contrary(bundle: Path) -> None:
    (bundle / "README.md").unlink()
    words = ["generate", "--diff"]
    assert "\x1b" not in run(*words, env={"NO_COLOR": None}).stdout
    plain = CliRunner().invoke(cli.program, words, color=True, env={"NO_COLOR": "1"})
    coloured = CliRunner().invoke(cli.program, words, color=True, env={"NO_COLOR": None})
    assert "\x1b" not in plain.stdout and "\x1b[32m" in coloured.stdout


# The GPU, the build, the demo


@pytest.mark.parametrize(
    ("answer", "env", "expected"),
    [
        ("echo 9.0", {}, (9, 0)),
        ("echo 12.1; echo 9.0", {}, (12, 1)),
        ("echo $3", {"CUDA_VISIBLE_DEVICES": "3,1"}, None),
        ("test $3 = --id=3 && echo 8.6", {"CUDA_VISIBLE_DEVICES": "3,1"}, (8, 6)),
        ("test -z $3 && echo 9.0", {"CUDA_VISIBLE_DEVICES": "MIG-1"}, (9, 0)),
        ("echo 9.0", {"CUDA_VISIBLE_DEVICES": ""}, None),
        ("echo 9.0", {"CUDA_VISIBLE_DEVICES": "-1"}, None),
        ("echo 9.0; exit 9", {}, None),
        ("echo '[N/A]'", {}, None),
        ("echo 'no devices were found'", {}, None),
    ],
)
def test_the_driver_is_asked_for_the_visible_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    env: dict[str, str],
    expected: tuple[int, int] | None,
) -> None:
    monkeypatch.undo()
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    assert gpu.visible_capability({"PATH": str(tmp_path), **env}) == expected
    assert gpu.visible_capability({"PATH": str(tmp_path / "cwd"), **env}) is None


class Tools:
    def describe(self) -> str:
        return "a compiler of glass"


def test_build_says_with_what_and_shows_every_unit(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusegen.build import library
    from fusegen.build.objcache import Report

    def fake(folder: Path, **named: Any) -> library.BuildReport:
        progress = named["progress"]
        progress.start(2)
        progress.unit_done("kernels/a.cu", cached=False, seconds=1.5)
        progress.unit_done("b.cpp", cached=True, seconds=2.5)
        progress.link_done(folder / "lib" / "x.so", cached=False)
        report = Report(1.5, 0, (), ())
        units = (
            library.UnitReport("kernels/a.cu", False, report),
            library.UnitReport("b.cpp", True, report),
        )
        return library.BuildReport(
            folder / "lib" / "x.so", True, 1.6, named["toolchain"].describe(), units
        )

    monkeypatch.setattr(build, "find_tools", lambda bundles: Tools())
    monkeypatch.setattr("fusegen.commands.build.build_bundle", fake)
    (bundle / "csrc").mkdir()
    (bundle / "csrc" / "sources.cmake").touch()
    done = run("build", bundle, "--jobs", "1")
    assert done.exit_code == 0
    assert done.stdout == "generated/cpu/lib/x.so  linked: 2 units, 1 cached, 1.6 s\n"
    assert "building with a compiler of glass" in done.stderr
    assert "[1/2] kernels/a.cu  1.5 s" in done.stderr and "b.cpp" not in done.stderr
    data = json.loads(run("build", bundle, "--json").stdout)
    assert [unit["name"] for unit in data["bundles"][0]["units"]] == ["kernels/a.cu", "b.cpp"]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What the demo would have trained with."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "fusegen.demo.run.run_demo",
        lambda folder, arch, **named: calls.append({"folder": folder, "arch": arch, **named}),
    )
    return calls


@pytest.mark.slow
def test_demo_runs_on_the_cpu_without_a_gpu(
    trained: list[dict[str, Any]], tmp_path: Path, elsewhere: Path
) -> None:
    done = run("demo", "--steps", "3", "--output", "curves.svg", "--json")
    assert done.exit_code == 0, done.output
    folder = tmp_path / "cache" / "demo" / "cpu"
    assert trained == [
        {
            "folder": folder,
            "arch": "cpu",
            "steps": 3,
            "output": Path("curves.svg"),
            "as_json": True,
        }
    ]
    assert (folder / "moe_layer__bf16.py").exists()
    assert (folder / "router_mixtral__bf16.py").exists()
    assert list(elsewhere.iterdir()) == []


@pytest.mark.slow
def test_demo_builds_for_the_visible_gpu(
    trained: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []
    monkeypatch.setattr(demo_bundle, "visible_capability", lambda: (9, 0))
    monkeypatch.setattr(demo_bundle, "find_tools", lambda bundles: Tools())
    monkeypatch.setattr(demo_bundle, "build", lambda bundle, **_: built.append(bundle))
    assert run("demo", "--out", tmp_path / "out").exit_code == 0
    assert built == [tmp_path / "out" / "sm_90a"]
    assert trained[0]["arch"] == "sm_90a" and trained[0]["folder"] == built[0]


@pytest.mark.slow
def test_demo_falls_back_to_the_cpu_and_says_why(
    trained: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(bundles: object) -> None:
        raise BuildError("nvcc was not found", remedy="pip install nvcc")

    monkeypatch.setattr(demo_bundle, "visible_capability", lambda: (9, 0))
    monkeypatch.setattr(demo_bundle, "find_tools", missing)
    done = run("demo")
    assert done.exit_code == 0 and trained[0]["arch"] == "cpu"
    assert "so the demo runs on the CPU: nvcc was not found" in done.stderr
    assert "run: pip install nvcc" in done.stderr
    named = run("demo", "--arch", "sm_90a")
    assert named.exit_code == cli.ExitCode.BUILD and len(trained) == 1


def test_every_parameter_of_every_command_has_help() -> None:
    for name in COMMANDS:
        for parameter in loaded(name).params:
            if isinstance(parameter, click.Option):
                assert parameter.help and parameter.help.endswith("."), parameter.name


def test_check_inside_the_checkout_covers_the_schemas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusegen.spec import schema as schemas

    specs = tmp_path / "checkout" / "specs"
    schemas.write(specs)
    monkeypatch.chdir(specs)
    monkeypatch.setattr(paths, "builtin_specs", lambda: specs)
    monkeypatch.setattr(paths, "inside_checkout", lambda folder: True)
    assert run("check").exit_code == 0
    (specs / "schema" / "op.schema.json").unlink()
    (specs / "schema" / "none.schema.json").write_text("{}\n")
    (specs / "schema" / "arch.schema.json").write_text("{}\n")
    done = run("check")
    assert done.exit_code == cli.ExitCode.DRIFT and "fusegen generate\n" in done.stdout
    for name, kind in (("op", "missing"), ("none", "extra"), ("arch", "changed")):
        assert f"{specs / 'schema' / name}.schema.json is {kind}\n" in done.stdout
    assert run("generate", "--check").exit_code == cli.ExitCode.DRIFT
    assert run("generate").exit_code == 0
    assert run("check").exit_code == 0


# Specs of which some are wrong

BAD_OP = """\
edition: 2
op: bad
summary: It names a function that there is not
dims: {T: elements}
inputs: {x: {shape: [T...]}}
outputs: {y: {shape: [T...]}}
pointwise: {y: nofunc(x)}
"""
GOOD_OP = BAD_OP.replace("bad", "good").replace("nofunc(x)", "x * x")
SPECS = {
    "ops/bad.yaml": BAD_OP,
    "ops/good.yaml": GOOD_OP,
    "ops/notes.txt": "no spec",
    "modules/bad.yaml": "edition: 2\nmodule: bad\nclass: Bad\nop: bad\n",
    "modules/good.yaml": "edition: 2\nmodule: good\nclass: Good\nop: good\n",
    "recipes/torn.yaml": "edition: [",
    "targets/all_mine.yaml": (
        "edition: 2\ntarget: all_mine\nsummary: Mine\n"
        "archs: [cpu]\nmodules: [good, bad]\nrecipes: [bf16]\n"
    ),
}
PLACES = ("mine/ops/bad.yaml:7:16: ", "mine/ops/notes.txt:1:1: ", "mine/recipes/torn.yaml:")


@pytest.fixture
def mine(elsewhere: Path) -> Path:
    """A spec folder of which a part is wrong."""
    for name, text in SPECS.items():
        path = elsewhere / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return elsewhere / "mine"


def cell_words(module: str, recipe: str = "bf16") -> list[str]:
    return ["--arch", "cpu", "--module", module, "--recipe", recipe]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["list", "modules"],
        ["explain", "good", "bf16", "cpu"],
        ["plan", "--arch", "cpu", "--recipe", "bf16"],
        ["generate", *cell_words("good")],
        ["generate", *cell_words("silu")],
        ["generate", "--target", "cpu"],
    ],
    ids=" ".join,
)
def test_what_is_wrong_elsewhere_is_a_warning(mine: Path, words: list[str]) -> None:
    done = run(*words, "--specs", mine)
    assert done.exit_code == cli.ExitCode.OK, done.stderr
    warned = [line for line in done.stderr.splitlines() if line.startswith("fusegen: warning: ")]
    assert len(warned) == len(PLACES)
    for line, place in zip(warned, PLACES, strict=True):
        assert line.startswith(f"fusegen: warning: {place}")
    assert "all that names it" in warned[0]
    if words[0] == "list":
        assert "good" in done.stdout and "bad" not in done.stdout


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["explain", "bad", "bf16", "cpu"], PLACES[0]),
        (["explain", "good", "torn", "cpu"], PLACES[2]),
        (["plan", "--arch", "cpu", "--module", "bad"], PLACES[0]),
        (["generate", *cell_words("bad")], PLACES[0]),
        (["generate", *cell_words("silu", "torn")], PLACES[2]),
        (["generate", "--target", "all_mine"], PLACES[0]),
    ],
    ids=lambda words: " ".join(words),
)
def test_what_a_request_needs_may_not_be_wrong(mine: Path, words: list[str], place: str) -> None:
    done = run(*words, "--specs", mine)
    assert done.exit_code == cli.ExitCode.SPEC
    assert done.stderr.splitlines()[-1].startswith(f"fusegen: {place}")
    assert done.stdout == ""


@pytest.mark.slow
def test_a_bundle_is_checked_beside_what_is_wrong(mine: Path) -> None:
    assert run("generate", *cell_words("good"), "--specs", mine).exit_code == 0
    done = run("check", "--specs", mine)
    assert (done.exit_code, done.stderr.count("warning: ")) == (cli.ExitCode.OK, len(PLACES))
    (mine / "ops" / "good.yaml").write_text(BAD_OP.replace("bad", "good"))
    done = run("check", "--specs", mine)
    assert done.exit_code == cli.ExitCode.SPEC
    assert done.stderr.splitlines()[-1].startswith("fusegen: mine/ops/good.yaml:7:16: ")


@pytest.mark.slow
def test_a_spec_is_begun_beside_what_is_wrong(mine: Path) -> None:
    done = run("new", "op", "another", "--specs", mine)
    assert done.exit_code == cli.ExitCode.OK
    assert done.stderr.count("warning: ") == len(PLACES)
    for words in (
        ["module", "another_bad", "--from", "bad"],
        ["recipe", "whole", "--from", "torn"],
    ):
        done = run("new", *words, "--specs", mine)
        assert done.exit_code == cli.ExitCode.SPEC
        assert not list(mine.rglob(f"{words[1]}.yaml"))


def test_validate_says_everything(mine: Path) -> None:
    done = run("validate", "--specs", mine)
    assert done.exit_code == cli.ExitCode.SPEC
    assert [
        line.removeprefix("fusegen: ")[: len(p)]
        for line, p in zip(done.stderr.splitlines(), PLACES, strict=True)
    ] == list(PLACES)


@pytest.mark.slow
def test_a_name_that_is_taken_is_nobodys(mine: Path) -> None:
    text = (Path(cli.__file__).parents[3] / "specs" / "ops" / "silu.yaml").read_text()
    (mine / "ops" / "silu.yaml").write_text(text)
    done = run("generate", *cell_words("silu"), "--specs", mine)
    assert done.exit_code == cli.ExitCode.SPEC
    assert "op 'silu' is already defined" in done.stderr.splitlines()[-1]
    assert run("generate", *cell_words("gelu"), "--specs", mine).exit_code == cli.ExitCode.OK


@pytest.mark.slow
@pytest.mark.parametrize("words", [["generate", *SILU], ["new", "recipe", "mine"]], ids=" ".join)
def test_a_write_that_fails_names_the_file(elsewhere: Path, words: list[str]) -> None:
    """Writing to a full disk fails without a name; so does a file that may not grow."""
    program = (
        "import resource, sys; from fusegen import cli; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200)); cli.main()"
    )
    cache = elsewhere / "cache"
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env=os.environ | {"PYTHONPATH": str(paths.PACKAGE.parent), "FUSEGEN_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == cli.ExitCode.REFUSED, done.stderr
    said = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"fusegen: /.+/\w+\.(py|yaml): File too large", said)
