"""Where ours differs from Triton on purpose: failures, the interpreter, threads."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

from tests.integrations.interpreted.kernels import accumulate, double, double_even
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


@pytest.mark.parametrize("where", ["pruning", "conflict", "key"])
def test_nargs_is_none_after_an_exception(forecast: Decorator, where: str) -> None:
    """Triton keeps the arguments of a failed call alive; ours lets them go."""

    def prune(configs: Any, nargs: Any, **kwargs: Any) -> Any:
        raise LookupError("no rule for this shape")

    options = {"prune_configs_by": {"early_config_prune": prune}} if where == "pruning" else {}
    run = tuned(forecast, blocks(16, 32), **options)
    args = (*run.vector.args[:3], [40]) if where == "key" else run.vector.args
    extra = {"BLOCK": 64} if where == "conflict" else {}
    with pytest.raises((LookupError, ValueError, TypeError)):
        run.tuner[grid](*args, **extra)
    assert run.tuner.nargs is None


def test_nothing_launches(forecast_exhaustive: Decorator) -> None:
    """As Triton, ours launches the first config and keeps it, but says so; the next key is as ever."""
    failure = OutOfResources(300_000, 200_000, "shared memory")
    run = tuned(forecast_exhaustive, blocks(16, 32), {16: failure, 32: failure})
    with pytest.warns(UserWarning, match=r"out_of_resources.*as triton.autotune would"):
        run.launch()
    assert run.vector.doubled()
    assert [block_of(c) for c in run.tuner.cache.values()] == [16]
    assert run.tuner.nargs is None
    other = Vector(50)
    launch_timed(run.tuner, other, {})
    assert other.doubled()


@pytest.mark.parametrize("broken", [(16,), (16, 32, 64)], ids=["one", "all"])
def test_runtime_errors_of_configs(forecast_exhaustive: Decorator, broken: tuple[int, ...]) -> None:
    """Triton aborts the sweep, ours chooses among the others; where all fail the error is what it is under Triton."""

    def launch(kwargs: dict[str, Any]) -> None:
        if kwargs["BLOCK"] in broken:
            raise RuntimeError("misaligned address")

    run = tuned(
        forecast_exhaustive, blocks(16, 32, 64), {32: 2.0, 64: 3.0}, kernel=Wrapper(double, before=launch)
    )
    if len(broken) == 3:
        with pytest.warns(UserWarning, match="none of 3"), pytest.raises(RuntimeError, match="misaligned"):
            run.launch()
        return
    run.launch()
    assert run.vector.block == 32
    assert run.vector.doubled()
    assert run.timings == {16: [math.inf] * 3, 32: [2.0] * 3, 64: [3.0] * 3}


def test_interpreter_without_a_clock(forecast: Decorator) -> None:
    """Interpreted times mean nothing: without a `do_bench`, a config is launched and none is timed.

    Triton asks the driver for a clock and fails on a machine without a GPU.
    """
    stacked = triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})(double_even)
    run = launched(forecast, blocks(16, 32, 64), kernel=stacked, do_bench=None)
    vector = run.vector
    assert vector.doubled()
    assert run.tuner.best_config in run.tuner.configs
    chosen = vector.block
    vector.out.zero_()
    run.launch()
    assert vector.doubled()
    assert vector.block == chosen
    # No candidate runs beside the one for the caller, so in-place kernels need no care.
    acc = torch.zeros_like(vector.x)
    tuned(forecast, blocks(16, 32, 64), kernel=accumulate, do_bench=None).tuner[grid](
        acc, vector.x, vector.tag, vector.n
    )
    assert torch.equal(acc[:40], vector.x[:40])
    # The user's pruning still rules out configs.
    rules = {"early_config_prune": lambda configs, nargs, **kwargs: configs[2:]}
    assert launched(forecast, blocks(16, 32, 64), do_bench=None, prune_configs_by=rules).vector.block == 64


def test_a_hook_may_launch_the_kernel_that_is_being_tuned(forecast_exhaustive: Decorator) -> None:
    """A launch of the same tuner, for another key, from within its tuning: Triton loses `nargs`."""
    other = Vector(8)

    def again(kwargs: dict[str, Any], reset_only: bool = False) -> None:
        if kwargs["n"] == 40:
            run.tuner[grid](*other.args)

    run = tuned(forecast_exhaustive, blocks(16, 32), pre_hook=again)
    run.launch()
    assert run.vector.doubled()
    assert other.doubled()


REPLACED_BEFORE_IMPORT = """
from triton.runtime.autotuner import Autotuner

def force_first(self, *args, **kwargs):
    return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

Autotuner.run = force_first
from tests.integrations.interpreted.kernels import double
from tests.integrations.interpreted.support import Clock, Vector, blocks, decorator, grid
vector = Vector()
clock = Clock(vector.tag, {128: 9.0})
tuned = decorator("forecast", exhaustive=True)(configs=blocks(128, 16), key=["n"], do_bench=clock)(double)
tuned[grid](*vector.args)
print(vector.block, clock.timed, vector.doubled())
"""


def test_run_replaced_on_the_class_before_our_import() -> None:
    """vLLM may have replaced `Autotuner.run` before this package was imported."""
    command = [sys.executable, "-c", REPLACED_BEFORE_IMPORT]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split("\n")[0] == "128 [] True", done.stderr


class OneAtATime(Wrapper):
    """Triton's interpreter keeps global state, so launches take turns here; tuning does not."""

    turn = threading.Lock()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with self.turn:
            return super().run(*args, **kwargs)


def bench(call: Callable[[], object], quantiles: Any) -> list[float]:
    call()
    time.sleep(0.002)  # lets another thread in
    return [1.0, 1.0, 1.0]


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(i)` in `count` threads at once, and raise what the first failing one raised."""
    start = threading.Barrier(count)

    def body(i: int) -> None:
        start.wait()
        work(i)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(body, range(count)))


def test_threads_share_one_tuning_per_key(forecast_exhaustive: Decorator) -> None:
    """Eight threads, three keys at once: right results, each key tuned once, `nargs` never mixed up."""
    sizes = (40, 50, 60)
    pruned: list[int] = []
    kernel = OneAtATime(accumulate)

    def prune(configs: Any, nargs: Any, **kwargs: Any) -> Any:
        pruned.append(nargs["n"])
        time.sleep(0.002)
        return configs

    tuner = forecast_exhaustive(
        configs=blocks(16, 32, 64),
        key=["n"],
        restore_value=["acc"],
        do_bench=bench,
        prune_configs_by={"early_config_prune": prune},
    )(kernel)

    def work(i: int) -> None:
        for turn in range(len(sizes)):
            vector = Vector(sizes[(i + turn) % len(sizes)])
            acc = torch.full_like(vector.x, float(i))
            tuner[grid](acc, vector.x, vector.tag, vector.n)
            assert torch.equal(acc[: vector.n], i + vector.x[: vector.n])

    in_threads(8, work)
    assert sorted(pruned) == sorted(sizes)
    assert len(kernel.launches) == len(sizes) * 3 + 8 * len(sizes), "timed, and for the callers"
    assert sorted(key[0] for key in tuner.cache) == sorted(sizes)


def test_a_failed_tuning_lets_the_next_thread_try(forecast_exhaustive: Decorator) -> None:
    """Threads that wait for a tuning which then fails do not hang; each gets a result or an error."""
    failing = threading.Event()
    failing.set()

    def prune(configs: Any, nargs: Any, **kwargs: Any) -> Any:
        time.sleep(0.005)
        if failing.is_set():
            failing.clear()
            raise LookupError("first attempt")
        return configs

    tuner = forecast_exhaustive(
        configs=blocks(16, 32),
        key=["n"],
        do_bench=bench,
        prune_configs_by={"early_config_prune": prune},
    )(OneAtATime(double))
    outcomes: list[str] = []

    def work(i: int) -> None:
        vector = Vector()
        try:
            tuner[grid](*vector.args)
        except LookupError:
            outcomes.append("error")
        else:
            assert vector.doubled()
            outcomes.append("result")

    in_threads(4, work)
    assert len(outcomes) == 4
    vector = Vector()
    tuner[grid](*vector.args)
    assert vector.doubled()
