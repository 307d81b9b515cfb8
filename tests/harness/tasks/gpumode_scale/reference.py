import torch
from utils import make_match_reference


def generate_input(rows: int, columns: int, factor: float, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator), {"factor": factor}


def ref_kernel(data):
    x, config = data
    return x.sum(-1) * config["factor"]


check_implementation = make_match_reference(ref_kernel, rtol=1e-4, atol=1e-4)
