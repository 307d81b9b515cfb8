import torch


def run(x):
    places = torch.arange(x.shape[1], device=x.device).expand(x.shape)
    return torch.where(x == x.amax(-1, keepdim=True), places, x.shape[1]).amin(-1)
