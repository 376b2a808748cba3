"""Bundles to libraries: toolchain, object cache, compiling and linking."""
