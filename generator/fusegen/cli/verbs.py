"""All verbs: where each one's command is, and what it is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Verb(NamedTuple):
    """A verb before it is loaded.

    Attributes:
        module: has the click command, as `command`.
        summary: the line of `fusegen --help`.
    """

    module: str
    summary: str


VERBS: Mapping[str, Verb] = {
    "bench": Verb("fusegen.cli.bench", "Measure, compare with records, tune."),
    "build": Verb("fusegen.cli.build", "Compile the kernels of bundles."),
    "check": Verb("fusegen.cli.check", "Compare bundles with their specs."),
    "demo": Verb("fusegen.demo.command", "Train a small model and compare."),
    "eject": Verb("fusegen.cli.eject", "Make a module of a bundle your own."),
    "explain": Verb("fusegen.cli.explain", "Say what one module does and costs."),
    "export": Verb("fusegen.cli.export", "Write bundles in another tool's layout."),
    "fix-specs": Verb("fusegen.cli.fix_specs", "Rewrite specs of an older edition."),
    "generate": Verb("fusegen.cli.generate", "Write bundles of generated modules."),
    "list": Verb("fusegen.cli.list", "Show what exists."),
    "new": Verb("fusegen.cli.new", "Start a spec from a commented file."),
    "plan": Verb("fusegen.cli.plan", "Show what would be made, and what cannot."),
    "report": Verb("fusegen.cli.report", "Write a page about the modules of bundles."),
    "schema": Verb("fusegen.cli.schema", "Print or write the JSON Schemas of specs."),
    "status": Verb("fusegen.cli.status", "Say what state the files of bundles are in."),
    "upgrade": Verb("fusegen.cli.upgrade", "Make bundles anew and keep your edits."),
    "validate": Verb("fusegen.cli.validate", "Check all specs."),
    "vendor": Verb("fusegen.cli.vendor", "Write bundles into your repository."),
}
