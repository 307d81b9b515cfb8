"""Kernel + problem + config -> numbers, without compiling."""
