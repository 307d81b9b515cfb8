"""Variants without a language model: known rewrites of a kernel's syntax tree.

Each rewrite applies only where the text shows that it keeps what the kernel computes; the variants are
verified like any others all the same. Nothing here imports torch or triton, and nothing runs a kernel.
"""

from forecast_harness.authors.triton.registry import REWRITES, variants_of

__all__ = ["REWRITES", "variants_of"]
