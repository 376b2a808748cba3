"""Expressions of single elements, and their gradients."""

from __future__ import annotations

from ..ir.primitives import Primitive
from .family import Family

POINTWISE = Family("pointwise", (Primitive.POINTWISE, Primitive.POINTWISE_GRAD))
