"""CUDA C++ kernels with a declared signature: how they are declared and launched, and what a device can launch."""

MOST_GRID = (2**31 - 1, 65535, 65535)
"""Blocks that a device takes along each axis."""
MOST_BLOCK, MOST_THREADS = (1024, 1024, 64), 1024
"""Threads of a block along each axis, and in all."""
