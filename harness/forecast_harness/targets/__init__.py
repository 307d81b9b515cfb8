"""Targets: kernels of files and packages, packs and CUDA kernels, and how they are called."""
