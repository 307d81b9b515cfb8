"""The sweep itself: what is timed and how, what a failure becomes, and which time wins."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import triton
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.errors import OutOfResources, PTXASError

from tests.integrations.interpreted.kernels import accumulate, double
from tests.integrations.interpreted.support import (
    Decorator,
    Vector,
    Wrapper,
    block_of,
    blocks,
    grid,
    launch_timed,
    launched,
    tuned,
)

CAUGHT = [
    OutOfResources(300_000, 200_000, "shared memory"),
    CompileTimeAssertionFailure(None, None, "BLOCK is too large"),
    PTXASError("ptxas gave up"),
]


def test_every_config_is_timed_with_tritons_quantiles(exhaustive: Decorator) -> None:
    """`do_bench(kernel_call, quantiles=(0.5, 0.2, 0.8))`, once for each config."""
    clock = launched(exhaustive, blocks(16, 32, 64)).clock
    assert sorted(clock.timed) == [16, 32, 64]
    assert [tuple(q) for q in clock.quantiles] == [(0.5, 0.2, 0.8)] * 3


def test_nothing_is_launched_outside_the_clock(autotune: Decorator) -> None:
    """Launches are those of `do_bench`, which hooks can guard, and one that leaves the caller's result."""
    kernel = Wrapper(double)
    run = launched(autotune, blocks(16, 32, 64), kernel=kernel)
    assert [launch["BLOCK"] for launch in kernel.launches] == [*run.clock.timed, run.vector.block]
    assert run.vector.doubled()
    assert block_of(run.tuner.best_config) == run.vector.block


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        pytest.param({16: 3.0, 32: 1.0, 64: 2.0}, 32, id="fastest"),
        pytest.param({16: 2.0, 64: 1.0, 32: 1.0}, 64, id="first of equals"),
        pytest.param({16: [1.0, 0.9, 5.0], 32: [1.0, 0.8, 9.0]}, 32, id="20 % quantile"),
        pytest.param({16: [1.0, 0.8, 5.0], 32: [1.0, 0.8, 4.0]}, 32, id="80 % quantile"),
        pytest.param({16: [1.0, 0.9, 9.0], 32: [1.1, 0.1, 1.2]}, 16, id="median first"),
    ],
)
def test_the_least_list_of_times_wins(exhaustive: Decorator, times: dict[int, Any], winner: int) -> None:
    """It is chosen, cached and launched; `configs_timings` holds all, `bench_time` the seconds of the sweep."""
    run = launched(exhaustive, blocks(*times), times)
    assert run.vector.block == winner
    assert [block_of(c) for c in run.tuner.cache.values()] == [winner]
    assert run.timings == {block: ms if isinstance(ms, list) else [ms] * 3 for block, ms in times.items()}
    assert isinstance(run.tuner.bench_time, float)
    assert run.tuner.bench_time >= 0.0


def test_a_clock_may_answer_one_number(exhaustive: Decorator) -> None:
    """A user's `do_bench` that ignores `quantiles` and returns a float works."""
    run = tuned(exhaustive, blocks(16, 32), {16: 2.0, 32: 1.0})
    run.tuner.do_bench = lambda call, quantiles: run.clock(call, quantiles)[0]
    run.launch()
    assert run.vector.block == 32


def test_timings_are_of_the_latest_sweep(exhaustive: Decorator) -> None:
    """A sweep for another key replaces `configs_timings`; a hit leaves it."""
    run = tuned(exhaustive, blocks(16, 32))
    launch_timed(run.tuner, run.vector, {16: 1.0, 32: 2.0})
    launch_timed(run.tuner, Vector(50), {16: 3.0, 32: 4.0})
    run.launch()
    assert {block: times[0] for block, times in run.timings.items()} == {16: 3.0, 32: 4.0}


@pytest.mark.parametrize("failure", CAUGHT, ids=lambda failure: type(failure).__name__)
def test_caught_failures_become_inf(exhaustive: Decorator, failure: BaseException) -> None:
    """These three exceptions rule out one config, which shows as inf, and the sweep goes on."""
    run = launched(exhaustive, blocks(16, 32, 64), {16: failure, 32: 2.0, 64: 3.0})
    assert run.vector.block == 32
    assert run.vector.doubled()
    assert run.timings == {16: [math.inf] * 3, 32: [2.0] * 3, 64: [3.0] * 3}


def test_equal_configs_collapse_and_others_compete(exhaustive: Decorator) -> None:
    """Equal configs are one entry of `configs_timings`; the same BLOCK with other warps is another config."""
    assert sorted(launched(exhaustive, blocks(16, 32, 16)).timings) == [16, 32]
    configs = [triton.Config({"BLOCK": 16}, num_warps=w) for w in (1, 2, 4)]
    run = launched(exhaustive, configs)
    assert len(run.clock.timed) == 3
    assert set(run.tuner.configs_timings) == set(configs)


def test_clock_may_launch_from_another_thread(autotune: Decorator) -> None:
    """A `do_bench` that watches over its launches with a time limit runs them in a thread of its own."""
    run = tuned(autotune, blocks(16, 32), kernel=accumulate, restore_value=["acc"])
    vector = run.vector
    acc = torch.full_like(vector.x, 5.0)

    def bench(call: Callable[[], object], quantiles: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run.clock, call, quantiles).result(timeout=300)

    run.tuner.do_bench = bench
    run.tuner[grid](acc, vector.x, vector.tag, vector.n)
    assert torch.equal(acc[:40], 5.0 + vector.x[:40])


def test_bench_can_be_called_by_hand(autotune: Decorator) -> None:
    """`_bench` times one config with `nargs` set by hand, as subclasses and AOT tools do."""
    run = tuned(autotune, blocks(16, 32), {32: [2.0, 1.0, 3.0], 64: CAUGHT[0]})
    tuner, args = run.tuner, run.vector.args
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    small, large = blocks(32, 64)
    assert list(tuner._bench(*args, config=small, grid=grid, warmup=False)) == [2.0, 1.0, 3.0]
    assert list(tuner._bench(*args, config=large, grid=grid, warmup=False)) == [math.inf] * 3
    assert run.clock.timed == [32, 64]


def test_interrupt_stops_the_sweep(exhaustive: Decorator) -> None:
    """Ctrl-C reaches the user, and leaves the key undecided."""
    run = tuned(exhaustive, blocks(16, 32), {16: KeyboardInterrupt(), 32: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        run.launch()
    assert run.tuner.cache == {}
    run.clock.ms = {}
    run.launch()
    assert run.vector.doubled()
