import torch


def run(gate, up, y):
    y.copy_(torch.nn.functional.silu(gate.float()) * up.float())
