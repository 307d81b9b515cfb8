"""Norms around linear attention: L2 norm of keys, gated group RMS norm, gradient of the swish-gated norm."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "norm", "chunked"


@triton.jit
def chunk_l2norm(x, y, rstd, eps, M, D, BT: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr):
    i_m = tl.program_id(0)
    o_d = tl.arange(0, BD)
    for i in range(NB):
        o_t = (i_m * NB + i) * BT + tl.arange(0, BT)
        mask = (o_t < M)[:, None] & (o_d < D)[None, :]
        b_x = tl.load(x + o_t[:, None] * D + o_d[None, :], mask=mask, other=0.0).to(tl.float32)
        b_rstd = 1.0 / tl.sqrt(tl.sum(b_x * b_x, 1) + eps)
        tl.store(
            y + o_t[:, None] * D + o_d[None, :], (b_x * b_rstd[:, None]).to(y.dtype.element_ty), mask=mask
        )
        tl.store(rstd + o_t, b_rstd, mask=o_t < M)


@triton.heuristics({"EVEN_N": lambda args: args["N"] % args["BD"] == 0})
@triton.jit
def gated_group_rms(
    x,
    z,
    w,
    y,
    rstd,
    eps,
    M,
    N,
    G,
    NORM_BEFORE_GATE: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    EVEN_N: tl.constexpr,
):
    # A row has G groups of N channels; a program normalises one group of BT rows.
    i_m, i_g = tl.program_id(0), tl.program_id(1)
    o_t = i_m * BT + tl.arange(0, BT)
    m_t = (o_t < M)[:, None]
    row = (o_t * G + i_g)[:, None] * N
    b_sum = tl.zeros([BT, BD], dtype=tl.float32)
    for i in range(0, N, BD):
        o_d = i + tl.arange(0, BD)[None, :]
        mask = m_t if EVEN_N else (m_t & (o_d < N))
        b_x = tl.load(x + row + o_d, mask=mask, other=0.0).to(tl.float32)
        if not NORM_BEFORE_GATE:
            b_z = tl.load(z + row + o_d, mask=mask, other=0.0).to(tl.float32)
            b_x *= b_z * tl.sigmoid(b_z)
        b_sum += b_x * b_x
    b_rstd = 1.0 / tl.sqrt(tl.sum(b_sum, 1) / N + eps)
    tl.store(rstd + o_t * G + i_g, b_rstd, mask=o_t < M)
    for i in range(0, N, BD):
        o_d = i + tl.arange(0, BD)[None, :]
        mask = m_t if EVEN_N else (m_t & (o_d < N))
        b_x = tl.load(x + row + o_d, mask=mask, other=0.0).to(tl.float32)
        b_z = tl.load(z + row + o_d, mask=mask, other=0.0).to(tl.float32)
        b_w = tl.load(w + i_g * N + o_d, mask=o_d < N, other=0.0).to(tl.float32)
        b_y = b_x * b_rstd[:, None] * b_w * (b_z * tl.sigmoid(b_z))
        tl.store(y + row + o_d, b_y.to(y.dtype.element_ty), mask=mask)


@triton.jit
def swish_gate_norm_backward(
    x,
    g,
    w,
    dy,
    dx,
    dg,
    eps,
    T,
    H,
    V,
    BT: tl.constexpr,
    BV: tl.constexpr,
    NT: tl.constexpr,
):
    i_h, i_t = tl.program_id(0), tl.program_id(1)
    o_v = tl.arange(0, BV)
    m_v = o_v < V
    b_w = tl.load(w + i_h * V + o_v, mask=m_v, other=0.0).to(tl.float32)
    for i in range(NT):
        o_t = (i_t * NT + i) * BT + tl.arange(0, BT)
        offset = (o_t * H + i_h)[:, None] * V + o_v[None, :]
        mask = (o_t < T)[:, None] & m_v[None, :]
        b_x = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        b_g = tl.load(g + offset, mask=mask, other=0.0).to(tl.float32)
        b_dy = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
        b_x = tl.where(mask, b_x - (tl.sum(b_x, 1) / V)[:, None], 0.0)
        b_rstd = 1.0 / tl.sqrt(tl.sum(b_x * b_x, 1) / V + eps)
        b_xhat = b_x * b_rstd[:, None]
        b_s = tl.sigmoid(b_g)
        b_dg = b_dy * b_xhat * b_w[None, :] * b_s * (1.0 + b_g * (1.0 - b_s))
        b_dxhat = b_dy * b_g * b_s * b_w[None, :]
        b_c1 = tl.sum(b_dxhat * b_xhat, 1) / V
        b_c2 = tl.sum(b_dxhat, 1) / V
        b_dx = (b_dxhat - b_xhat * b_c1[:, None] - b_c2[:, None]) * b_rstd[:, None]
        tl.store(dg + offset, b_dg.to(dg.dtype.element_ty), mask=mask)
        tl.store(dx + offset, b_dx.to(dx.dtype.element_ty), mask=mask)


L2_SPACE: Space = {
    "kwargs": {"BT": [4, 8, 16, 32, 64, 128], "NB": [1, 4]},
    "num_warps": [1, 2, 4, 8, 16],
    "num_stages": [2],
    "where": lambda p: p["num_warps"] <= p["BT"] <= 32 * p["num_warps"],
}
GATED_SPACE: Space = {
    "kwargs": {"BT": [1, 2, 4, 8], "BD": [256, 512, 1024, 2048]},
    "num_warps": [2, 4, 8, 16],
    "num_stages": [2],
}
SWISH_SPACE: Space = {
    "kwargs": {"BT": [2, 4, 8, 16, 32], "NT": [1, 2, 8]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [2],
    "where": lambda p: p["BT"] <= 8 * p["num_warps"],
}


def _make_l2(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    m, d = tiny if small else shape
    x = normal((m, d), device, dtype=torch.bfloat16, seed=1)
    y = unset((m, d), device, dtype=torch.bfloat16)
    rstd = unset((m,), device, dtype=torch.float32)
    return {
        "args": (x, y, rstd, 1e-6, m, d),
        "kwargs": {"BD": triton.next_power_of_2(d)},
        "grid": lambda meta: (triton.cdiv(m, meta["BT"] * meta["NB"]),),
        "outputs": (y, rstd),
    }


def _make_gated(
    shape: tuple[int, ...], tiny: tuple[int, ...], before: bool, device: str, small: bool = False
) -> Data:
    m, n, groups = tiny if small else shape
    x = normal((m, groups * n), device, dtype=torch.bfloat16, seed=1)
    z = normal((m, groups * n), device, dtype=torch.bfloat16, seed=2)
    w = normal((groups * n,), device, dtype=torch.float32, seed=3)
    y = unset((m, groups * n), device, dtype=torch.bfloat16)
    rstd = unset((m, groups), device, dtype=torch.float32)
    return {
        "args": (x, z, w, y, rstd, 1e-5, m, n, groups),
        "kwargs": {"NORM_BEFORE_GATE": before},
        "grid": lambda meta: (triton.cdiv(m, meta["BT"]), groups),
        "outputs": (y, rstd),
    }


def _make_swish(shape: tuple[int, ...], tiny: tuple[int, ...], device: str, small: bool = False) -> Data:
    t, h, v = tiny if small else shape
    x, g, dy = (normal((t, h, v), device, seed=seed) for seed in (1, 2, 3))
    w = normal((h, v), device, seed=4)
    dx, dg = unset((t, h, v), device), unset((t, h, v), device)
    return {
        "args": (x, g, w, dy, dx, dg, 1e-5, t, h, v),
        "kwargs": {"BV": triton.next_power_of_2(v)},
        "grid": lambda meta: (h, triton.cdiv(t, meta["BT"] * meta["NT"])),
        "outputs": (dx, dg),
    }


def _reference_l2(data: Data) -> tuple[torch.Tensor, ...]:
    x = data["args"][0].float()
    rstd = (x.square().sum(-1) + data["args"][3]).rsqrt()
    return x * rstd[:, None], rstd


def _reference_gated(data: Data) -> tuple[torch.Tensor, ...]:
    x, z, w, _, _, eps, m, n, groups = data["args"]
    gate = torch.nn.functional.silu(z.float())
    u = x.float() if data["kwargs"]["NORM_BEFORE_GATE"] else x.float() * gate
    rstd = (u.view(m, groups, n).square().mean(-1) + eps).rsqrt()
    return x.float() * gate * rstd.repeat_interleave(n, 1) * w, rstd


def _reference_swish(data: Data) -> tuple[torch.Tensor, ...]:
    x, g, w, dy, _, _, eps = data["args"][:7]
    g, w, dy, s = g.float(), w.float(), dy.float(), g.float().sigmoid()
    centred = x.float() - x.float().mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    xhat = centred * rstd
    inner = dy * g * s * w
    dx = (inner - xhat * (inner * xhat).mean(-1, keepdim=True) - inner.mean(-1, keepdim=True)) * rstd
    return dx, dy * xhat * w * s * (1 + g * (1 - s))


CASES = (
    [
        Case(
            name=f"chunk_l2norm/{m}x{d}",
            kernel=chunk_l2norm,
            key=("M", "D"),
            space=L2_SPACE,
            make=partial(_make_l2, (m, d), (37, 50)),
            reference=_reference_l2,
            tolerance=(1e-2, 1e-2),
            flops=3.0 * m * d,
            bytes=4.0 * m * d + 4.0 * m,
        )
        for m, d in [
            (4096, 128),
            (32768, 128),
            (262144, 128),
            (2097152, 128),
            (16384, 64),
            (524288, 64),
            (1048576, 192),
            (65536, 256),
            (131072, 192),
        ]
    ]
    + [
        Case(
            name=f"gated_group_rms/{m}x{groups}x{n}" + ("-norm_first" if before else ""),
            kernel=gated_group_rms,
            key=("M", "N", "G"),
            space=GATED_SPACE,
            make=partial(_make_gated, (m, n, groups), (5, 300, 2), before),
            reference=_reference_gated,
            tolerance=(3e-2, 2e-2),
            flops=9.0 * m * n * groups,
            bytes=6.0 * m * n * groups + 4.0 * n * groups + 4.0 * m * groups,
        )
        for m, n, groups, before in [
            (2048, 4096, 1, False),
            (16384, 4096, 1, False),
            (64, 8192, 1, False),
            (32768, 1024, 1, False),
            (16384, 10240, 1, False),
            (8192, 2048, 1, False),
            (16, 5120, 1, False),
            (4096, 1024, 8, True),
            (65536, 512, 4, True),
        ]
    ]
    + [
        Case(
            name=f"swish_gate_norm_backward/{t}x{h}x{v}",
            kernel=swish_gate_norm_backward,
            key=("T", "H", "V"),
            space=SWISH_SPACE,
            make=partial(_make_swish, (t, h, v), (21, 2, 50)),
            reference=_reference_swish,
            tolerance=(3e-2, 2e-2),
            flops=22.0 * t * h * v,
            bytes=10.0 * t * h * v + 2.0 * h * v,
        )
        for t, h, v in [
            (2048, 16, 128),
            (16384, 16, 128),
            (65536, 16, 128),
            (8192, 32, 128),
            (4096, 16, 256),
            (32768, 16, 256),
            (512, 32, 256),
            (16384, 16, 512),
            (4096, 16, 512),
        ]
    ]
)
