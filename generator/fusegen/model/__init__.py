"""Frozen data model: specs, shapes, conditions and plans.  Imports nothing else of fusegen."""
