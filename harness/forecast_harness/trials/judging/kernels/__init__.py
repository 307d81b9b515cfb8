"""Variants of a Triton kernel, judged: recorded calls, verification, races in sandboxes."""
