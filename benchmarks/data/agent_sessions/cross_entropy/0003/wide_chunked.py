# the same in chunks of rows that stay in the cache, narrowed into the result as they are done
import torch

CHUNK = 32
CONFIGS = [{"CHUNK": 16}, {"CHUNK": 64}]


def run(logits, target):
    grad = torch.empty_like(logits)
    loss = torch.empty(logits.shape[0], dtype=torch.float32)
    scale = 1.0 / logits.shape[0]
    for first in range(0, logits.shape[0], CHUNK):
        chosen = target[first : first + CHUNK, None]
        log_p = torch.log_softmax(logits[first : first + CHUNK], -1, dtype=torch.float32)
        loss[first : first + CHUNK] = -log_p.gather(1, chosen)[:, 0]
        part = log_p.exp_()
        part.scatter_add_(1, chosen, torch.full_like(part[:, :1], -1.0))
        grad[first : first + CHUNK] = part.mul_(scale)
    return loss, grad
