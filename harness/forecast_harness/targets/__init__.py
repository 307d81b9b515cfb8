"""What is improved and how it is called: kernels of files and packages, packs, CUDA kernels."""
