"""Kernels as machine code: compiled in a cell without a device, launched by a trusted runner.

A candidate's Python runs in a sandboxed cell that sees no device and no data. What comes out is plain data:
machine code (`CompiledKernel`) and a `LaunchPlan`, which launches it on named buffers. The runner is a process
that executes no candidate Python: it loads the machine code, places buffers, launches, checks and times.
"""
