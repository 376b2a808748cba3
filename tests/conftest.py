"""What all tests share: where the repository is and which bundles are committed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No test is timed: on a busy machine hypothesis would fail one for how long its examples took.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

ROOT = Path(__file__).parents[1]
BUNDLES = sorted(path.parent for path in (ROOT / "generated").glob("*/fusegen.lock"))


@pytest.fixture(params=BUNDLES, ids=lambda path: path.name)
def bundle(request: pytest.FixtureRequest) -> Path:
    """Every committed bundle in turn."""
    return Path(request.param)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What torch.compile made in other tests, and here, is forgotten."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
