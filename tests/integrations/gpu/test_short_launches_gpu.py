"""Short launches on a real device: what is recorded, what it says, and what it leaves behind."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
import triton

from forecast_autotune import autotune
from forecast_autotune.records import Candidate
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.timer.timers import EventTimer
from tests.integrations.gpu.kernels import accumulate, add
from tests.integrations.null import blocks, kernel_call

pytestmark = pytest.mark.gpu

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
        assert timer.protocol_of(candidate) == "graph-l2flush-1"
        assert not timer.is_host_bound(candidate)
        assert 5e-4 < statistics.median(times) < 0.03
    torch.testing.assert_close(out, x + y)
    assert all(statistics.median(t) > 0 for t in timer.in_turns(candidates))
    timer.close()
    # A recording that ended badly would refuse random numbers from here on.
    torch.manual_seed(1)
    one = torch.rand(4, device="cuda")
    torch.manual_seed(1)
    assert torch.equal(one, torch.rand(4, device="cuda"))


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
    assert timer.protocol_of(candidate) == "graph-l2flush-1"
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
