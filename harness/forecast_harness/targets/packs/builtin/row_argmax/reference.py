"""Index of the largest element of each row."""

import torch


def reference(x):
    # torch.argmax promises no order among equal elements.
    largest = x == x.amax(-1, keepdim=True)
    return largest.to(torch.int64).cumsum(-1).eq(0).sum(-1)
