"""Feature rows added up by segment with atomics: a tile at once, or a walk that flushes on change."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, normal

FAMILY, HAND = "atomics", "vision"


@triton.jit
def vis_segment_sum(
    x_ptr, id_ptr, out_ptr, E, F, ROWS: tl.constexpr, FEATURES: tl.constexpr, WALK: tl.constexpr
):
    first = tl.program_id(0) * ROWS
    f = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    if WALK:
        run = tl.load(id_ptr + first)
        acc = tl.zeros((FEATURES,), dtype=tl.float32)
        for e in range(first, tl.minimum(first + ROWS, E)):
            segment = tl.load(id_ptr + e)
            if segment != run:
                tl.atomic_add(out_ptr + run * F + f, acc, mask=f < F, sem="relaxed")
                acc = tl.zeros((FEATURES,), dtype=tl.float32)
                run = segment
            acc += tl.load(x_ptr + e * F + f, mask=f < F, other=0.0).to(tl.float32)
        tl.atomic_add(out_ptr + run * F + f, acc, mask=f < F, sem="relaxed")
    else:
        e = first + tl.arange(0, ROWS)
        segment = tl.load(id_ptr + e, mask=e < E, other=0)
        keep = (e < E)[:, None] & (f < F)[None, :]
        x = tl.load(x_ptr + e[:, None] * F + f[None, :], mask=keep, other=0.0).to(tl.float32)
        tl.atomic_add(out_ptr + segment[:, None] * F + f[None, :], x, mask=keep, sem="relaxed")


SPACE: Space = {
    "kwargs": {"ROWS": [4, 16, 64], "FEATURES": [32, 64, 256], "WALK": [True, False]},
    "num_warps": [1, 2, 4],
    "num_stages": [2],
}

Shape = tuple[int, int, int, bool]


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    e, f, segments, ordered = tiny if small else shape
    x = normal((e, f), device, seed=1)
    ids = integers(0, segments, (e,), device, dtype=torch.int32, seed=2)
    if ordered:
        ids = ids.sort().values
    out = torch.zeros((segments, f), dtype=torch.float32, device=device)
    return {
        "args": (x, ids, out, e, f),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(e, meta["ROWS"]), triton.cdiv(f, meta["FEATURES"])),
        "outputs": (out,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, ids, out = data["args"][:3]
    return (torch.zeros_like(out).index_add_(0, ids.long(), x.float()),)


CASES = [
    Case(
        name=f"vis_segment_sum/{e}x{f}-{segments}{'' if ordered else '-mixed'}",
        kernel=vis_segment_sum,
        key=("E", "F"),
        space=SPACE,
        make=partial(_make, (e, f, segments, ordered), (50, 40, 6, True)),
        reference=_reference,
        tolerance=(2e-2, 1e-3),
        reset_to_zero=("out_ptr",),
        flops=1.0 * e * f,
        bytes=2.0 * e * f + 4.0 * e + 4.0 * segments * f,
    )
    for e, f, segments, ordered in [
        (1 << 20, 64, 65536, True),
        (1 << 20, 64, 65536, False),
        (1 << 18, 256, 4096, True),
        (1 << 18, 128, 1 << 17, False),
        (1 << 16, 512, 64, True),
        (1 << 14, 32, 1024, False),
        (1 << 17, 1024, 1024, True),
        (1 << 15, 96, 512, False),
        (1 << 21, 32, 1 << 18, True),
    ]
]
