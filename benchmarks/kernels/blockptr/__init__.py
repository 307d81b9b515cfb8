"""Blocks named by shape, strides and offsets with boundary checks; persistent programs, pipelining hints."""
