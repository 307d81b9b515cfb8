"""Vision and scientific programmers' Triton: // and % on flat indices, planes in the grid, halos, atomics."""
