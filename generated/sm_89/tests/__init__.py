"""Tests of this bundle: run them with pytest after vendoring it."""
