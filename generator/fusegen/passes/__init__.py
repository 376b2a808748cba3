"""The passes from a module spec to its plan, all pure; ``resolve`` states their order."""
