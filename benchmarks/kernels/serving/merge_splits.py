"""Second stage of split decode attention: partial outputs are weighed by their LSEs and added."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.serving._work import moved

FAMILY, HAND = "attention", "serving"


@triton.jit
def srv_merge_splits(
    Mid_O,
    Mid_Lse,
    Out,
    num_rows,
    num_kv_splits,
    head_dim,
    stride_mid_r,
    stride_mid_s,
    stride_mid_d,
    stride_lse_r,
    stride_lse_s,
    stride_or,
    stride_od,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    offs_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    mask_r = offs_r < num_rows
    mask_d = offs_d < head_dim
    mask_o = mask_r[:, None] & mask_d[None, :]
    e_max = tl.full([BLOCK_R], -1.0e30, dtype=tl.float32)
    e_sum = tl.zeros([BLOCK_R], dtype=tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], dtype=tl.float32)
    for start_s in range(0, num_kv_splits, BLOCK_S):
        offs_s = start_s + tl.arange(0, BLOCK_S)
        mask_s = offs_s < num_kv_splits
        tlogic = tl.load(
            Mid_Lse + offs_r[:, None] * stride_lse_r + offs_s[None, :] * stride_lse_s,
            mask=mask_r[:, None] & mask_s[None, :],
            other=-1.0e30,
        )
        tv = tl.load(
            Mid_O
            + offs_r[:, None, None] * stride_mid_r
            + offs_s[None, :, None] * stride_mid_s
            + offs_d[None, None, :] * stride_mid_d,
            mask=mask_o[:, None, :] & mask_s[None, :, None],
            other=0.0,
        )
        n_e_max = tl.maximum(tl.max(tlogic, 1), e_max)
        old_scale = tl.exp(e_max - n_e_max)
        exp_logic = tl.where(mask_s[None, :], tl.exp(tlogic - n_e_max[:, None]), 0.0)
        acc = acc * old_scale[:, None] + tl.sum(exp_logic[:, :, None] * tv, 1)
        e_sum = e_sum * old_scale + tl.sum(exp_logic, 1)
        e_max = n_e_max
    o = (acc / e_sum[:, None]).to(Out.dtype.element_ty)
    tl.store(Out + offs_r[:, None] * stride_or + offs_d[None, :] * stride_od, o, mask=mask_o)


SPACE: Space = {
    "kwargs": {"BLOCK_R": [1, 2, 8, 32], "BLOCK_S": [1, 4, 16], "BLOCK_DV": [32, 128]},
    "num_warps": [1, 4, 8],
    "num_stages": [2],
    "where": lambda c: c["BLOCK_R"] * c["BLOCK_S"] * c["BLOCK_DV"] <= 16384,
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    rows, splits, dim = tiny if small else shape
    mid = normal((rows, splits, dim), device, dtype=torch.float32, seed=1)
    lse = normal((rows, splits), device, dtype=torch.float32, seed=2, scale=2.0)
    out = unset((rows, dim), device, dtype=torch.bfloat16)
    return {
        "args": (mid, lse, out, rows, splits, dim, *mid.stride(), *lse.stride(), *out.stride()),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(rows, meta["BLOCK_R"]), triton.cdiv(dim, meta["BLOCK_DV"])),
        "outputs": (out,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    mid, lse = data["args"][:2]
    return ((mid * lse.softmax(-1)[..., None]).sum(1),)


CASES = [
    Case(
        name=f"srv_merge_splits/{rows}x{splits}x{dim}",
        kernel=srv_merge_splits,
        key=("num_rows", "num_kv_splits", "head_dim"),
        space=SPACE,
        make=partial(_make, (rows, splits, dim), (19, 5, 72)),
        reference=_reference,
        tolerance=(2e-2, 2e-2),
        # Multiply and add.
        flops=2.0 * rows * splits * dim,
        bytes=moved(partial(_make, (rows, splits, dim), (rows, splits, dim))),
    )
    for rows, splits, dim in [
        (512, 16, 128),
        (2048, 16, 128),
        (8192, 16, 128),
        (16384, 32, 128),
        (256, 64, 128),
        (1024, 32, 512),
        (4096, 16, 512),
        (8192, 32, 64),
        (32768, 16, 256),
    ]
]
