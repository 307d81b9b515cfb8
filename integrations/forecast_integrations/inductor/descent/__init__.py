"""Coordinate descent over generated kernels: where it may go next, and what compiles for it in the meantime."""
