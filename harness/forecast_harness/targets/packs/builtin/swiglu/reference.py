"""silu(gate) * up."""

import torch


def reference(gate, up):
    return gate * torch.sigmoid(gate) * up
