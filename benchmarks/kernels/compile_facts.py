"""Kernels whose compiled resources are compared with their forecast, and how each is called.

A `Case` is a kernel, its arguments (tensors on torch's meta device) and the values of its meta-parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def product(
    a, b, c, rows, M, N, K, sam, sak, sbk, sbn, scm, scn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """c = a @ b by pointers; `KIND` names what is not plain about it."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if KIND == "gathered":
        at = a + tl.load(rows + m)[:, None] * sam + k[None, :] * sak
    else:
        at = a + m[:, None] * sam + k[None, :] * sak
    bt = b + k[:, None] * sbk + n[None, :] * sbn
    acc = tl.zeros((BM, BN), tl.int32 if KIND == "int8" else tl.float32)
    gate = tl.zeros((BM, BN), tl.float32)
    for start in range(0, tl.cdiv(K, BK)):
        if KIND == "masked":
            left = tl.load(at, mask=k[None, :] < K - start * BK, other=0.0)
            right = tl.load(bt, mask=k[:, None] < K - start * BK, other=0.0)
        elif KIND == "other":
            left = tl.load(at, mask=k[None, :] < K - start * BK, other=1.0)
            right = tl.load(bt, mask=k[:, None] < K - start * BK, other=1.0)
        else:
            left = tl.load(at)
            if KIND == "indirect":
                row = tl.load(rows + start * BK + k)
                right = tl.load(b + row[:, None] * sbk + n[None, :] * sbn)
            else:
                right = tl.load(bt)
        if KIND == "weight":
            right = (right.to(tl.float16) - 8.0) * 0.5
        elif KIND == "packed":
            right = ((right >> (k % 2 * 4)[:, None]) & 15).to(tl.float16)
        if KIND == "int8":
            acc = tl.dot(left, right, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(left, right, acc, input_precision=PRECISION)
        if KIND == "gated":
            gate = tl.dot(left, tl.load(bt + N * sbn), gate, input_precision=PRECISION)
        at += BK * sak
        bt += BK * sbk
    if KIND == "gated":
        acc = acc * gate / (1.0 + tl.exp(-gate))
    ct = c + m[:, None] * scm + n[None, :] * scn
    tl.store(ct, acc.to(c.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def split_k(
    a, b, c, M, N, K, sam, sbk, scm,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.program_id(2) * BK + tl.arange(0, BK)
    at, bt = a + m[:, None] * sam + k[None, :], b + k[:, None] * sbk + n[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, tl.cdiv(K, BK * PARTS)):
        acc = tl.dot(tl.load(at), tl.load(bt), acc)
        at += BK * PARTS
        bt += BK * PARTS * sbk
    tl.atomic_add(c + m[:, None] * scm + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def persistent(
    a, b, c, M, N, K, sam, sbk, scm, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FLAT: tl.constexpr
):  # fmt: skip
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * tiles_n, 132, flatten=FLAT):
        m, n = tile // tiles_n * BM + tl.arange(0, BM), tile % tiles_n * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, tl.cdiv(K, BK)):
            left = tl.load(a + m[:, None] * sam + (start * BK + k)[None, :])
            acc = tl.dot(left, tl.load(b + (start * BK + k)[:, None] * sbk + n[None, :]), acc)
        where = (m < M)[:, None] & (n < N)[None, :]
        tl.store(c + m[:, None] * scm + n[None, :], acc.to(tl.float16), mask=where)


@triton.jit
def described(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STORED: tl.constexpr
):  # fmt: skip
    left = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    right = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        acc = tl.dot(left.load([m, start]), right.load([start, n]), acc)
    if STORED:
        out = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
        out.store([m, n], acc.to(tl.float16))
    else:
        rows, columns = m + tl.arange(0, BM), n + tl.arange(0, BN)
        tl.store(c + rows[:, None] * N + columns[None, :], acc.to(tl.float16))


@triton.jit
def persistent_described(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr
):  # fmt: skip
    """c = a @ b, or a @ b.T where `TURNED`."""
    left = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    if TURNED:
        right = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    else:
        right = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    out = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * tiles_n, 132, flatten=True):
        m, n = tile // tiles_n * BM, tile % tiles_n * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, tl.cdiv(K, BK)):
            if TURNED:
                acc = tl.dot(left.load([m, start * BK]), right.load([n, start * BK]).T, acc)
            else:
                acc = tl.dot(left.load([m, start * BK]), right.load([start * BK, n]), acc)
        out.store([m, n], acc.to(tl.float16))


@triton.jit
def host_described(a, b, c, M, N, K, scm, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        acc = tl.dot(a.load([m, start]), b.load([start, n]), acc)
    rows, columns = m + tl.arange(0, BM), n + tl.arange(0, BN)
    tl.store(c + rows[:, None] * scm + columns[None, :], acc.to(tl.float16))


@triton.jit
def specialised(
    a, b, c, M, N, K, sam, sbk, scm, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in tl.range(0, K, BK, warp_specialize=True):
        left = tl.load(a + m[:, None] * sam + (start + k)[None, :])
        acc = tl.dot(left, tl.load(b + (start + k)[:, None] * sbk + n[None, :]), acc)
    tl.store(c + m[:, None] * scm + n[None, :], acc.to(tl.float16))


@triton.jit
def scaled(a, b, sa, sb, c, K, sam, sbk, scm, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    k, g = tl.arange(0, BK), tl.arange(0, BK // 32)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        left = tl.load(a + m[:, None] * sam + (start + k)[None, :])
        right = tl.load(b + (start + k)[:, None] + n[None, :] * sbk)
        scale_a = tl.load(sa + m[:, None] * (K // 32) + (start // 32 + g)[None, :])
        scale_b = tl.load(sb + n[:, None] * (K // 32) + (start // 32 + g)[None, :])
        acc = tl.dot_scaled(left, scale_a, "e5m2", right, scale_b, "e5m2", acc)
    tl.store(c + m[:, None] * scm + n[None, :], acc.to(tl.float16))


@triton.jit
def attention(
    q, k, v, o, N, s, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    m, n, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    base = tl.program_id(1) * N * s
    query = tl.load(q + base + m[:, None] * s + d[None, :])
    top, norm = tl.full((BM,), -1.0e30, tl.float32), tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    end = (tl.program_id(0) + 1) * BM if CAUSAL else N
    for start in range(0, end, BN):
        keys = tl.load(k + base + (start + n)[None, :] * s + d[:, None])
        score = tl.dot(query, keys) * scale
        if CAUSAL:
            score = tl.where(m[:, None] >= (start + n)[None, :], score, -1.0e30)
        best = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - best[:, None])
        keep = tl.exp2(top - best)
        norm = norm * keep + tl.sum(p, 1)
        acc = acc * keep[:, None]
        acc = tl.dot(p.to(tl.float16), tl.load(v + base + (start + n)[:, None] * s + d[None, :]), acc)
        top = best
    tl.store(o + base + m[:, None] * s + d[None, :], (acc / norm[:, None]).to(tl.float16))


@triton.jit
def attention_gradient(
    q, k, v, do, dk, dv, N, s, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    n, m, d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, D)
    keys, values = tl.load(k + n[:, None] * s + d[None, :]), tl.load(v + n[:, None] * s + d[None, :])
    gk, gv = tl.zeros((BN, D), tl.float32), tl.zeros((BN, D), tl.float32)
    for start in range(0, N, BM):
        query = tl.load(q + (start + m)[:, None] * s + d[None, :])
        given = tl.load(do + (start + m)[:, None] * s + d[None, :])
        p = tl.exp2(tl.dot(keys, tl.trans(query)))
        gv = tl.dot(p.to(tl.float16), given, gv)
        ds = p * tl.dot(values, tl.trans(given))
        gk = tl.dot(ds.to(tl.float16), query, gk)
    tl.store(dk + n[:, None] * s + d[None, :], gk.to(tl.float16))
    tl.store(dv + n[:, None] * s + d[None, :], gv.to(tl.float16))


@triton.jit
def chunked_state(k, v, h, T, sk, sv, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr):
    i, j, t = (
        tl.program_id(0) * BK + tl.arange(0, BK),
        tl.program_id(1) * BV + tl.arange(0, BV),
        tl.arange(0, BT),
    )
    state = tl.zeros((BK, BV), tl.float32)
    for start in range(0, T, BT):
        keys = tl.load(k + (start + t)[None, :] * sk + i[:, None])
        values = tl.load(v + (start + t)[:, None] * sv + j[None, :])
        out = tl.dot(tl.trans(keys), state.to(tl.float16))
        tl.store(h + (start + t)[:, None] * sv + j[None, :], out.to(tl.float16))
        state += tl.dot(keys, values)


@triton.jit
def chunk_scan(
    cb, x, da, c, state, out, T, H, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """A product before the loop, whose own left operand is weighed and masked."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    k, d = tl.arange(0, BK), tl.arange(0, D)
    decay = tl.load(da + m)
    before = tl.load(state + d[:, None] * H + n[None, :]).to(tl.float16)
    acc = tl.dot(tl.load(c + m[:, None] * D + d[None, :]), before) * tl.exp(decay)[:, None]
    for start in range(0, T, BK):
        left = tl.load(cb + m[:, None] * T + (start + k)[None, :]).to(tl.float32)
        left = left * tl.exp(decay[:, None] - tl.load(da + start + k)[None, :])
        left = tl.where(m[:, None] >= (start + k)[None, :], left, 0.0).to(tl.float16)
        acc = tl.dot(left, tl.load(x + (start + k)[:, None] * H + n[None, :]), acc)
    tl.store(out + m[:, None] * H + n[None, :], acc.to(tl.float16))


@triton.jit
def _compose(a1, b1, a2, b2):
    return a2 * a1, a2 * b1 + b2


@triton.jit
def rows_1d(x, y, n, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """One row a program."""
    i = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    value = tl.load(x + row * n + i, mask=i < n, other=0.0)
    if KIND == "argmax":
        tl.store(y + row, tl.argmax(value, 0).to(tl.float32))
    elif KIND == "softmax":
        e = tl.exp(value - tl.max(value, 0))
        tl.store(y + row * n + i, e / tl.sum(e, 0), mask=i < n)
    elif KIND == "widen":
        tl.store(y + row * n + i, value.to(y.dtype.element_ty), mask=i < n)
    elif KIND == "cumsum":
        tl.store(y + row * n + i, tl.cumsum(value, 0), mask=i < n)
    elif KIND == "norm":
        mean = tl.sum(value, 0) / n
        shifted = tl.where(i < n, value - mean, 0.0)
        tl.store(y + row * n + i, shifted / tl.sqrt(tl.sum(shifted * shifted, 0) / n + 1e-5), mask=i < n)
    elif KIND == "interleave":
        other = tl.load(x + (row + 1) * n + i, mask=i < n, other=0.0)
        j = tl.arange(0, 2 * BLOCK)
        tl.store(y + row * n + j, tl.interleave(value, other), mask=j < n)
    elif KIND == "histogram":
        j = tl.arange(0, 256)
        tl.store(y + row * 256 + j, tl.histogram(value.to(tl.int32), 256).to(tl.float32))
    else:
        tl.store(y + row * n + i, tl.gather(value, (i * 7) % BLOCK, 0), mask=i < n)


@triton.jit
def tiles_2d(x, y, n, ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, AXIS: tl.constexpr):
    """One tile of [ROWS, BLOCK] a program."""
    r, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = r[:, None] * n + i[None, :]
    value = tl.load(x + at)
    if KIND == "reduce":
        total = tl.sum(value, AXIS)
        if AXIS == 0:
            tl.store(y + tl.program_id(0) * n + i, total)
        else:
            tl.store(y + r, total)
    elif KIND == "cumsum":
        tl.store(y + at, tl.cumsum(value, AXIS))
    elif KIND == "recurrence":
        decay = tl.load(y + at)
        _, state = tl.associative_scan((decay, value), AXIS, _compose)
        tl.store(y + at, state)
    elif KIND == "gather":
        index = ((r[:, None] * 5 + i[None, :] * 7) % (ROWS if AXIS == 0 else BLOCK)).to(tl.int32)
        tl.store(y + at, tl.gather(value, index, AXIS))
    elif KIND == "sort":
        tl.store(y + at, tl.sort(value, 1))
    elif KIND == "transpose":
        tl.store(y + i[:, None] * n + r[None, :], tl.trans(value))
    elif KIND == "plus_turned":
        tl.store(y + at, value + tl.trans(tl.load(x + i[:, None] * n + r[None, :])))
    else:
        norm = value / tl.sqrt(tl.sum(value * value, 1) / n + 1e-5)[:, None]
        tl.store(y + at, norm)


@triton.jit
def top_rows(x, y, n, ROWS: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr):
    r, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    value = tl.topk(tl.load(x + r[:, None] * n + i[None, :]), KEEP)
    tl.store(y + r[:, None] * n + tl.arange(0, KEEP)[None, :], value)


@dataclass(frozen=True)
class Case:
    """A kernel as it is called."""

    fn: Any
    arguments: tuple[Any, ...]
    tuned: tuple[str, ...]
    """Names of the meta-parameters, in the order of `values`."""
    values: tuple[tuple[int, ...], ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Meta-parameters that do not vary."""
    kind: str = "other"
    warps: tuple[int, ...] = (4, 8)
    stages: tuple[int, ...] = (1, 2, 3, 4, 5)
    lacks: str = ""
    """Targets that have no such type, as a prefix of `backend:arch`; empty for none."""

    def configs(self) -> list[tuple[dict[str, int], int, int]]:
        """(meta-parameters, warps, stages), all."""
        every = itertools.product(self.values, self.warps, self.stages)
        return [(dict(zip(self.tuned, values, strict=True)), w, s) for values, w, s in every]


PRODUCT = ("BM", "BN", "BK")
PRODUCTS = (
    (16, 64, 64), (32, 64, 32), (64, 64, 32), (64, 64, 64), (128, 64, 64), (64, 128, 32), (128, 128, 32),
    (128, 128, 64), (128, 256, 64), (256, 128, 32), (64, 256, 128), (128, 128, 128), (256, 128, 64),
)  # fmt: skip
FEW = PRODUCTS[1::2]
ROWS = ("ROWS", "BLOCK")
ALONE = {"warps": (1, 2, 4, 8), "stages": (2,)}


def _tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape or (4096, 4096), dtype=dtype, device="meta")


def _product(
    dtype: torch.dtype,
    kind: str = "plain",
    *,
    b: torch.dtype | None = None,
    out: torch.dtype = torch.float16,
    n: int = 4096,
    k_next: bool = False,
    precision: str | None = None,
    values: Sequence[tuple[int, ...]] = FEW,
    lacks: str = "",
) -> Case:
    right = (1, n) if k_next else (n, 1)
    given = (_tensor(dtype), _tensor(b or dtype), _tensor(out), _tensor(torch.int32, 4096))
    fixed = {"KIND": "int8" if dtype is torch.int8 else kind, "PRECISION": precision}
    call = (*given, n, n, n, n, 1, *right, n, 1)
    return Case(product, call, PRODUCT, tuple(values), fixed, "product", lacks=lacks)


F16, F32, I8, E5 = torch.float16, torch.float32, torch.int8, torch.float8_e5m2
_SQUARE = (_tensor(F16), _tensor(F16), _tensor(F16), 4096, 4096, 4096, 4096, 4096, 4096)
CASES: dict[str, Case] = {
    "matmul_fp16": _product(F16, values=PRODUCTS),
    "matmul_fp16_k": _product(F16, k_next=True),
    "matmul_fp16_1000": _product(F16, n=1000),
    "matmul_bf16_fp32": _product(torch.bfloat16, out=F32),
    "matmul_fp32": _product(F32, out=F32),
    "matmul_fp32_k": _product(F32, out=F32, k_next=True),
    "matmul_fp32_ieee": _product(F32, out=F32, precision="ieee"),
    "matmul_fp8e5": _product(E5),
    "matmul_fp8e5_k": _product(E5, k_next=True),
    "matmul_fp8e4": _product(torch.float8_e4m3fn, lacks="cuda:80"),
    "matmul_int8": _product(I8, out=torch.int32),
    "matmul_int8_k": _product(I8, out=torch.int32, k_next=True),
    "matmul_masked": _product(F16, "masked"),
    "matmul_masked_1000": _product(F16, "masked", n=1000),
    "matmul_other": _product(F16, "other"),
    "matmul_gathered": _product(F16, "gathered"),
    "matmul_indirect": _product(F16, "indirect"),
    "matmul_gated": _product(F16, "gated"),
    "matmul_weight_int8": _product(F16, "weight", b=I8),
    "matmul_packed": _product(F16, "packed", b=I8),
    "matmul_split_k": Case(split_k, (*_SQUARE[:2], _tensor(F32), *_SQUARE[3:]), PRODUCT, FEW, {"PARTS": 4}, "product"),
    "matmul_persistent": Case(persistent, _SQUARE, PRODUCT, FEW, {"FLAT": False}, "product"),
    "matmul_persistent_flat": Case(persistent, _SQUARE, PRODUCT, FEW, {"FLAT": True}, "product"),
    "matmul_persistent_descriptors": Case(
        persistent_described, _SQUARE[:6], PRODUCT, FEW, {"TURNED": False}, "product"
    ),
    "matmul_persistent_turned": Case(
        persistent_described, _SQUARE[:6], PRODUCT, PRODUCTS, {"TURNED": True}, "product"
    ),
    "matmul_descriptors": Case(described, _SQUARE[:6], PRODUCT, FEW, {"STORED": True}, "product"),
    "matmul_descriptors_read": Case(described, _SQUARE[:6], PRODUCT, FEW, {"STORED": False}, "product"),
    "matmul_specialised": Case(specialised, _SQUARE, PRODUCT, FEW, kind="product"),
    "dot_scaled_mxfp8": Case(
        scaled,
        (_tensor(E5), _tensor(E5), _tensor(torch.uint8, 4096, 128), _tensor(torch.uint8, 4096, 128), _tensor(F16),
         4096, 4096, 4096, 4096),
        PRODUCT, ((64, 64, 64), (128, 64, 64), (128, 128, 64), (128, 128, 128), (128, 256, 128)), kind="product",
    ),
    "attention_64": Case(
        attention, (*[_tensor(F16)] * 4, 4096, 4096, 0.125), ("BM", "BN"),
        ((64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128)), {"D": 64, "CAUSAL": False}, "attention",
    ),
    "attention_128_causal": Case(
        attention, (*[_tensor(F16)] * 4, 4096, 4096, 0.125), ("BM", "BN"),
        ((16, 64), (64, 32), (64, 64), (128, 32), (128, 64), (128, 128)), {"D": 128, "CAUSAL": True}, "attention",
    ),
    "attention_gradient": Case(
        attention_gradient, (*[_tensor(F16)] * 6, 4096, 4096), ("BM", "BN"),
        ((32, 64), (64, 64), (32, 128), (64, 128)), {"D": 64}, "attention",
    ),
    "chunked_state": Case(
        chunked_state, (*[_tensor(F16)] * 3, 4096, 4096, 4096), ("BK", "BV", "BT"),
        ((32, 32, 32), (32, 64, 64), (64, 64, 32), (64, 64, 64), (64, 128, 64), (128, 64, 32), (128, 128, 32),
         (128, 128, 64)), kind="attention", warps=(2, 4), stages=(2, 3, 4),
    ),
    "chunk_scan": Case(
        chunk_scan,
        (_tensor(F16), _tensor(F16), _tensor(F32, 4096), _tensor(F16), _tensor(F32), _tensor(F16), 4096, 4096), PRODUCT,
        ((64, 128, 64), (128, 128, 64), (128, 256, 64), (64, 64, 128)), {"D": 128}, "attention",
    ),
}  # fmt: skip
for _name in ("argmax", "softmax", "cumsum", "norm", "interleave", "gather", "histogram"):
    CASES[f"{_name}_rows"] = Case(
        rows_1d, (_tensor(F32), _tensor(F32), 4096), ("BLOCK",), ((256,), (1024,), (4096,), (16384,)),
        {"KIND": _name}, **ALONE,
    )  # fmt: skip
CASES["widen_rows"] = replace(
    CASES["norm_rows"], arguments=(_tensor(F16), _tensor(F32), 4096), fixed={"KIND": "widen"}
)
for _name, _axis in itertools.product(("reduce", "cumsum", "recurrence", "gather"), (0, 1)):
    CASES[f"{_name}_tile_{_axis}"] = Case(
        tiles_2d, (_tensor(F32), _tensor(F32), 4096), ROWS,
        ((2, 64), (8, 64), (8, 256), (32, 64), (32, 256), (64, 128)),
        {"KIND": _name, "AXIS": _axis}, **ALONE,
    )  # fmt: skip
for _name, _dtype in itertools.product(("transpose", "plus_turned", "row_norm"), (F32, F16)):
    CASES[f"{_name}_{str(_dtype)[-2:]}"] = Case(
        tiles_2d, (_tensor(_dtype), _tensor(_dtype), 4096), ROWS, ((32, 32), (32, 64), (64, 64), (128, 64), (128, 128)),
        {"KIND": _name, "AXIS": 0}, **ALONE,
    )  # fmt: skip
CASES["sort_rows"] = Case(
    tiles_2d, (_tensor(F32), _tensor(F32), 4096), ROWS, ((1, 64), (4, 64), (1, 256), (8, 128)),
    {"KIND": "sort", "AXIS": 1}, **ALONE,
)  # fmt: skip
CASES["topk_rows"] = Case(
    top_rows,
    (_tensor(F32), _tensor(F32), 4096),
    (*ROWS, "KEEP"),
    ((1, 128, 8), (4, 128, 8), (4, 256, 16)),
    **ALONE,
)
