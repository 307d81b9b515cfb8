"""Timing kernels shorter than a device's clock can tell: the arithmetic and the recording, without a framework."""
