"""Gravity between all pairs of bodies: bodies by sources tiles in registers, sources split over programs."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal

FAMILY, HAND = "reduction", "vision"


@triton.jit
def vis_nbody(
    pos_ptr, mass_ptr, acc_ptr, n, soft, BODIES: tl.constexpr, SOURCES: tl.constexpr, SPLIT: tl.constexpr
):
    i = tl.program_id(0) * BODIES + tl.arange(0, BODIES)
    xi = tl.load(pos_ptr + i, mask=i < n, other=0.0)[:, None]
    yi = tl.load(pos_ptr + n + i, mask=i < n, other=0.0)[:, None]
    zi = tl.load(pos_ptr + 2 * n + i, mask=i < n, other=0.0)[:, None]
    ax = tl.zeros((BODIES, SOURCES), dtype=tl.float32)
    ay = tl.zeros((BODIES, SOURCES), dtype=tl.float32)
    az = tl.zeros((BODIES, SOURCES), dtype=tl.float32)
    for start in range(tl.program_id(1) * SOURCES, n, SOURCES * SPLIT):
        j = start + tl.arange(0, SOURCES)
        dx = tl.load(pos_ptr + j, mask=j < n, other=0.0)[None, :] - xi
        dy = tl.load(pos_ptr + n + j, mask=j < n, other=0.0)[None, :] - yi
        dz = tl.load(pos_ptr + 2 * n + j, mask=j < n, other=0.0)[None, :] - zi
        inv = tl.rsqrt(dx * dx + dy * dy + dz * dz + soft)
        pull = tl.load(mass_ptr + j, mask=j < n, other=0.0)[None, :] * inv * inv * inv
        ax += pull * dx
        ay += pull * dy
        az += pull * dz
    tl.atomic_add(acc_ptr + i, tl.sum(ax, axis=1), mask=i < n)
    tl.atomic_add(acc_ptr + n + i, tl.sum(ay, axis=1), mask=i < n)
    tl.atomic_add(acc_ptr + 2 * n + i, tl.sum(az, axis=1), mask=i < n)


SPACE: Space = {
    "kwargs": {"BODIES": [32, 64, 128, 256], "SOURCES": [4, 16, 32], "SPLIT": [1, 8]},
    "num_warps": [2, 4],
    "num_stages": [2],
}


def _make(shape: tuple[int], tiny: tuple[int], device: str, small: bool = False) -> Data:
    (n,) = tiny if small else shape
    pos = normal((3, n), device, dtype=torch.float32, seed=1)
    mass = normal((n,), device, dtype=torch.float32, seed=2).abs() / n
    acc = torch.zeros((3, n), dtype=torch.float32, device=device)
    return {
        "args": (pos, mass, acc, n, 0.01),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(n, meta["BODIES"]), meta["SPLIT"]),
        "outputs": (acc,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    pos, mass, soft = data["args"][0].double(), data["args"][1].double(), data["args"][4]
    found = []
    for some in pos.split(1024, dim=1):
        away = pos[:, None, :] - some[:, :, None]
        pull = mass * (away.square().sum(0) + soft) ** -1.5
        found.append((away * pull).sum(-1))
    return (torch.cat(found, dim=1),)


CASES = [
    Case(
        name=f"vis_nbody/{n}",
        kernel=vis_nbody,
        key=("n",),
        space=SPACE,
        make=partial(_make, (n,), (70,)),
        reference=_reference,
        tolerance=(1e-3, 1e-3),
        reset_to_zero=("acc_ptr",),
        flops=20.0 * n * n,
        bytes=28.0 * n,
    )
    for n in [512, 1024, 2048, 4096, 8192, 12288, 16384, 24576, 32768]
]
