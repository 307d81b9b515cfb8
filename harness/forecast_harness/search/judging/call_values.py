"""Values of the tensors of a timed call, where a user's own are not known."""

from __future__ import annotations

import torch


def fill_tensor(flat: torch.Tensor, least: int, generator: torch.Generator) -> None:
    """Normal numbers; small integers over their range, wide ones as indices into the smallest dimension.

    `least` is the extent of that dimension; `generator` lives where the tensor does.
    """
    if flat.dtype == torch.bool:
        flat.copy_(torch.rand(flat.shape, generator=generator, device=flat.device) < 0.5)
    elif flat.dtype.is_floating_point:
        flat.copy_(torch.randn(flat.shape, generator=generator, device=flat.device))
    else:
        info = torch.iinfo(flat.dtype)
        low, high = (info.min, info.max) if info.bits <= 16 else (0, least)
        flat.random_(low, high, generator=generator)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest error relative to the largest finite value wanted; infinite where only one of them is finite."""
    a, b = got.double(), wanted.double()
    fine = a.isfinite(), b.isfinite()
    if not torch.equal(*fine):
        return float("inf")
    scale = float(b[fine[1]].abs().max()) if bool(fine[1].any()) else 0.0
    apart = (a - b)[fine[1]].abs()
    return float(apart.max()) / max(scale, 1e-30) if apart.numel() else 0.0
