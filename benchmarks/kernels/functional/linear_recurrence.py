"""First-order linear recurrence over time: affine maps composed by a scan, tiles of time x channels."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.functional.helpers import affine_compose, grid_2d, inside, tile_range

FAMILY, HAND = "scan", "functional"


@triton.jit
def last_row(x, TILE_T: tl.constexpr):
    return tl.sum(tl.where((tl.arange(0, TILE_T) == TILE_T - 1)[:, None], x, 0.0), axis=0)[None, :]


@triton.jit
def fn_linear_recurrence(a_ptr, b_ptr, h_ptr, steps, channels, TILE_T: tl.constexpr, TILE_D: tl.constexpr):
    base = tl.program_id(1).to(tl.int64) * steps * channels
    cols = tile_range(tl.program_id(0), TILE_D)
    h = tl.zeros([1, TILE_D], dtype=tl.float32)
    for start in range(0, steps, TILE_T):
        rows = start + tl.arange(0, TILE_T)
        at = base + grid_2d(rows, cols, channels)
        mask = inside(rows, cols, steps, channels)
        # Past the end the map is the identity.
        a = tl.sigmoid(tl.load(a_ptr + at, mask=mask, other=float("inf")).to(tl.float32))
        b = tl.load(b_ptr + at, mask=mask, other=0.0).to(tl.float32)
        a, b = tl.associative_scan((a, b), 0, affine_compose)
        states = a * h + b
        tl.store(h_ptr + at, states.to(h_ptr.dtype.element_ty), mask=mask)
        h = last_row(states, TILE_T)


SPACE: Space = {
    "kwargs": {"TILE_T": [8, 16, 32, 64, 256], "TILE_D": [8, 32, 64, 128]},
    "num_warps": [1, 2, 4],
    "num_stages": [1, 2],
    "where": lambda p: (
        256 <= p["TILE_T"] * p["TILE_D"] <= 4096 and p["num_warps"] * 64 <= p["TILE_T"] * p["TILE_D"]
        and (p["num_stages"] == 1 or p["TILE_T"] <= 16)
    ),
}  # fmt: skip

Shape = tuple[int, int, int]


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    batch, steps, channels = tiny if small else shape
    a, b = (normal((batch, steps, channels), device, dtype=torch.bfloat16, seed=n) for n in (1, 2))
    h = unset((batch, steps, channels), device, dtype=torch.bfloat16)
    return {
        "args": (a, b, h, steps, channels),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(channels, meta["TILE_D"]), batch),
        "outputs": (h,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    a, b = data["args"][0].float().sigmoid(), data["args"][1].float()
    # Doubling: after a round every step has absorbed twice as many predecessors.
    span = 1
    while span < a.shape[1]:
        b = torch.cat([b[:, :span], a[:, span:] * b[:, :-span] + b[:, span:]], 1)
        a = torch.cat([a[:, :span], a[:, span:] * a[:, :-span]], 1)
        span *= 2
    return (b,)


CASES = [
    Case(
        name=f"fn_linear_recurrence/{batch}x{steps}x{channels}",
        kernel=fn_linear_recurrence,
        key=("steps", "channels"),
        space=SPACE,
        make=partial(_make, (batch, steps, channels), (2, 37, 20)),
        reference=_reference,
        tolerance=(2e-2, 1e-2),
        flops=2.0 * batch * steps * channels,
        bytes=6.0 * batch * steps * channels,
    )
    for batch, steps, channels in [
        (8, 2048, 2560),
        (1, 4096, 4096),
        (64, 512, 1024),
        (32, 4096, 512),
        (1, 16384, 1536),
        (4, 256, 768),
        (256, 128, 2048),
        (2, 1024, 8192),
        (16, 64, 256),
    ]
]
