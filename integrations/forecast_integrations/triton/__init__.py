"""Triton: the decorator, the patch, and the engine behind both."""

from contextlib import suppress

with suppress(ImportError):
    # Before any module of this package: what is to serve every tuner (`FORECAST_AUTOTUNE=1`) does so as soon as Triton
    # is imported, and would find the module that imports it half made.
    import triton  # noqa: F401
