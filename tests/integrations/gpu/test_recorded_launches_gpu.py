"""What is recorded on a real device, what it says and leaves behind: choices of torch.compile, and short launches.

python -m pytest -q -m gpu tests/integrations/gpu/test_recorded_launches_gpu.py
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch._inductor.utils import fresh_cache

from forecast_autotune import autotune, enable_torch_compile
from forecast_autotune.records import Candidate, Measurement
from forecast_autotune.store import Store
from forecast_integrations.inductor import choice_timing
from forecast_integrations.inductor.api import missing_hooks
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.timer.timers import CallTime, CallTimer, EventTimer
from tests.integrations.gpu.kernels import accumulate, add
from tests.integrations.null import blocks, kernel_call

pytestmark = pytest.mark.gpu

RECORDED, BY_EVENTS = "graph-l2read-2", "events-l2read-3"
OPTIONS = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,TRITON"}


def assert_random_numbers_are_drawn() -> None:
    """A recording that ended badly would refuse them from there on."""
    torch.manual_seed(1)
    one = torch.rand(4, device="cuda")
    torch.manual_seed(1)
    assert torch.equal(one, torch.rand(4, device="cuda"))


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, w)


def product_and_more(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.mm(x, w) + 1.0)


def tensors(rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randn(rows, 4096), torch.randn(4096, 4096)
    x, w = (t.to("cuda", torch.bfloat16) for t in made)
    return x, w


def compiled(
    function: Callable[..., torch.Tensor], folder: Path, rows: int = 16, **options: Any
) -> list[Measurement]:
    """What is stored of the choices of a function that is compiled; its result is right."""
    x, w = tensors(rows)
    torch._dynamo.reset()
    with fresh_cache(), enable_torch_compile(store=folder, **options) as handle:
        assert missing_hooks() == []
        found = torch.compile(function, options=OPTIONS)(x, w)
    assert handle.session.warn_once.messages == []
    torch.testing.assert_close(found, function(x, w), rtol=2e-2, atol=0.5)
    return [m for table in Store(folder).tables() for m in table.measurements if m.ok]


def timed(call: Callable[[], object], **more: Any) -> CallTime:
    timer = CallTimer()
    with timer.on_stream():
        for _ in range(3):
            call()
        return timer.time(call, math.inf, **more)


def of_library(rows: list[Measurement]) -> Measurement:
    (found,) = [m for m in rows if str(m.candidate).startswith("aten::")]
    return found


def test_the_library_is_told_what_a_recorded_launch_takes(tmp_path: Path) -> None:
    rows = compiled(product, tmp_path)
    x, w = tensors()
    out = torch.empty(16, 4096, device="cuda", dtype=torch.bfloat16)
    beside = timed(lambda: torch.mm(x, w, out=out))
    told = of_library(rows)
    assert (told.protocol, beside.protocol) == (RECORDED, RECORDED)
    assert told.ms == pytest.approx(beside.ms, rel=0.2)
    # All are told by a device's clock; the short ones were recorded, but for those that could not win.
    assert {m.protocol for m in rows} <= {RECORDED, BY_EVENTS}
    best = min(rows, key=lambda m: m.ms)
    assert best.protocol == RECORDED
    assert not any(m.extra.get("host_bound") for m in rows)


def test_a_template_is_told_about_what_events_tell(tmp_path: Path) -> None:
    """A replay that is far shorter would be one without the kernel."""
    # A forecast may leave the library's kernel alone on the list.
    rows = compiled(product, tmp_path, mode="exhaustive")
    templates = [m for m in rows if str(m.candidate).startswith("triton::")]
    assert templates
    # 32 MiB are read: no kernel on any device does that in 4 us.
    assert all(0.004 < m.ms < 0.15 for m in templates)


def test_fused_kernels_and_long_products_compile(tmp_path: Path) -> None:
    compiled(product_and_more, tmp_path / "fused")
    long = compiled(product, tmp_path / "long", rows=8192)
    assert {m.protocol for m in long} == {BY_EVENTS}


def test_what_waits_for_the_device_falls_back_and_leaves_nothing_behind() -> None:
    x = torch.randn(1 << 16, device="cuda")
    waits = timed(lambda: x.sum().item())
    # What waits so long is not tried to be recorded at all.
    assert waits.host_bound or not waits.recordable
    assert waits.protocol == BY_EVENTS
    synchronizes = timed(torch.cuda.synchronize)
    assert synchronizes.host_bound or not synchronizes.recordable
    # The allocator gives memory back, the random generator answers, and others are recorded.
    torch.cuda.empty_cache()
    assert_random_numbers_are_drawn()
    assert timed(lambda: torch.add(x, 1.0, out=x)).protocol == RECORDED
    # A program's own graphs, too.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2.0
    graph.replay()
    torch.testing.assert_close(y, x * 2.0)


def test_a_call_that_takes_memory_is_recorded_and_gives_it_back() -> None:
    x = torch.randn(1 << 20, device="cuda")
    timed(lambda: x * 2.0)  # what is made once is made
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        found = timed(lambda: x * 2.0)
        assert (found.protocol, found.recordable) == (RECORDED, True)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_nothing_is_timed_inside_a_capture_of_the_programs() -> None:
    x = torch.randn(1024, device="cuda")
    torch.add(x, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = choice_timing.open_clock(x.device)
        torch.add(x, 1.0)
    assert inside is None
    assert choice_timing.open_clock(x.device) is not None


# --- short launches of a tuned kernel ---

N = 1 << 18


def call_of(kernel: Any, *args: Any, **options: Any) -> tuple[KernelCall, list[Candidate]]:
    """A call for `N` elements with one candidate per size of a block."""
    tuner = autotune(blocks(256, 512, 1024), ["n"], store=False, **options)(kernel)
    return kernel_call(tuner, *args, N, grid=lambda meta: (triton.cdiv(N, meta["BLOCK"]),))


def test_a_short_kernel_is_recorded_and_nothing_is_left_behind() -> None:
    x, y = (torch.randn(N, device="cuda") for _ in range(2))
    out = torch.full_like(x, math.nan)
    call, candidates = call_of(add, x, y, out)
    timer = EventTimer(call)
    for candidate in candidates:
        timer.first(candidate, 20.0)
        times = timer.time_adaptively(candidate, math.inf)
        assert times
        assert timer.protocol_of(candidate) == RECORDED
        assert not timer.is_host_bound(candidate)
        assert 5e-4 < statistics.median(times) < 0.03
    torch.testing.assert_close(out, x + y)
    assert all(statistics.median(t) > 0 for t in timer.in_turns(candidates))
    timer.close()
    assert_random_numbers_are_drawn()


def test_replays_and_events_agree_but_for_the_clocks_steps() -> None:
    x, y = (torch.randn(N, device="cuda") for _ in range(2))
    call, (candidate, *_) = call_of(add, x, y, torch.empty_like(x))
    timer = EventTimer(call)
    timer.first(candidate, 20.0)
    recorded = statistics.median(timer.time_adaptively(candidate, math.inf) or [math.nan])
    plain = statistics.median(timer._launches([candidate], 60)[0])
    timer.close()
    # Milliseconds: two of the clock's steps, and what a launch takes beyond a replay.
    assert recorded == pytest.approx(plain, abs=0.004)


def test_what_works_in_place_is_restored() -> None:
    total, x = torch.ones(N, device="cuda"), torch.ones(N, device="cuda")
    call, (candidate, *_) = call_of(accumulate, total, x, restore_value=["acc"])
    timer = EventTimer(call)
    timer.first(candidate, 20.0)
    timer.time_adaptively(candidate, math.inf)
    assert timer.protocol_of(candidate) == RECORDED
    timer.close()
    torch.cuda.synchronize()
    assert bool((total == 1).all())


def test_a_decision_inside_a_stream_of_the_users() -> None:
    x, y = (torch.randn(N, device="cuda") for _ in range(2))
    out = torch.full_like(x, math.nan)
    tuner = autotune(blocks(256, 512, 1024), ["n"], store=False, mode="exhaustive")(add)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tuner[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](x, y, out, N)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(out, x + y)
    assert set(tuner.configs_timings) == set(tuner.configs)
