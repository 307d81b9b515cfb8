"""Facts of a kernel read from its Triton IR text, without compiling it."""
