"""Bias, GELU, layer scale and residual of a transformer block as one flat pointwise kernel."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "activation", "inductor"


@triton.jit
def poi_fused_add_gelu_mul(
    in_ptr0,
    in_ptr1,
    in_ptr2,
    in_ptr3,
    out_ptr0,
    ks0,
    xnumel,
    XBLOCK: tl.constexpr,
):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x2 = xindex
    x0 = xindex % ks0
    tmp0 = tl.load(in_ptr0 + x2, xmask).to(tl.float32)
    tmp1 = tl.load(in_ptr1 + x0, xmask, eviction_policy="evict_last").to(tl.float32)
    tmp12 = tl.load(in_ptr2 + x0, xmask, eviction_policy="evict_last").to(tl.float32)
    tmp14 = tl.load(in_ptr3 + x2, xmask).to(tl.float32)
    tmp2 = tmp0 + tmp1
    tmp3 = 0.5
    tmp4 = tmp2 * tmp3
    tmp5 = 0.7071067811865476
    tmp6 = tmp2 * tmp5
    tmp7 = tl.erf(tmp6)
    tmp8 = 1.0
    tmp9 = tmp7 + tmp8
    tmp10 = tmp4 * tmp9
    tmp13 = tmp10 * tmp12
    tmp15 = tmp13 + tmp14
    tl.store(out_ptr0 + x2, tmp15, xmask)


SPACE: Space = {
    "kwargs": {"XBLOCK": [32, 128, 256, 512, 1024, 2048, 4096, 16384]},
    "num_warps": [1, 2, 4, 8, 16],
    "num_stages": [1],
    "where": lambda c: c["XBLOCK"] <= 4096 * c["num_warps"],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    rows, columns = tiny if small else shape
    x = normal((rows, columns), device, dtype=torch.bfloat16, seed=1)
    bias = normal((columns,), device, dtype=torch.bfloat16, seed=2)
    gamma = normal((columns,), device, dtype=torch.bfloat16, seed=3)
    residual = normal((rows, columns), device, dtype=torch.bfloat16, seed=4)
    y = unset((rows, columns), device, dtype=torch.bfloat16)
    xnumel = rows * columns
    return {
        "args": (x, bias, gamma, residual, y, columns, xnumel),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(xnumel, meta["XBLOCK"]),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, bias, gamma, residual = (t.float() for t in data["args"][:4])
    return (torch.nn.functional.gelu(x + bias) * gamma + residual,)


CASES = [
    Case(
        name=f"poi_fused_add_gelu_mul/{r}x{c}",
        kernel=poi_fused_add_gelu_mul,
        key=("ks0", "xnumel"),
        space=SPACE,
        make=partial(_make, (r, c), (7, 70)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        flops=8.0 * r * c,
        bytes=2.0 * (3 * r * c + 2 * c),
    )
    for r, c in [
        (16384, 16384),
        (32768, 4096),
        (8192, 11008),
        (2048, 4096),
        (50176, 768),
        (401408, 96),
        (256, 5120),
        (64, 14336),
        (16, 1024),
    ]
]
