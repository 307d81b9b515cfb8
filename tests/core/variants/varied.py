"""Variants for the tests of the core: a base kernel's text, other sources of it, calls and checks."""

from __future__ import annotations

from forecast_autotune.records import Argument, Device, Kernel, Problem
from forecast_autotune.variants import Check, Origin, Provenance, Variant

H200 = Device("NVIDIA H200", "cuda", "90")
CPU = Device("cpu-x86_64", "cpu")
SHA = "5" * 64

BASE = """import triton
import triton.language as tl


@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)
"""
SUM = BASE.replace(
    "2 * tl.load(x + i, mask=i < n)", "tl.load(x + i, mask=i < n) + tl.load(x + i, mask=i < n)"
)
NOTE = Provenance(Origin.LLM, "model-1", prompt_sha256="ab", note="adds instead of multiplying")


def variant(source: str = SUM, *checks: Check, title: str = "sum", sha: str = SHA) -> Variant:
    result = Variant.of("double", sha, source, NOTE, title=title)
    return Variant(**{**vars(result), "checks": checks})


def arguments(
    n: int = 4096, *, dtype: str = "float32", rows: int | None = None, aligned: bool = True
) -> list[Argument]:
    """A call of `double` on `n` elements; with rows, on a matrix whose rows are `n` long."""
    shape = (n,) if rows is None else (rows, n)
    stride = (1,) if rows is None else (n, 1)
    tensors = [Argument(name, "tensor", dtype, shape, stride, aligned) for name in ("x", "out")]
    return [*tensors, Argument("n", "scalar", "i32", value=n)]


def problem(n: int = 4096, *, device: Device = H200, sha: str = SHA, **options: object) -> Problem:
    kernel = Kernel("double", source=BASE, source_sha256=sha)
    return Problem.of(kernel, arguments(n, **options), device)  # type: ignore[arg-type]


def check(signature: str, *, passed: bool = True, device: str = H200.slug, at: str = "") -> Check:
    return Check(device, signature, passed, "12 launches", at)
