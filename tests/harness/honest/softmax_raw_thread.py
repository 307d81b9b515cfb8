# mode: honest
# title: a thread that Python does not list waits for ever
# backend: cpu
# pack: softmax
# language: torch
# expected: accepted
import _thread
import threading

import torch

LOCK = threading.Lock()
LOCK.acquire()
_thread.start_new_thread(LOCK.acquire, ())


def run(x):
    return torch.softmax(x, -1)
