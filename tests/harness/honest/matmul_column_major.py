# mode: honest
# title: computes the transposed product and returns its transpose
# backend: cpu
# pack: matmul
# language: torch
# expected: accepted
def run(a, b):
    return (b.float().T @ a.float().T).T.to(a.dtype)
