"""Inference-engine kernels: many strides, 3-D grids, indirection tables, scales, split-K, merged LSEs."""
