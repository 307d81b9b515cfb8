"""Values of the tensors of a timed call, where a user's own are not known."""

from __future__ import annotations

import torch

HOST_PERIOD = (1 << 22) - 3
"""Elements that a host draws; what is longer repeats them. A prime: no two rows of a matrix are alike."""
_COMPARED_ELEMENTS = 1 << 24
"""At a time: in double precision they take much more memory than the tensors."""


def fill_tensor(flat: torch.Tensor, least: int, generator: torch.Generator) -> None:
    """Normal numbers; small integers over their range, wide ones as indices into the smallest dimension.

    `least` is the extent of that dimension; `generator` lives where the tensor does.
    """
    if flat.device.type == "cpu" and flat.numel() > HOST_PERIOD:  # which takes a second for each GB
        fill_tensor(flat[:HOST_PERIOD], least, generator)
        done = HOST_PERIOD
        while done < flat.numel():
            more = min(done, flat.numel() - done)
            flat[done : done + more].copy_(flat[:more])
            done += more
    elif flat.dtype == torch.bool:
        flat.copy_(torch.rand(flat.shape, generator=generator, device=flat.device) < 0.5)
    elif flat.dtype.is_floating_point:
        flat.copy_(torch.randn(flat.shape, generator=generator, device=flat.device))
    else:
        info = torch.iinfo(flat.dtype)
        low, high = (info.min, info.max) if info.bits <= 16 else (0, least)
        flat.random_(low, high, generator=generator)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest error relative to the largest finite value wanted; infinite where only one of them is finite."""
    if got.dtype == wanted.dtype and torch.equal(got, wanted):
        return 0.0
    scale = apart = 0.0
    for first in range(0, wanted.numel(), _COMPARED_ELEMENTS):
        a, b = (t.reshape(-1)[first : first + _COMPARED_ELEMENTS].double() for t in (got, wanted))
        fine = b.isfinite()
        if not torch.equal(a.isfinite(), fine):
            return float("inf")
        if bool(fine.any()):
            scale = max(scale, float(b[fine].abs().max()))
            apart = max(apart, float((a - b)[fine].abs().max()))
    return apart / max(scale, 1e-30)
