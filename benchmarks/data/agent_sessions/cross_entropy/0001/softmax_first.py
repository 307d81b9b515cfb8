# softmax once; the loss from the logits and their logsumexp, which reads a row and keeps a number
import torch


def run(logits, target):
    chosen = target[:, None]
    loss = torch.logsumexp(logits, -1) - logits.gather(1, chosen)[:, 0]
    grad = torch.softmax(logits, -1)
    grad.scatter_add_(1, chosen, torch.full_like(grad[:, :1], -1.0))
    return loss, grad.mul_(1.0 / logits.shape[0])
