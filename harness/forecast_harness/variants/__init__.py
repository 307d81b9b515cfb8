"""Other sources of a kernel: what they are compared with, how they are written, and whether they are right.

`kernels`: the kernel that a command names, and how it is called.
`verification`: runs another source beside it in a sandbox, with the kernel itself as the reference.
"""
