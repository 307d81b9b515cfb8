"""CUDA kernels: their declaration, signature and the rules of their sources."""
