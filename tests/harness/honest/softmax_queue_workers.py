# mode: honest
# title: worker threads that wait at a queue, as joblib's do
# backend: cpu
# pack: softmax
# language: torch
# expected: accepted
import queue
import threading

import torch

TASKS = queue.Queue()


def work():
    while True:
        x, y, rows, done = TASKS.get()
        y[rows] = torch.softmax(x[rows], -1)
        done.release()


for _ in range(2):
    threading.Thread(target=work, daemon=True).start()


def run(x):
    y = torch.empty_like(x)
    done = threading.Semaphore(0)
    parts = [slice(n, None, 2) for n in range(2)]
    for rows in parts:
        TASKS.put((x, y, rows, done))
    for _ in parts:
        done.acquire()
    return y
