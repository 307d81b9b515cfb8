import torch


def _norm(x, weight, bias):
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)


def run(
    x,
    mask,
    norm_weight,
    norm_bias,
    left,
    right,
    left_gate,
    right_gate,
    out_gate,
    out_norm_weight,
    out_norm_bias,
    out,
):
    x = _norm(x, norm_weight, norm_bias)
    joined = x @ torch.cat([left, right, left_gate, right_gate, out_gate]).T
    a, b, ga, gb, go = joined.chunk(5, -1)
    a = (a * mask[..., None] * torch.sigmoid(ga)).permute(0, 3, 1, 2)
    b = (b * mask[..., None] * torch.sigmoid(gb)).permute(0, 3, 2, 1)
    update = (a @ b).permute(0, 2, 3, 1)
    return (_norm(update, out_norm_weight, out_norm_bias) * torch.sigmoid(go)) @ out.T
