# mode: honest
# title: a progress bar's monitor wakes up now and then
# backend: cpu
# pack: softmax
# language: torch
# expected: accepted
import threading

import torch

STOP = threading.Event()


def monitor():
    while not STOP.wait(0.05):
        pass


threading.Thread(target=monitor, name="tqdm_monitor", daemon=True).start()


def run(x):
    return torch.softmax(x, -1)
