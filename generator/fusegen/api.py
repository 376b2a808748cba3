"""What fusegen can do, as functions that return dataclasses: the Python interface."""

from __future__ import annotations

from .commands.build import build, find_tools
from .commands.check import check
from .commands.edits import OnEdit
from .commands.eject import Ejected, eject
from .commands.export import Exported, export_kernels
from .commands.generate import Policy, generate
from .commands.listing import Entry, OptionEntry, list_options, list_specs, validate
from .commands.plans import Explanation, PlanRow, Query, draft_after, explain, plan
from .commands.report import BundleReport, Generated
from .commands.reporting import Report, report
from .commands.request import Request
from .commands.status import BundleStatus, Status, status
from .commands.upgrade import conflicts, upgrade
from .commands.vendor import vendor
from .publish.folders import BUILTIN, Folders, load_specs

__all__ = [
    "BUILTIN",
    "BundleReport",
    "BundleStatus",
    "Ejected",
    "Entry",
    "Explanation",
    "Exported",
    "Folders",
    "Generated",
    "OnEdit",
    "OptionEntry",
    "PlanRow",
    "Policy",
    "Query",
    "Report",
    "Request",
    "Status",
    "build",
    "check",
    "conflicts",
    "draft_after",
    "eject",
    "explain",
    "export_kernels",
    "find_tools",
    "generate",
    "list_options",
    "list_specs",
    "load_specs",
    "plan",
    "report",
    "status",
    "upgrade",
    "validate",
    "vendor",
]
