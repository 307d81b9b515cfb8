# mode: honest
# title: goes over keys in tiles with a running maximum
# backend: cpu
# pack: attention
# language: torch
# expected: accepted
import torch


def run(q, k, v):
    t = q.shape[2]
    scale = q.shape[-1] ** -0.5
    top = torch.full((*q.shape[:3], 1), float("-inf"), device=q.device)
    total, out = torch.zeros(*q.shape[:3], 1, device=q.device), torch.zeros(q.shape, device=q.device)
    place = torch.arange(t, device=q.device)
    for start in range(0, t, 16):
        keys, values = k[:, :, start : start + 16].float(), v[:, :, start : start + 16].float()
        scores = (q.float() @ keys.transpose(-1, -2)) * scale
        late = place[start : start + 16][None, :] > place[:, None]
        scores = scores.masked_fill(late, float("-inf"))
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        weight, shrink = torch.exp(scores - new), torch.exp(top - new)
        total = total * shrink + weight.sum(-1, keepdim=True)
        out = out * shrink + weight @ values
        top = new
    return (out / total).to(q.dtype)
