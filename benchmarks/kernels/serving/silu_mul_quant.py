"""SwiGLU of a fused gate-and-up projection, quantised to fp8 by groups as the next GEMM wants it."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.serving._work import moved, scaled_e4m3

FAMILY, HAND = "activation", "serving"


@triton.jit
def srv_silu_mul_quant(
    input_ptr,
    output_ptr,
    output_scale_ptr,
    num_tokens,
    size_n,
    stride_in_t,
    stride_out_t,
    stride_scale_t,
    fp8_max,
    group_size: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    NUM_STAGE: tl.constexpr,
):
    BLOCK_N: tl.constexpr = BLOCK_GROUPS * group_size
    pid_n = tl.program_id(0)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_g = pid_n * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    mask_n = offs_n < size_n
    for token in tl.range(tl.program_id(1), num_tokens, TOKEN_STRIDE, num_stages=NUM_STAGE):
        row = input_ptr + token * stride_in_t
        gate = tl.load(row + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        up = tl.load(row + size_n + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        gate = gate / (1 + tl.exp(-gate))
        product = tl.reshape(gate * up, (BLOCK_GROUPS, group_size))
        scale = tl.maximum(tl.max(tl.abs(product), axis=1), 1e-10) / fp8_max
        quantised = tl.clamp(product / scale[:, None], -fp8_max, fp8_max)
        quantised = tl.reshape(quantised, (BLOCK_N,)).to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + token * stride_out_t + offs_n, quantised, mask=mask_n)
        tl.store(output_scale_ptr + token * stride_scale_t + offs_g, scale, mask=offs_g * group_size < size_n)


SPACE: Space = {
    "kwargs": {"BLOCK_GROUPS": [1, 4, 16], "TOKEN_STRIDE": [16, 128, 1024], "NUM_STAGE": [1, 4]},
    "num_warps": [1, 4, 8],
    "num_stages": [3],
}

GROUP = 128


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    tokens, n = tiny if small else shape
    x = normal((tokens, 2 * n), device, dtype=torch.bfloat16, seed=1, scale=20.0)
    if small:  # a gate this large passes its sign on and nothing else, so that products are exact
        gate = torch.where(torch.arange(n, device=device) % 3 > 0, 64.0, -64.0).expand(tokens, n)
        x = torch.cat([gate, scaled_e4m3((tokens, n), GROUP, device, seed=1) / 64], -1).bfloat16()
    out = unset((tokens, n), device, dtype=torch.float8_e4m3fn)
    scale = unset((tokens, n // GROUP), device, dtype=torch.float32)
    strides = (x.stride(0), out.stride(0), scale.stride(0))
    return {
        "args": (x, out, scale, tokens, n, *strides, 448.0),
        "kwargs": {"group_size": GROUP},
        "grid": lambda meta: (
            triton.cdiv(n, meta["BLOCK_GROUPS"] * GROUP),
            min(tokens, meta["TOKEN_STRIDE"]),
        ),
        "outputs": (out, scale),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    gate, up = data["args"][0].float().chunk(2, -1)
    grouped = (torch.nn.functional.silu(gate) * up).unflatten(-1, (-1, GROUP))
    scale = grouped.abs().amax(-1) / 448.0
    # Not rounded: half a step of e4m3 is a sixteenth of the value.
    return (grouped / scale[..., None]).flatten(-2), scale


CASES = [
    Case(
        name=f"srv_silu_mul_quant/{tokens}x{n}",
        kernel=srv_silu_mul_quant,
        key=("num_tokens", "size_n"),
        space=SPACE,
        make=partial(_make, (tokens, n), (5, 384)),
        reference=_reference,
        tolerance=(5e-3, 7e-2),
        # Negate, exponentiate, add, divide, multiply; absolute value, maximum, divide.
        flops=8.0 * tokens * n,
        bytes=moved(partial(_make, (tokens, n), (tokens, n))),
    )
    # Every row has a multiple of 16 groups, or there would be two versions of each config.
    for tokens, n in [
        (16, 2048),
        (64, 14336),
        (512, 2048),
        (1024, 14336),
        (4096, 8192),
        (8192, 4096),
        (16384, 2048),
        (2048, 28672),
        (256, 18432),
    ]
]
