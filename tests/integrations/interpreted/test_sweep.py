"""The sweep itself: what is timed and how, what a failure becomes, and which time wins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import triton
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.errors import OutOfResources, PTXASError

from tests.integrations.interpreted.kernels import accumulate, double
from tests.integrations.interpreted.support import (
    Clock,
    Decorator,
    Vector,
    Wrapper,
    block_of,
    blocks,
    grid,
    launch_timed,
)

CAUGHT = [
    OutOfResources(300_000, 200_000, "shared memory"),
    CompileTimeAssertionFailure(None, None, "BLOCK is too large"),
    PTXASError("ptxas gave up"),
]


def test_result_is_right_after_tuning(autotune: Decorator) -> None:
    """The tuned call leaves the kernel's result, whatever was timed before."""
    vector = Vector()
    tuner = autotune(configs=blocks(16, 32, 64), key=["n"], do_bench=Clock(vector.tag))(double)
    tuner[grid](*vector.args)
    assert vector.doubled()
    assert block_of(tuner.best_config) == vector.block


def test_every_config_is_timed_with_tritons_quantiles(exhaustive: Decorator) -> None:
    """`do_bench(kernel_call, quantiles=(0.5, 0.2, 0.8))`, once for each config."""
    vector = Vector()
    clock = Clock(vector.tag)
    tuner = exhaustive(configs=blocks(16, 32, 64), key=["n"], do_bench=clock)(double)
    tuner[grid](*vector.args)
    assert sorted(clock.timed) == [16, 32, 64]
    assert [tuple(q) for q in clock.quantiles] == [(0.5, 0.2, 0.8)] * 3


def test_nothing_is_launched_outside_the_clock(autotune: Decorator) -> None:
    """Launches are those of `do_bench`, which hooks can guard, and one with the caller's arguments."""
    vector = Vector()
    clock = Clock(vector.tag)
    kernel = Wrapper(double)
    tuner = autotune(configs=blocks(16, 32, 64), key=["n"], do_bench=clock)(kernel)
    tuner[grid](*vector.args)
    assert [launch["BLOCK"] for launch in kernel.launches] == [*clock.timed, vector.block]


def test_fastest_wins(exhaustive: Decorator) -> None:
    """The smallest median is chosen, cached and launched."""
    vector = Vector()
    clock = Clock(vector.tag, {16: 3.0, 32: 1.0, 64: 2.0})
    tuner = exhaustive(configs=blocks(16, 32, 64), key=["n"], do_bench=clock)(double)
    tuner[grid](*vector.args)
    assert vector.block == 32
    assert [block_of(c) for c in tuner.cache.values()] == [32]


def test_first_wins_ties(exhaustive: Decorator) -> None:
    """Equal times leave the choice to the order of the configs."""
    vector = Vector()
    clock = Clock(vector.tag, {16: 2.0, 64: 1.0, 32: 1.0})
    tuner = exhaustive(configs=blocks(16, 64, 32), key=["n"], do_bench=clock)(double)
    tuner[grid](*vector.args)
    assert vector.block == 64


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [
        ([1.0, 0.9, 5.0], [1.0, 0.8, 9.0], 32),
        ([1.0, 0.8, 5.0], [1.0, 0.8, 4.0], 32),
        ([1.0, 0.9, 9.0], [1.1, 0.1, 1.2], 16),
    ],
)
def test_times_compare_as_lists(
    exhaustive: Decorator, first: Sequence[float], second: Sequence[float], winner: int
) -> None:
    """Equal medians are decided by the 20 % quantile, then by the 80 % quantile."""
    vector = Vector()
    clock = Clock(vector.tag, {16: first, 32: second})
    tuner = exhaustive(configs=blocks(16, 32), key=["n"], do_bench=clock)(double)
    tuner[grid](*vector.args)
    assert vector.block == winner


def test_a_clock_may_answer_one_number(exhaustive: Decorator) -> None:
    """A user's `do_bench` that ignores `quantiles` and returns a float works."""
    vector = Vector()
    clock = Clock(vector.tag, {16: 2.0, 32: 1.0})
    tuner = exhaustive(
        configs=blocks(16, 32), key=["n"], do_bench=lambda call, quantiles: clock(call, quantiles)[0]
    )(double)
    tuner[grid](*vector.args)
    assert vector.block == 32


def test_timings_are_kept(exhaustive: Decorator) -> None:
    """`configs_timings` holds what the clock said; `bench_time` the seconds of the sweep."""
    vector = Vector()
    clock = Clock(vector.tag, {16: [3.0, 2.0, 4.0], 32: [1.0, 0.5, 1.5]})
    tuner = exhaustive(configs=blocks(16, 32), key=["n"], do_bench=clock)(double)
    tuner[grid](*vector.args)
    timings = {block_of(config): list(times) for config, times in tuner.configs_timings.items()}
    assert timings == {16: [3.0, 2.0, 4.0], 32: [1.0, 0.5, 1.5]}
    assert isinstance(tuner.bench_time, float)
    assert tuner.bench_time >= 0.0


def test_timings_are_of_the_latest_sweep(exhaustive: Decorator) -> None:
    """A sweep for another key replaces `configs_timings`; a hit leaves it."""
    small, large = Vector(40), Vector(50)
    tuner = exhaustive(configs=blocks(16, 32), key=["n"])(double)
    launch_timed(tuner, small, {16: 1.0, 32: 2.0})
    launch_timed(tuner, large, {16: 3.0, 32: 4.0})
    tuner[grid](*small.args)
    assert {block_of(c): t[0] for c, t in tuner.configs_timings.items()} == {16: 3.0, 32: 4.0}


@pytest.mark.parametrize("failure", CAUGHT, ids=lambda failure: type(failure).__name__)
def test_caught_failures_become_inf(exhaustive: Decorator, failure: BaseException) -> None:
    """These three exceptions rule out one config, which shows as inf, and the sweep goes on."""
    vector = Vector()
    clock = Clock(vector.tag, {16: failure, 32: 2.0, 64: 3.0})
    tuner = exhaustive(configs=blocks(16, 32, 64), key=["n"], do_bench=clock)(double)
    tuner[grid](*vector.args)
    assert vector.block == 32
    assert vector.doubled()
    timings = {block_of(c): list(t) for c, t in tuner.configs_timings.items()}
    assert timings[16] == [math.inf] * 3
    assert timings[32] == [2.0] * 3


def test_failing_config_is_never_chosen(autotune: Decorator) -> None:
    """However few configs are timed, one that cannot launch is not launched for the caller."""
    vector = Vector()

    def only_64(kwargs: dict[str, Any]) -> None:
        if kwargs["BLOCK"] != 64:
            raise OutOfResources(300_000, 200_000, "shared memory")

    tuner = autotune(configs=blocks(16, 32, 64), key=["n"], do_bench=Clock(vector.tag))(
        Wrapper(double, before=only_64)
    )
    tuner[grid](*vector.args)
    assert vector.block == 64
    assert vector.doubled()


def test_duplicates_collapse(exhaustive: Decorator) -> None:
    """Equal configs are one entry of `configs_timings`."""
    vector = Vector()
    tuner = exhaustive(configs=blocks(16, 32, 16), key=["n"], do_bench=Clock(vector.tag))(double)
    tuner[grid](*vector.args)
    assert sorted(block_of(c) for c in tuner.configs_timings) == [16, 32]


def test_configs_differing_in_launch_options_compete(exhaustive: Decorator) -> None:
    """The same BLOCK with other warps is another config."""
    vector = Vector()
    configs = [triton.Config({"BLOCK": 16}, num_warps=w) for w in (1, 2, 4)]
    clock = Clock(vector.tag)
    tuner = exhaustive(configs=configs, key=["n"], do_bench=clock)(double)
    tuner[grid](*vector.args)
    assert len(clock.timed) == 3
    assert set(tuner.configs_timings) == set(configs)


def test_tuned_symbols_cannot_be_passed(autotune: Decorator) -> None:
    """A caller who passes what the configs set gets a ValueError that names it."""
    vector = Vector()
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag))(double)
    with pytest.raises(ValueError, match="Conflicting meta-parameters: BLOCK"):
        tuner[grid](*vector.args, BLOCK=64)


def test_clock_can_be_replaced_on_the_tuner(exhaustive: Decorator) -> None:
    """Tools assign `do_bench` after decoration; the next sweep uses it."""
    vector = Vector()
    given, later = Clock(vector.tag), Clock(vector.tag, {16: 2.0, 32: 1.0})
    tuner = exhaustive(configs=blocks(16, 32), key=["n"], do_bench=given)(double)
    tuner.do_bench = later
    tuner[grid](*vector.args)
    assert (given.timed, sorted(later.timed), vector.block) == ([], [16, 32], 32)


def test_clock_may_launch_from_another_thread(autotune: Decorator) -> None:
    """A `do_bench` that watches over its launches with a time limit runs them in a thread of its own."""
    vector = Vector()
    acc = torch.full_like(vector.x, 5.0)
    clock = Clock(vector.tag)

    def bench(call: Callable[[], object], quantiles: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(clock, call, quantiles).result(timeout=300)

    tuner = autotune(configs=blocks(16, 32), key=["n"], restore_value=["acc"], do_bench=bench)(accumulate)
    tuner[grid](acc, vector.x, vector.tag, vector.n)
    assert torch.equal(acc[:40], 5.0 + vector.x[:40])


def test_bench_can_be_called_by_hand(autotune: Decorator) -> None:
    """`_bench` times one config with `nargs` set by hand, as subclasses and AOT tools do."""
    vector = Vector()
    clock = Clock(vector.tag, {32: [2.0, 1.0, 3.0], 64: CAUGHT[0]})
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=clock)(double)
    tuner.nargs = dict(zip(tuner.arg_names, vector.args, strict=False))
    small, large = blocks(32, 64)
    assert list(tuner._bench(*vector.args, config=small, grid=grid, warmup=False)) == [2.0, 1.0, 3.0]
    assert list(tuner._bench(*vector.args, config=large, grid=grid, warmup=False)) == [math.inf] * 3
    assert clock.timed == [32, 64]


def test_nargs_is_none_after_a_call(autotune: Decorator) -> None:
    """The arguments of a finished call are not kept alive by the tuner."""
    vector = Vector()
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag))(double)
    tuner[grid](*vector.args)
    assert tuner.nargs is None
    tuner[grid](*vector.args)
    assert tuner.nargs is None


def test_interrupt_stops_the_sweep(exhaustive: Decorator) -> None:
    """Ctrl-C reaches the user, and leaves the key undecided."""
    vector = Vector()
    clock = Clock(vector.tag, {16: KeyboardInterrupt(), 32: KeyboardInterrupt()})
    tuner = exhaustive(configs=blocks(16, 32), key=["n"], do_bench=clock)(double)
    with pytest.raises(KeyboardInterrupt):
        tuner[grid](*vector.args)
    assert tuner.cache == {}
    clock.ms = {}
    tuner[grid](*vector.args)
    assert vector.doubled()
