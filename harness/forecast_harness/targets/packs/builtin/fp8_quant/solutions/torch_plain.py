import torch


def run(x):
    groups = x.float().reshape(x.shape[0], -1, 128)
    scale = groups.abs().amax(-1).clamp(min=1e-10) / 448.0
    q = (groups / scale[..., None]).clamp(-448.0, 448.0)
    return q.reshape(x.shape).to(torch.float8_e4m3fn), scale
