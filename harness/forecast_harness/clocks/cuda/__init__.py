"""CUDA C++ kernels with a declared signature: how they are declared, compiled by nvcc, and launched."""
