"""log(sum(softmax(x))), which is zero."""

import torch


def reference(x):
    return torch.log(torch.softmax(x, -1).sum(-1))
