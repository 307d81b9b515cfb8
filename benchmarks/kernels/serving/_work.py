"""What the serving modules share: bytes counted from the tensors themselves, and routing tables."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.kernels import Data, integers, normal


def moved(make: Callable[..., Data]) -> float:
    """Bytes of all tensor arguments, each crossing the bus once."""
    tensors = [a for a in make("meta")["args"] if isinstance(a, torch.Tensor)]
    return float(sum(t.numel() * t.element_size() for t in tensors))


def permutation(n: int, device: str, seed: int) -> torch.Tensor:
    """The numbers below n in random order, the same for the same seed and device."""
    if device == "meta":
        return torch.empty(n, dtype=torch.int64, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randperm(n, generator=generator, device=device)


def align_blocks(
    owners: torch.Tensor, groups: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows sorted by owner, each owner's rows padded to whole blocks; the owner of each block; the total.

    A padding entry is the number of rows, which no row has for an index.
    """
    rows, device = owners.numel(), owners.device
    blocks = min(rows, (rows + groups * (block - 1) + block - 1) // block)
    if owners.is_meta:
        ids, of_block, total = (
            torch.empty(n, dtype=torch.int32, device=device) for n in (blocks * block, blocks, 1)
        )
        return ids, of_block, total
    order = torch.argsort(owners, stable=True)
    counts = (owners[:, None] == torch.arange(groups, device=device)).sum(0)
    ends = ((counts + block - 1) // block * block).cumsum(0)
    starts = ends - (counts + block - 1) // block * block
    sorted_owners = owners[order].long()
    rank = torch.arange(rows, device=device) - (counts.cumsum(0) - counts)[sorted_owners]
    ids = torch.full((blocks * block,), rows, dtype=torch.int32, device=device)
    ids[starts[sorted_owners] + rank] = order.int()
    firsts = torch.arange(blocks, device=device) * block
    of_block = torch.searchsorted(ends, firsts, right=True).clamp(max=groups - 1).int()
    return ids, of_block, ends[-1:].int()


def routing(tokens: int, experts: int, top_k: int, device: str, seed: int) -> torch.Tensor:
    """Which `top_k` different experts each token goes to, flattened."""
    first = integers(0, experts, (tokens, 1), device, dtype=torch.int64, seed=seed)
    # An odd step visits different experts when their number is a power of two.
    step = integers(0, experts // 2, (tokens, 1), device, dtype=torch.int64, seed=seed + 1) * 2 + 1
    return ((first + step * torch.arange(top_k, device=device)) % experts).reshape(-1)


def scaled_e4m3(shape: tuple[int, int], group: int, device: str, seed: int) -> torch.Tensor:
    """Numbers that an e4m3 with a power of two as its group's scale represents exactly.

    The interpreter's conversion to e4m3 loses the carry when rounding reaches the next power of two.
    """
    x = normal(shape, device, dtype=torch.float32, seed=seed, scale=100.0).clamp(-448.0, 448.0)
    x = x.to(torch.float8_e4m3fn).float().unflatten(-1, (-1, group))
    # Two, of which one is left where every third value is gated away.
    x[..., 1:3] = 448.0
    exponents = integers(-3, 4, (*x.shape[:-1], 1), device, dtype=torch.int32, seed=seed + 1)
    return (x * torch.exp2(exponents)).flatten(-2)
