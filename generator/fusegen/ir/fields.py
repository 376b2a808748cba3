"""What fields of specs and of plans alike may hold."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


Positive = Annotated[int, Field(ge=1, le=65536)]


Nanoseconds = Annotated[int, Field(ge=0, le=10**9)]


Block = Annotated[int, Field(ge=1, le=4096)]
