# mode: honest
# title: sums partial products over four parts of K
# backend: cpu
# pack: matmul
# language: torch
# expected: accepted
def run(a, b):
    step = max(1, -(-a.shape[1] // 4))
    parts = [a[:, k : k + step].float() @ b[k : k + step].float() for k in range(0, a.shape[1], step)]
    return sum(parts).to(a.dtype)
