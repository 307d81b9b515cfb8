# mode: honest
# title: uses threads and waits for them
# backend: cpu
# pack: softmax
# language: torch
# expected: accepted
from concurrent.futures import ThreadPoolExecutor

import torch


def run(x):
    y = torch.empty_like(x)

    def work(rows):
        y[rows] = torch.softmax(x[rows], -1)

    half = x.shape[0] // 2
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (slice(0, half), slice(half, None))))
    return y
