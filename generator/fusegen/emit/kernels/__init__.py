"""Kernel units and dispatch headers."""
