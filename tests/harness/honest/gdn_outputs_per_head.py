# mode: honest
# title: goes through batches, heads and chunks one at a time
# backend: cpu
# pack: gdn_chunk_fwd_o
# language: torch
# expected: accepted
import torch


def run(q, k, v_new, h, g):
    o = torch.empty(v_new.shape, device=v_new.device)
    for b in range(q.shape[0]):
        for head in range(q.shape[2]):
            for n in range(h.shape[1]):
                part = slice(32 * n, 32 * n + 32)
                qc, kc, vc, gc = (t[b, part, head] for t in (q, k, v_new, g))
                decay = torch.exp(gc[:, None] - gc[None, :]).tril()
                inner = (qc @ kc.T).mul(decay) @ vc
                o[b, part, head] = (inner + (qc @ h[b, n, head]) * torch.exp(gc)[:, None]) * q.shape[
                    -1
                ] ** -0.5
    return o
