"""Rewrites of sources without a language model, for Triton kernels and for PyTorch code."""
