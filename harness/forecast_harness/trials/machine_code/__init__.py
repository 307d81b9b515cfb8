"""Trials of sources as machine code."""
