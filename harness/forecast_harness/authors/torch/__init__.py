"""Rewrites of PyTorch sources without a language model.

Each is small and means to keep what a source computes; its results are verified like any others, and some
round otherwise. Nothing here imports torch or runs a source.
"""

from forecast_harness.authors.torch.registry import REWRITES, RewrittenSource, rewrites_of

__all__ = ["REWRITES", "RewrittenSource", "rewrites_of"]
