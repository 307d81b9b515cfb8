"""States at chunk starts and corrected values of the gated delta rule; g: log decays summed per chunk."""

import torch

C = 32


def make(axes, inputs, generator):
    steps = -torch.rand(inputs["g"].shape, generator=generator) * 0.2
    b, t, h = steps.shape
    g = steps.reshape(b, t // C, C, h).cumsum(2).reshape(b, t, h)
    scaled = {n: inputs[n] / 32**0.5 for n in ("k", "w")}
    return {**inputs, **scaled, "g": g}


def reference(k, w, u, g):
    b, t, heads, width = k.shape
    state = torch.zeros(b, heads, width, u.shape[-1], dtype=k.dtype, device=k.device)
    states, fresh = [], []
    for start in range(0, t, C):
        part = slice(start, start + C)
        kc, wc, uc, gc = (x[:, part].transpose(1, 2) for x in (k, w, u, g[..., None]))
        states.append(state)
        new = uc - wc @ state
        fresh.append(new.transpose(1, 2))
        last = gc[:, :, -1:, :]
        state = state * torch.exp(last) + kc.transpose(-1, -2) @ (new * torch.exp(last - gc))
    return torch.stack(states, 1), torch.cat(fresh, 1)
