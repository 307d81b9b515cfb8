"""Triton: the decorator, the patch, and the engine behind both."""
