"""References in plain PyTorch, one per cell; the normative numerics of this bundle."""
