"""Clocks: the trusted runner of machine code, its compilation, and paired comparisons."""
