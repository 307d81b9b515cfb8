"""Sums in Triton for a real device, right and wrong on purpose: what the fake driver's programs are without one."""

from __future__ import annotations

from benchmarks.lib.machine_code.sums import COUNT, SumCall
from forecast_harness.clocks.compilation.workers import BuildRequest, CompileWorkers
from forecast_harness.clocks.records import Program

_SOURCE = """import torch, triton, triton.language as tl

@triton.jit
def kernel(x, y, total, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    value = tl.load(x + at, mask=mask) + tl.load(y + at, mask=mask)
BODY

def run(x, y):
    total = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 256),)](x, y, total, x.numel(), BLOCK=256)
    return total
"""
_STORE = "    tl.store(total + at, value, mask=mask)"
_FAR = 1 << 40
"""Elements beyond a buffer at which nothing is mapped."""


def _assembly(text: str) -> str:
    return f'tl.inline_asm_elementwise("{text}", "=r,r", [at], dtype=tl.int32, is_pure=False, pack=1)'


BODIES = {
    "right": (_STORE, ""),
    "wrong": ("    tl.store(total + at, value + 1, mask=mask)", "wrong values"),
    "writes nothing": ("    tl.store(total + at, value, mask=at < 0)", "two launches"),
    "leaves the last element": ("    tl.store(total + at, value, mask=at < n - 1)", ""),
    "depends on its addresses": (
        "    bit = ((total.to(tl.int64) >> 8) & 15) != 0\n    tl.store(total + at, value + bit, mask=mask)",
        "",
    ),
    "out of bounds": (_STORE + "\n    tl.store(total + n + at, value, mask=at < 16)", "out of bounds"),
    "out of bounds before": (
        _STORE + "\n    tl.store(total - 16 + at, value, mask=at < 16)",
        "out of bounds",
    ),
    "writes into an input": (_STORE + "\n    tl.store(y + at, value, mask=at < 4)", "input changed"),
    "differs from launch to launch": (
        _STORE.replace("value,", "value + (tl.extra.cuda.globaltimer() % 512).to(tl.float32) * 1e-9,"),
        "",
    ),
    "illegal address": (f"    tl.store(total + at + {_FAR}, value, mask=mask)", "device error"),
    "illegal read": (
        f"    value += tl.load(x + at + {_FAR}, mask=mask)\n{_STORE}",
        "device error",
    ),
    "misaligned": (
        "    tl.store((total.to(tl.pointer_type(tl.int8)) + 1).to(tl.pointer_type(tl.float32)) + at, value, mask=mask)",
        "",
    ),
    "trap": (
        f"{_STORE}\n    {_assembly('trap; mov.b32 $0, $1;')}",
        "device error",
    ),
    "never ends": (
        f"    t = {_assembly('mov.u32 $0, %clock;')}\n"
        "    while tl.max(t, 0) != -7:\n"
        f"        t = {_assembly('mov.u32 $0, %clock; or.b32 $0, $0, 8;')}\n{_STORE}",
        "hang",
    ),
}
"""By their attack: the kernel's last lines, and how the objection to it begins ('': any)."""


def compile_sums(workers: CompileWorkers, count: int = COUNT) -> tuple[dict[str, Program], dict[str, str]]:
    """The programs, by what they do; and why those that are missing could not be compiled."""
    call = SumCall(0, count)
    futures = {
        name: workers.submit(BuildRequest(name, _SOURCE.replace("BODY", body), "run", (call.arguments,)))
        for name, (body, _) in BODIES.items()
    }
    built = {name: future.result() for name, future in futures.items()}
    result = {n: b.programs[0] for n, b in built.items() if b.programs}
    return result, {n: b.error or b.host_code or b.infrastructure for n, b in built.items() if not b.programs}
