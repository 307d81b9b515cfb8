"""fp8 quantisation of activations with one scale for every 128 neighbouring values of a token."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.serving._work import moved, scaled_e4m3

FAMILY, HAND = "quantise", "serving"


@triton.jit
def srv_group_quant_fp8(
    y_ptr,
    y_q_ptr,
    y_s_ptr,
    num_groups,
    eps,
    fp8_max,
    group_size: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    ITERS: tl.constexpr,
):
    g_id = tl.program_id(0)
    cols = tl.arange(0, group_size)
    for i in range(ITERS):
        groups = (g_id * ITERS + i) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
        mask = groups < num_groups
        offs = groups.to(tl.int64)[:, None] * group_size + cols[None, :]
        y = tl.load(y_ptr + offs, mask=mask[:, None], other=0.0).to(tl.float32)
        _absmax = tl.maximum(tl.max(tl.abs(y), axis=1), eps)
        y_s = _absmax / fp8_max
        y_q = tl.clamp(y / y_s[:, None], -fp8_max, fp8_max).to(y_q_ptr.dtype.element_ty)
        tl.store(y_q_ptr + offs, y_q, mask=mask[:, None])
        tl.store(y_s_ptr + groups, y_s, mask=mask)


SPACE: Space = {
    "kwargs": {"BLOCK_GROUPS": [1, 2, 4, 8, 16, 64], "ITERS": [1, 4]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [2],
}

GROUP = 128


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    tokens, hidden = tiny if small else shape
    # Large values have scales large enough to be told apart.
    y = normal((tokens, hidden), device, dtype=torch.bfloat16, seed=1, scale=500.0)
    if small:
        y = scaled_e4m3((tokens, hidden), GROUP, device, seed=1).bfloat16()
    y_q = unset((tokens, hidden), device, dtype=torch.float8_e4m3fn)
    y_s = unset((tokens, hidden // GROUP), device, dtype=torch.float32)
    groups = tokens * hidden // GROUP
    return {
        "args": (y, y_q, y_s, groups, 1e-10, 448.0),
        "kwargs": {"group_size": GROUP},
        "grid": lambda meta: (triton.cdiv(groups, meta["BLOCK_GROUPS"] * meta["ITERS"]),),
        "outputs": (y_q, y_s),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    y, y_q = data["args"][:2]
    grouped = y.float().unflatten(-1, (-1, GROUP))
    scale = grouped.abs().amax(-1) / 448.0
    # Not rounded: half a step of e4m3 is a sixteenth of the value.
    return (grouped / scale[..., None]).view(y_q.shape), scale


CASES = [
    Case(
        name=f"srv_group_quant_fp8/{tokens}x{hidden}",
        kernel=srv_group_quant_fp8,
        key=("num_groups",),
        space=SPACE,
        make=partial(_make, (tokens, hidden), (7, 384)),
        reference=_reference,
        tolerance=(5e-3, 7e-2),
        # Absolute value, maximum, divide.
        flops=3.0 * tokens * hidden,
        bytes=moved(partial(_make, (tokens, hidden), (tokens, hidden))),
    )
    for tokens, hidden in [
        (16, 7168),
        (128, 7168),
        (1024, 7168),
        (4096, 4096),
        (8192, 7168),
        (32768, 2048),
        (16384, 14336),
        (256, 18432),
        (65536, 1536),
    ]
]
