"""Group-wise quantisation to float8 e4m3. Values come before rounding: the checker allows half a step."""


def reference(x):
    groups = x.reshape(x.shape[0], -1, 128)
    scale = groups.abs().amax(-1).clamp(min=1e-10) / 448.0
    return (groups / scale[..., None]).clamp(-448.0, 448.0).reshape(x.shape), scale
