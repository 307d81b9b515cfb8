"""CUDA C++ kernels with a declared signature: their declaration, launches, and the limits of a device."""

MOST_GRID = (2**31 - 1, 65535, 65535)
"""Blocks that a device takes along each axis."""
MOST_BLOCK, MOST_THREADS = (1024, 1024, 64), 1024
"""Threads of a block along each axis, and in all."""
