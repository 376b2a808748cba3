"""Checks and timings of single kernels, built from the headers that bundles vendor."""
