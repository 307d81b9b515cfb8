"""Compiling candidates in parallel, without launching them."""
