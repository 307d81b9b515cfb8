"""Sum of the rows of a table that each bag of indices names."""

import torch


def make(axes, inputs, generator):
    shape = inputs["index"].shape
    index = torch.randint(0, axes["R"], shape, generator=generator)
    if torch.rand((), generator=generator) < 0.3:
        index[:] = index.reshape(-1)[0]  # every bag names one row: the load that balanced tests never see
    return {**inputs, "index": index}


def reference(table, index):
    return table[index].sum(1)
