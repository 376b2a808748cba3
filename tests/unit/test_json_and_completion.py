"""Answers and errors as JSON, and what shells complete."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from fusegen import __version__, cli
from fusegen.cli import exits
from fusegen.cli.verbs import VERBS
from fusegen.commands import listing
from fusegen.options import OPTIONS
from fusegen.passes.pipeline import PASSES
from fusegen.publish.publish import BusyError

SILU = ("--arch", "cpu", "--module", "silu", "--recipe", "bf16")


def run(*words: str) -> Result:
    result = CliRunner().invoke(cli.program, list(words))
    print(result.exit_code, result.stderr)
    return result


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs in an empty folder outside the checkout."""
    monkeypatch.chdir(tmp_path)


# JSON


def test_every_verb_answers_in_json() -> None:
    for verb in VERBS:
        done = run(verb, "--help")
        assert re.search(r"--json +Answer in JSON, errors too\.", done.stdout), verb


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["list", "recipes"], {"recipes"}),
        (["list", "options"], {"options"}),
        (["list", "extensions"], {"extensions"}),
        (["plan", *SILU], {"modules"}),
        (["explain", "silu", "bf16", "cpu", "--after", "math"], {"after", "text"}),
        (["validate"], {"valid", "problems", "counts"}),
        (["new", "recipe", "mine"], {"path", "next"}),
        (["generate", *SILU, "--dry-run"], {"drifted", "bundles", "schemas"}),
    ],
)
def test_an_answer_begins_with_the_versions(words: list[str], keys: set[str]) -> None:
    done = run(*words, "--json")
    data = json.loads(done.stdout)
    assert list(data)[:2] == ["version", "fusegen"]
    assert (data.pop("version"), data.pop("fusegen")) == (1, __version__)
    assert data.keys() == keys


def error_of(*words: str) -> Mapping[str, Any]:
    """What a run that fails answers; the message stands on stderr, too."""
    done = run(*words, "--json")
    data = json.loads(done.stdout)
    assert data["version"] == 1 and data.keys() == {"version", "fusegen", "error"}
    found: dict[str, Any] = data["error"]
    assert found["exit_code"] == done.exit_code != 0
    assert found["message"].splitlines()[0].lower() in done.stderr.lower()
    return found


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["plan", "--module", "linea"], "usage", "did you mean 'linear'?"),
        (["plan", "--no-such"], "usage", "No such option"),
        (["generat"], "usage", "did you mean 'generate'?"),
        (["list", "recipe"], "usage", "did you mean 'recipes'?"),
        (["build", "."], "build", "is not a bundle with kernels"),
        (["explain", "silu", "bf16", "h100"], "usage", "did you mean 'sm_90a'?"),
    ],
)
def test_an_error_is_data(words: list[str], kind: str, message: str) -> None:
    found = error_of(*words)
    assert found["kind"] == kind and message in found["message"]


def test_what_is_wrong_with_specs_has_its_places() -> None:
    Path("mine/recipes").mkdir(parents=True)
    text = "edition: 2\nrecipe: toy\ncolour: red\n"
    Path("mine/recipes/toy.yaml").write_text(text, encoding="utf-8")
    words = ("--module", "linear", "--recipe", "toy", "--arch", "cpu", "--specs", "mine")
    found = error_of("generate", *words)
    assert found["kind"] == "spec" and found["exit_code"] == cli.ExitCode.SPEC
    places = [(each["file"], each["line"], each["column"]) for each in found["problems"]]
    assert ("mine/recipes/toy.yaml", 3, 1) in places
    assert "unknown key 'colour'" in found["problems"][-1]["message"]


def test_errors_of_the_system_and_of_fusegen_are_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(error: BaseException) -> Mapping[str, Any]:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr(listing, "list_specs", fail)
        return error_of("list")

    full = OSError(28, "No space left on device", "here")
    assert ended(full) == {
        "kind": "system",
        "exit_code": 4,
        "message": "here: No space left on device",
    }
    assert ended(RuntimeError("the sky fell"))["kind"] == "internal"
    assert ended(BusyError("somebody else is here"))["kind"] == "busy"
    assert ended(KeyboardInterrupt())["kind"] == "interrupted"


def test_what_was_written_and_what_was_refused_is_data() -> None:
    (made,) = json.loads(run("generate", *SILU, "--json").stdout)["bundles"]
    assert made["cells_written"] == ["silu__bf16"] and not made["refused"]
    Path("generated/cpu/silu__bf16.py").write_text("mine = 1\n", encoding="utf-8")
    done = run("generate", "--json")
    (found,) = json.loads(done.stdout)["bundles"]
    assert done.exit_code == cli.ExitCode.REFUSED
    assert found["refused"] and not found["written"] and found["cells_written"] == []
    assert {"path": "silu__bf16.py", "kind": "edited"} in found["changes"]


def test_without_the_flag_an_error_leaves_stdout_alone() -> None:
    assert run("plan", "--module", "linea").stdout == ""


def test_the_most_particular_kind_of_an_error_counts() -> None:
    kinds = [kind for kind, _ in exits.known_errors()]
    for index, kind in enumerate(kinds):
        assert not any(issubclass(kind, earlier) for earlier in kinds[:index]), kind
    names = [found.kind for _, found in exits.known_errors()]
    assert len({*names}) == len(names)


# Completion


def completed(line: str) -> dict[str, str | None]:
    """What shells offer for the last word of a line, with the words beside it."""
    *words, incomplete = line.split(" ")[1:]
    shell = ShellComplete(cli.program, {}, "fusegen", "_FUSEGEN_COMPLETE")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {item.value: item.help for item in shell.get_completions(words, incomplete)}


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("fusegen gen", {"generate"}),
        ("fusegen generate --module gro", {"grouped_linear", "grouped_mlp"}),
        ("fusegen generate --module grouped_mlp_s", {"grouped_mlp_srelu"}),
        ("fusegen plan --recipe fp8", {"fp8_block", "fp8_delayed"}),
        ("fusegen generate --arch ", {"cpu", "sm_80", "sm_90a", "native"}),
        ("fusegen generate --target hop", {"hopper", "hopper_lean"}),
        ("fusegen generate --no-fusion norm", {"norm_quantize"}),
        ("fusegen explain gelu bf16 sm_9", {"sm_90a"}),
        ("fusegen explain ge", {"gelu", "geglu"}),
        ("fusegen explain gelu mx", {"mxfp8"}),
        ("fusegen explain linear bf16 cpu --after sav", {"saved"}),
        ("fusegen list rec", {"recipes"}),
        ("fusegen new arc", {"arch"}),
        ("fusegen new recipe mine --from nv", {"nvfp4"}),
        ("fusegen bench --sweep gemm_", {"gemm_sm90", "gemm_mma"}),
        ("fusegen demo --arch sm_8", {"sm_80"}),
    ],
)
def test_values_are_completed(line: str, some: set[str]) -> None:
    found = completed(line)
    assert some <= found.keys()
    assert all(word.startswith(line.rpartition(" ")[2]) for word in found)


def test_a_repeated_option_offers_no_value_twice() -> None:
    found = completed("fusegen plan --module gelu --module gelu --module ge")
    assert "geglu" in found and "gelu" not in found


def test_options_are_those_that_the_module_offers() -> None:
    every = completed("fusegen generate --option ")
    assert {word for option in OPTIONS for word in option.words} == every.keys()
    assert completed("fusegen generate --module silu --option ").keys() < every.keys()
    assert "add_to_main_grad" not in completed("fusegen explain silu bf16 cpu --option ")
    assert "add_to_main_grad" in completed("fusegen explain linear bf16 cpu --option add")


def test_completions_say_what_they_stand_for() -> None:
    assert "Hopper" in (completed("fusegen plan --arch sm_90")["sm_90a"] or "")
    assert completed("fusegen explain linear bf16 cpu --after ").keys() == {p.name for p in PASSES}


def test_specs_of_the_line_are_completed_and_what_is_wrong_is_left_out() -> None:
    assert run("new", "recipe", "mine").exit_code == 0
    Path("specs/recipes/wrong.yaml").write_text("edition: 2\n", encoding="utf-8")
    line = "fusegen generate --specs specs --recipe "
    assert "mine" in completed(line) and "wrong" not in completed(line)
    assert "mine" not in completed("fusegen generate --recipe ")
    assert completed("fusegen generate --specs nowhere --recipe ") == {}


def test_bash_completes_a_value() -> None:
    """As the line in its start-up file does."""
    root = Path(cli.__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "_FUSEGEN_COMPLETE": "bash_complete"}
    env |= {"COMP_WORDS": "fusegen generate --module grouped_l", "COMP_CWORD": "3"}
    code = "from fusegen.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "plain,grouped_linear\n", "")
