"""State space duality with chunks of 256: the state that a chunk adds, and the outputs inside a chunk."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.chunked.common import half, join, split

FAMILY, HAND = "linear_attention", "chunked"
CHUNK = 256


@triton.jit
def ssd_chunk_state(
    x_ptr,
    b_ptr,
    dt_ptr,
    dA_cumsum_ptr,
    states_ptr,
    seqlen,
    nheads,
    nheads_ngroups_ratio,
    hdim,
    dstate,
    chunk_size,
    stride_x_seqlen,
    stride_b_seqlen,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
):
    pid_bc = tl.program_id(1)
    pid_h = tl.program_id(2)
    num_pid_n = tl.cdiv(dstate, BLOCK_SIZE_N)
    pid_m = tl.program_id(0) // num_pid_n
    pid_n = tl.program_id(0) % num_pid_n
    nchunks = tl.cdiv(seqlen, chunk_size)
    pid_b = pid_bc // nchunks
    pid_c = pid_bc % nchunks
    first = pid_b * seqlen + pid_c * chunk_size

    x_ptr += first * stride_x_seqlen + pid_h * hdim
    b_ptr += first * stride_b_seqlen + (pid_h // nheads_ngroups_ratio) * dstate
    dt_ptr += (pid_bc * nheads + pid_h) * chunk_size
    dA_cumsum_ptr += (pid_bc * nheads + pid_h) * chunk_size
    offs_m = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    offs_n = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    offs_k = tl.arange(0, BLOCK_SIZE_K)
    x_ptrs = x_ptr + offs_m[:, None] + offs_k[None, :] * stride_x_seqlen
    b_ptrs = b_ptr + offs_n[None, :] + offs_k[:, None] * stride_b_seqlen
    limit = min(chunk_size, seqlen - pid_c * chunk_size)
    dA_last = tl.load(dA_cumsum_ptr + limit - 1)

    acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for k in range(0, limit, BLOCK_SIZE_K):
        x = tl.load(x_ptrs, mask=(offs_m[:, None] < hdim) & (offs_k[None, :] < limit - k), other=0.0)
        b = tl.load(b_ptrs, mask=(offs_k[:, None] < limit - k) & (offs_n[None, :] < dstate), other=0.0)
        dA = tl.load(dA_cumsum_ptr + k + offs_k, mask=offs_k < limit - k, other=0.0)
        dt = tl.load(dt_ptr + k + offs_k, mask=offs_k < limit - k, other=0.0)
        b = (b.to(tl.float32) * (tl.exp(dA_last - dA) * dt)[:, None]).to(x_ptr.dtype.element_ty)
        acc += tl.dot(x, b)
        x_ptrs += BLOCK_SIZE_K * stride_x_seqlen
        b_ptrs += BLOCK_SIZE_K * stride_b_seqlen

    states_ptr += (pid_bc * nheads + pid_h) * hdim * dstate
    states_ptrs = states_ptr + offs_m[:, None] * dstate + offs_n[None, :]
    tl.store(states_ptrs, acc, mask=(offs_m[:, None] < hdim) & (offs_n[None, :] < dstate))


@triton.heuristics({"HAS_D": lambda args: args["d_ptr"] is not None})
@triton.jit
def ssd_chunk_scan(
    cb_ptr,
    x_ptr,
    dt_ptr,
    dA_cumsum_ptr,
    d_ptr,
    out_ptr,
    seqlen,
    nheads,
    nheads_ngroups_ratio,
    hdim,
    chunk_size,
    stride_x_seqlen,
    IS_CAUSAL: tl.constexpr,
    HAS_D: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
):
    pid_bc = tl.program_id(1)
    pid_h = tl.program_id(2)
    num_pid_n = tl.cdiv(hdim, BLOCK_SIZE_N)
    pid_m = tl.program_id(0) // num_pid_n
    pid_n = tl.program_id(0) % num_pid_n
    nchunks = tl.cdiv(seqlen, chunk_size)
    pid_b = pid_bc // nchunks
    pid_c = pid_bc % nchunks
    ngroups = nheads // nheads_ngroups_ratio

    cb_ptr += (pid_bc * ngroups + pid_h // nheads_ngroups_ratio) * chunk_size * chunk_size
    x_ptr += (pid_b * seqlen + pid_c * chunk_size) * stride_x_seqlen + pid_h * hdim
    out_ptr += (pid_b * seqlen + pid_c * chunk_size) * stride_x_seqlen + pid_h * hdim
    dt_ptr += (pid_bc * nheads + pid_h) * chunk_size
    dA_cumsum_ptr += (pid_bc * nheads + pid_h) * chunk_size
    offs_m = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    offs_n = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    offs_k = tl.arange(0, BLOCK_SIZE_K)
    limit = min(chunk_size, seqlen - pid_c * chunk_size)
    dA_m = tl.load(dA_cumsum_ptr + offs_m, mask=offs_m < limit, other=0.0)
    cb_ptrs = cb_ptr + offs_m[:, None] * chunk_size + offs_k[None, :]
    x_ptrs = x_ptr + offs_k[:, None] * stride_x_seqlen + offs_n[None, :]

    acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    # Later positions do not count: a tile of rows stops at its own end.
    K_MAX = min((pid_m + 1) * BLOCK_SIZE_M, limit) if IS_CAUSAL else limit
    for k in range(0, K_MAX, BLOCK_SIZE_K):
        cb = tl.load(cb_ptrs, mask=(offs_m[:, None] < limit) & (offs_k[None, :] < limit - k), other=0.0)
        dA_k = tl.load(dA_cumsum_ptr + k + offs_k, mask=offs_k < limit - k, other=0.0)
        dt_k = tl.load(dt_ptr + k + offs_k, mask=offs_k < limit - k, other=0.0)
        # Without the minimum, positions that the mask removes would overflow.
        cb = cb.to(tl.float32) * tl.exp(tl.minimum(dA_m[:, None] - dA_k[None, :], 0.0)) * dt_k[None, :]
        if IS_CAUSAL:
            cb = tl.where(offs_m[:, None] >= k + offs_k[None, :], cb, 0.0)
        x = tl.load(x_ptrs, mask=(offs_k[:, None] < limit - k) & (offs_n[None, :] < hdim), other=0.0)
        acc += tl.dot(cb.to(x.dtype), x)
        cb_ptrs += BLOCK_SIZE_K
        x_ptrs += BLOCK_SIZE_K * stride_x_seqlen

    mask = (offs_m[:, None] < limit) & (offs_n[None, :] < hdim)
    if HAS_D:
        skip = tl.load(x_ptr + offs_m[:, None] * stride_x_seqlen + offs_n[None, :], mask=mask, other=0.0)
        acc += skip.to(tl.float32) * tl.load(d_ptr + pid_h).to(tl.float32)
    out_ptrs = out_ptr + offs_m[:, None] * stride_x_seqlen + offs_n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


STATE_SPACE: Space = {
    "kwargs": {"BLOCK_SIZE_M": [32, 64, 128], "BLOCK_SIZE_N": [32, 64, 128], "BLOCK_SIZE_K": [32, 64]},
    "num_warps": [2, 4, 8],
    "num_stages": [2, 4],
    "where": lambda p: (
        512 <= p["BLOCK_SIZE_M"] * p["BLOCK_SIZE_N"] // p["num_warps"] <= 1024 * min(2, p["num_warps"] // 2)
    ),
}
SCAN_SPACE: Space = {
    "kwargs": {"BLOCK_SIZE_M": [32, 64, 128], "BLOCK_SIZE_N": [32, 64], "BLOCK_SIZE_K": [32, 64]},
    "num_warps": [2, 4, 8],
    "num_stages": [2, 4],
    "where": lambda p: p["BLOCK_SIZE_M"] <= 32 * p["num_warps"] <= 4 * p["BLOCK_SIZE_M"],
}


def _steps(b: int, t: int, h: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Step sizes and summed decays [B, NC, H, CHUNK]; the end of a ragged chunk is never read."""
    shape = (b, triton.cdiv(t, CHUNK), h, CHUNK)
    dt = normal(shape, device, dtype=torch.float32, seed=1).abs() * 0.2
    return dt, (-0.2 * dt).cumsum(-1)


def _make_state(shape: tuple[int, ...], tiny: tuple[int, ...], device: str, small: bool = False) -> Data:
    b, t, h, p, n = tiny if small else shape
    groups = max(1, h // 16)
    dt, decay = _steps(b, t, h, device)
    x = normal((b, t, h, p), device, dtype=half(small), seed=2)
    bs = normal((b, t, groups, n), device, dtype=half(small), seed=3, scale=0.5)
    states = unset((b, triton.cdiv(t, CHUNK), h, p, n), device, dtype=torch.float32)
    return {
        "args": (x, bs, dt, decay, states, t, h, h // groups, p, n, CHUNK, h * p, groups * n),
        "kwargs": {},
        "grid": lambda meta: (
            triton.cdiv(p, meta["BLOCK_SIZE_M"]) * triton.cdiv(n, meta["BLOCK_SIZE_N"]),
            b * triton.cdiv(t, CHUNK),
            h,
        ),
        "outputs": (states,),
    }


def _make_scan(shape: tuple[int, ...], tiny: tuple[int, ...], device: str, small: bool = False) -> Data:
    b, t, h, p = tiny if small else shape
    groups = max(1, h // 16)
    dt, decay = _steps(b, t, h, device)
    cb = normal((b, triton.cdiv(t, CHUNK), groups, CHUNK, CHUNK), device, dtype=half(small), seed=2)
    x = normal((b, t, h, p), device, dtype=half(small), seed=3)
    d = normal((h,), device, dtype=torch.float32, seed=4)
    out = unset((b, t, h, p), device, dtype=half(small))
    return {
        "args": (cb, x, dt, decay, d, out, t, h, h // groups, p, CHUNK, h * p),
        "kwargs": {"IS_CAUSAL": True},
        "grid": lambda meta: (
            triton.cdiv(CHUNK, meta["BLOCK_SIZE_M"]) * triton.cdiv(p, meta["BLOCK_SIZE_N"]),
            b * triton.cdiv(t, CHUNK),
            h,
        ),
        "outputs": (out,),
    }


def _reference_state(data: Data) -> tuple[torch.Tensor, ...]:
    x, bs, dt, decay, _, t, _, ratio = data["args"][:8]
    rest = torch.full((dt.shape[1],), CHUNK - 1, device=x.device)
    rest[-1] = (t - 1) % CHUNK
    last = decay.gather(-1, rest[None, :, None, None].expand(*decay.shape[:3], 1))
    weight = ((last - decay).exp() * dt).transpose(2, 3)
    states = []
    for i in range(x.shape[0]):
        keys = split(bs[i : i + 1].float(), CHUNK).repeat_interleave(ratio, 3) * weight[i : i + 1, ..., None]
        states.append(torch.einsum("bclhp,bclhn->bchpn", split(x[i : i + 1].float(), CHUNK), keys))
    return (torch.cat(states),)


def _reference_scan(data: Data) -> tuple[torch.Tensor, ...]:
    cb, x, dt, decay, d, _, t, _, ratio = data["args"][:9]
    values = split(x, CHUNK)
    want = torch.empty(values.shape, dtype=torch.float32, device=x.device)
    for i in range(x.shape[0]):
        for j in range(x.shape[2]):
            a, step = decay[i, :, j], dt[i, :, j]
            weight = (a[:, :, None] - a[:, None, :]).tril().exp() * step[:, None, :]
            product = (cb[i, :, j // ratio].float() * weight).tril()
            want[i, :, :, j] = product @ values[i, :, :, j].float()
    return (join(want, t) + x.float() * d[:, None],)


CASES = [
    Case(
        name=f"ssd_chunk_state/{b}x{t}x{h}x{p}x{n}",
        kernel=ssd_chunk_state,
        key=("seqlen", "nheads", "hdim", "dstate"),
        space=STATE_SPACE,
        make=partial(_make_state, (b, t, h, p, n), (1, 270, 2, 40, 50)),
        reference=_reference_state,
        tolerance=(5e-2, 3e-2),
        flops=2.0 * b * t * h * p * n,
    )
    for b, t, h, p, n in [
        (1, 2048, 32, 64, 128),
        (8, 2048, 32, 64, 128),
        (1, 16384, 80, 64, 128),
        (4, 4096, 48, 64, 64),
        (2, 8192, 64, 128, 128),
        (16, 1024, 32, 64, 256),
        (1, 65536, 16, 64, 128),
        (64, 512, 16, 128, 64),
    ]
] + [
    Case(
        name=f"ssd_chunk_scan/{b}x{t}x{h}x{p}",
        kernel=ssd_chunk_scan,
        key=("seqlen", "nheads", "hdim"),
        space=SCAN_SPACE,
        make=partial(_make_scan, (b, t, h, p), (1, 270, 1, 24)),
        reference=_reference_scan,
        tolerance=(5e-2, 3e-2),
        flops=1.0 * b * t * h * p * CHUNK,
    )
    for b, t, h, p in [
        (1, 2048, 32, 64),
        (8, 2048, 32, 64),
        (1, 16384, 80, 64),
        (4, 4096, 48, 64),
        (2, 8192, 64, 128),
        (16, 1024, 32, 128),
        (1, 65536, 16, 64),
        (64, 512, 16, 64),
    ]
]
