import triton
import triton.language as tl


@triton.jit
def _swiglu(gate, up, y, gs, us, ys, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    g = tl.load(gate + row * gs + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * us + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * ys + at, (g / (1.0 + tl.exp(-g)) * u).to(tl.float16), mask=mask)


def run(gate, up, y):
    m, n = gate.shape
    _swiglu[(m, triton.cdiv(n, 64))](gate, up, y, gate.stride(0), up.stride(0), y.stride(0), n, 64)
