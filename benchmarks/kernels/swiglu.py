"""SwiGLU: silu(gate) * up over a packed projection [tokens, 2 * hidden], element by element."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "activation", "tutorial"


@triton.jit
def swiglu_kernel(
    gate_up,
    out,
    tokens,
    hidden,
    stride_x,
    stride_o,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_n = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (offs_m < tokens)[:, None] & (offs_n < hidden)[None, :]
    x = gate_up + offs_m[:, None].to(tl.int64) * stride_x + offs_n[None, :]
    gate = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + hidden, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    y_ptrs = out + offs_m[:, None].to(tl.int64) * stride_o + offs_n[None, :]
    tl.store(y_ptrs, y.to(out.dtype.element_ty), mask=mask)


SPACE: Space = {
    "kwargs": {"BM": [1, 2, 4, 16], "BN": [32, 128, 256, 512, 1024, 2048]},
    "num_warps": [1, 4, 8, 16],
    "num_stages": [3],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    tokens, hidden = tiny if small else shape
    x = normal((tokens, 2 * hidden), device, seed=1)
    y = unset((tokens, hidden), device)
    return {
        "args": (x, y, tokens, hidden, x.stride(0), y.stride(0)),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(tokens, meta["BM"]), triton.cdiv(hidden, meta["BN"])),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    gate, up = data["args"][0].float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up,)


CASES = [
    Case(
        name=f"swiglu/{tokens}x{hidden}",
        kernel=swiglu_kernel,
        key=("tokens", "hidden"),
        space=SPACE,
        make=partial(_make, (tokens, hidden), tiny),
        reference=_reference,
        tolerance=(5e-3, 5e-3),
        # Sigmoid (negate, exponentiate, add, divide) and two products.
        flops=6.0 * tokens * hidden,
        bytes=2.0 * 3 * tokens * hidden,
    )
    for (tokens, hidden), tiny in [
        ((8192, 14336), (5, 300)),
        ((2048, 11008), (4, 256)),
        ((16, 14336), (1, 77)),
    ]
]
