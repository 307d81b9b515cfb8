# mode: honest
# title: follows the definition step by step
# backend: cpu
# pack: trimul
# language: torch
# expected: accepted
import torch


def run(x, mask, norm_weight, norm_bias, left, right, left_gate, right_gate, out_gate, **out_part):
    x = torch.nn.functional.layer_norm(x, (x.shape[-1],), norm_weight, norm_bias, 1e-5)
    project = "bijc,dc->bijd"
    a = torch.einsum(project, x, left) * mask[..., None] * torch.einsum(project, x, left_gate).sigmoid()
    b = torch.einsum(project, x, right) * mask[..., None] * torch.einsum(project, x, right_gate).sigmoid()
    update = torch.einsum("bikd,bjkd->bijd", a, b)
    weight, bias = out_part["out_norm_weight"], out_part["out_norm_bias"]
    update = torch.nn.functional.layer_norm(update, (update.shape[-1],), weight, bias, 1e-5)
    return torch.einsum(
        "bijd,cd->bijc", update * torch.einsum(project, x, out_gate).sigmoid(), out_part["out"]
    )
