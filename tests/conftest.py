"""What all tests share: where the repository is and which bundles are committed."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUNDLES = sorted(path.parent for path in (ROOT / "generated").glob("*/fusegen.lock"))


@pytest.fixture(params=BUNDLES, ids=lambda path: path.name)
def bundle(request: pytest.FixtureRequest) -> Path:
    """Every committed bundle in turn."""
    return Path(request.param)
