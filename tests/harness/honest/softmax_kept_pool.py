# mode: honest
# title: keeps a pool of threads between calls
# backend: cpu
# pack: softmax
# language: torch
# expected: accepted
from concurrent.futures import ThreadPoolExecutor

import torch

POOL = ThreadPoolExecutor(2)


def run(x):
    y = torch.empty_like(x)

    def work(rows):
        y[rows] = torch.softmax(x[rows], -1)

    half = x.shape[0] // 2
    list(POOL.map(work, (slice(0, half), slice(half, None))))
    return y
