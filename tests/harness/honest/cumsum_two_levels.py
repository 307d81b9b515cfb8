# mode: honest
# title: sums within blocks, then adds the blocks' totals
# backend: cpu
# pack: cumsum
# language: torch
# expected: accepted
import torch


def run(x):
    done, carried = [], torch.zeros(x.shape[0], 1, device=x.device)
    for block in x.split(32, -1):
        sums = block.cumsum(-1)
        done.append(sums + carried)
        carried = carried + sums[:, -1:]
    return torch.cat(done, -1)
