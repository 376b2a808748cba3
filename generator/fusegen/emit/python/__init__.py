"""Python of a cell."""
