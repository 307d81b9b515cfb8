"""Configs of generated kernels on a device: timed while the program runs, and kept where that ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache

from forecast_autotune import enable_torch_compile
from forecast_autotune.records import Decision

pytestmark = pytest.mark.gpu

OPTIONS = {"max_autotune": True, "coordinate_descent_tuning": True}


def normalized(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, x.shape[-1:]))


def first_and_last(folder: Path, generated_kernels: str) -> tuple[int, int, list[Decision]]:
    """Kernels that are undecided after the first call and in the end, and what is stored of them."""
    AsyncCompile.warm_pool()
    until = time.monotonic() + 60.0
    while not AsyncCompile.use_process_pool() and time.monotonic() < until:
        time.sleep(0.02)
    x = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16)
    torch._dynamo.reset()
    with enable_torch_compile(store=folder, generated_kernels=generated_kernels) as handle, fresh_cache():
        compiled = torch.compile(normalized, options=OPTIONS)
        found = compiled(x)
        first = handle.descending
        while handle.descending and time.monotonic() < until:
            found = compiled(x)
        last = handle.descending
        assert handle.session.warn_once.messages == []
        torch.testing.assert_close(found, normalized(x), atol=2e-2, rtol=2e-2)
        stored = [d for _, d in handle.session.snapshot.store.decisions()]
    return first, last, [d for d in stored if d.settings == "coordinate descent"]


def test_they_are_decided_while_the_program_runs(tmp_path: Path) -> None:
    _, last, stored = first_and_last(tmp_path, "later")
    assert last == 0
    assert stored
    assert all(d.measured > 0 for d in stored)


def test_all_are_decided_at_the_first_launch_where_that_is_wanted(tmp_path: Path) -> None:
    first, _, stored = first_and_last(tmp_path, "first")
    assert first == 0
    assert stored
