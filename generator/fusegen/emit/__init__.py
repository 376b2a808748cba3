"""Printers: a plan becomes the frozen context of one template each; templates only lay out text."""
