"""Is another source of a kernel right? Answered in a sandbox, with the kernel itself as the reference.

`verify.survey` finds out what may be asked of the base kernel: which tensors it writes, which sizes may
change.
`verify.verify_variant` runs a variant beside it on drawn arguments and says for which calls it may stand in.
"""
