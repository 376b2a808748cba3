"""fusegen: an ahead-of-time generator of fused PyTorch modules for mixture-of-experts training."""

__version__ = "0.1.0"
