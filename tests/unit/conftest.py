"""What tests of plans are given."""

from __future__ import annotations

import pytest
from plans import plan_of

from fusegen.ir.plan import ModulePlan


@pytest.fixture
def plan(request: pytest.FixtureRequest) -> ModulePlan:
    """The plan of an architecture and a cell; see `plans.every`."""
    return plan_of(*request.param)
