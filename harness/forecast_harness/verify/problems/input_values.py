"""Input values: regimes that catch what standard normal numbers let through."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_SPECIAL_VALUES = 3
"""How many elements a NaN or an infinity is put into."""


def draw(
    shape: Sequence[int],
    dtype: torch.dtype,
    regime: str,
    generator: torch.Generator,
    device: str = "cpu",
) -> torch.Tensor:
    """A contiguous CPU tensor of this shape whose numbers follow `regime`; drawn on `device`, if told so.

    normal: N(0, 1); uniform: [0, 1); offset: N(5, 1), where an operation that is nearly the identity or
    nearly zero on N(0, 1) shows; large and tiny: N(0, 1) scaled so that squares still fit the dtype;
    denormal: half of the elements below the smallest normal number; cauchy: heavy tails; nan, inf: a few
    among normal ones. Integers are uniform in [0, 128), booleans fair.
    """
    size = tuple(shape)
    if device != "cpu":
        seed = int(torch.randint(0, 2**63 - 1, (), generator=generator, device="cpu"))
        generator = torch.Generator(device).manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, size, generator=generator, device=device).bool().cpu()
    if not dtype.is_floating_point:
        return torch.randint(0, 128, size, generator=generator, device=device).to(dtype).cpu()
    info = torch.finfo(dtype)
    # Single precision is drawn four times as fast, and no narrower dtype shows the difference.
    wide = torch.float64 if info.bits > 32 else torch.float32
    if regime == "zeros":
        return torch.zeros(size, dtype=dtype)
    if regime == "uniform":
        return torch.rand(size, generator=generator, dtype=wide, device=device).to(dtype).cpu()
    normal = torch.randn(size, generator=generator, dtype=wide, device=device)
    if regime == "offset":
        normal += 5
    elif regime == "large":
        normal *= min(1e3, math.sqrt(info.max) / 16)
    elif regime == "tiny":
        normal *= max(1e-3, math.sqrt(info.smallest_normal))
    elif regime == "denormal":
        small = torch.rand(size, generator=generator, device=device) < 0.5
        normal = torch.where(small, normal * info.smallest_normal * 0.25, normal)
    elif regime == "cauchy":
        normal /= torch.randn(size, generator=generator, dtype=wide, device=device)
        normal = normal.clamp(-1e3, 1e3)
    elif regime in ("nan", "inf") and normal.numel():
        flat = normal.reshape(-1)
        where = torch.randint(0, flat.numel(), (_SPECIAL_VALUES,), generator=generator, device=device)
        bad = [math.nan] * 3 if regime == "nan" else [math.inf, -math.inf, math.inf]
        flat[where] = torch.tensor(bad, dtype=wide, device=device)
    if info.bits == 8:
        normal = normal.clamp(info.min, info.max)
    return normal.to(dtype).cpu()


def perturb_values(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A copy in which one element in sixteen, at random places, has its neighbour's value.

    A cache that recognises inputs by a sample of their elements takes the two for equal.
    """
    if value.numel() < 2:
        return value.clone()
    chosen = torch.rand(value.shape, generator=generator) < 1 / 16
    chosen.reshape(-1)[torch.randint(0, value.numel(), (1,), generator=generator)] = True
    return torch.where(chosen, value.reshape(-1).roll(1).reshape(value.shape), value)
