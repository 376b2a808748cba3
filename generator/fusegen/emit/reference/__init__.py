"""The reference of a cell in plain PyTorch."""
