"""C++ of a cell: one call per direction."""
