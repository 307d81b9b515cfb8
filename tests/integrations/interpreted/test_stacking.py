"""Tuners among other things: heuristics above and below, grids, return values, warm-up, nesting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

from tests.integrations.interpreted.kernels import double, double_even
from tests.integrations.interpreted.support import (
    Clock,
    Decorator,
    Vector,
    Wrapper,
    block_of,
    blocks,
    grid,
    launched,
    number,
    tuned,
)


def test_heuristics_below_see_the_candidates_values(exhaustive: Decorator) -> None:
    """EVEN is computed for each candidate from its own BLOCK; a wrong one writes behind n."""
    asked: list[tuple[int, int]] = []

    def even(args: dict[str, Any]) -> bool:
        asked.append((args["n"], args["BLOCK"]))
        return bool(args["n"] % args["BLOCK"] == 0)

    stacked = triton.heuristics({"EVEN": even})(double_even)
    vector = launched(exhaustive, blocks(32, 64), {32: 2.0, 64: 1.0}, kernel=stacked, n=96).vector
    assert vector.doubled()
    assert (vector.block, int(vector.tag[1])) == (64, 0)
    assert sorted(set(asked)) == [(96, 32), (96, 64)]


@pytest.mark.parametrize(("n", "even"), [(64, 1), (65, 0)])
def test_heuristics_below_decide_for_the_launch(autotune: Decorator, n: int, even: int) -> None:
    """The launch after tuning uses the chosen config's heuristic values."""
    stacked = triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})(double_even)
    vector = launched(autotune, blocks(16, 32), kernel=stacked, n=n).vector
    assert vector.doubled()
    assert int(vector.tag[1]) == even


def test_heuristics_above_can_be_keys(autotune: Decorator) -> None:
    """A heuristic above the tuner arrives as a keyword, and its value may be in the key (FLA's IS_VARLEN)."""
    run = tuned(autotune, blocks(16, 32), kernel=double_even, key=["EVEN"])
    stacked = triton.heuristics({"EVEN": lambda args: args["n"] % 32 == 0})(run.tuner)
    for vector in (run.vector, Vector(64), run.vector):
        stacked[grid](*vector.args)
        assert vector.doubled()
    dtypes = ("torch.float32", "torch.float32", "torch.int32")
    assert list(run.tuner.cache) == [(False, *dtypes), (True, *dtypes)]


def test_grid_function_sees_meta(autotune: Decorator) -> None:
    """A callable grid gets the arguments and the values of the config that is launched."""
    seen: list[tuple[int, int]] = []

    def watching(meta: Any) -> tuple[int]:
        seen.append((number(meta["n"]), meta["BLOCK"]))
        return grid(meta)

    run = tuned(autotune, blocks(16, 32))
    run.tuner[watching](*run.vector.args)
    assert run.vector.doubled()
    assert seen[-1] == (40, run.vector.block)
    assert {(40, block) for block in run.clock.timed} <= set(seen)
    seen.clear()
    run.tuner[watching](*run.vector.args)
    assert seen == [(40, run.vector.block)]


def test_return_value_is_the_kernels(autotune: Decorator) -> None:
    """What the inner `run` returns is handed out: after tuning, on a hit, for one config, and by `tuner.run`."""
    run = tuned(autotune, blocks(16, 32), kernel=Wrapper(double))
    assert run.launch() == ("launched", run.vector.block)
    assert run.launch() == ("launched", run.vector.block)
    assert tuned(autotune, blocks(64), kernel=Wrapper(double)).launch() == ("launched", 64)
    direct = tuned(autotune, blocks(16, 32), kernel=Wrapper(double))
    answer = direct.tuner.run(*direct.vector.args, grid=grid, warmup=False)
    assert answer == ("launched", direct.vector.block)
    assert direct.vector.doubled()


@pytest.mark.skipif(not hasattr(KernelInterface, "warmup"), reason="wrappers had no warmup before 3.5")
def test_warmup_covers_every_survivor_without_timing(autotune: Decorator) -> None:
    """`warmup` asks the kernel to compile each pruned config, returns one answer each, launches nothing."""
    kernel = Wrapper(double)
    rules = {"early_config_prune": lambda configs, nargs, **kwargs: configs[1:]}
    run = tuned(autotune, blocks(16, 32, 64), kernel=kernel, prune_configs_by=rules)
    answers = run.tuner.warmup(*run.vector.args, grid=(1,))
    assert answers == [("launched", 32), ("launched", 64)]
    assert [(launch["BLOCK"], launch["warmup"]) for launch in kernel.launches] == [(32, True), (64, True)]
    assert not run.vector.out.any()
    assert (run.clock.timed, run.tuner.cache, run.tuner.nargs) == ([], {}, None)


@pytest.mark.parametrize("moment", ["before decoration", "after decoration", "after tuning"])
def test_run_replaced_on_the_class(autotune: Decorator, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """vLLM's VLLM_TRITON_FORCE_FIRST_CONFIG replaces `Autotuner.run`; every tuner must obey."""

    def force_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.best_config = self.configs[0]
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    if moment == "before decoration":
        monkeypatch.setattr(Autotuner, "run", force_first)
    run = tuned(autotune, blocks(128, 16, 32), {128: 9.0})
    if moment == "after tuning":
        run.launch()
    monkeypatch.setattr(Autotuner, "run", force_first)
    run.clock.timed.clear()
    run.vector.out.zero_()
    run.launch()
    assert run.vector.doubled()
    assert (run.vector.block, block_of(run.tuner.best_config), run.clock.timed) == (128, 128, [])


@pytest.mark.parametrize("place", ["clock", "pre_hook", "config", "launch"])
def test_another_kernel_may_be_tuned_within_a_tuning(autotune: Decorator, place: str) -> None:
    """Within a `do_bench`, a tuner's or a config's `pre_hook`, and a wrapper's launch; a new key tunes each time."""
    inner = tuned(autotune, blocks(16, 32), n=8)
    calls: list[str] = []

    def tune_inner(*_: Any, **__: Any) -> None:
        calls.append(place)
        inner.vector.n += 1
        inner.launch()

    vector = Vector()
    clock = Clock(vector.tag)

    def bench(call: Callable[[], object], quantiles: Any) -> Any:
        if place == "clock":
            tune_inner()
        return clock(call, quantiles)

    tuner = autotune(
        configs=blocks(16, 32, pre_hook=tune_inner if place == "config" else None),
        key=["n"],
        pre_hook=tune_inner if place == "pre_hook" else None,
        do_bench=bench,
    )(Wrapper(double, before=tune_inner if place == "launch" else None))
    tuner[grid](*vector.args)
    met = len(calls)
    assert met == len(clock.timed) if place == "clock" else met >= 1
    tuner[grid](*vector.args)
    assert vector.doubled()
    assert len(calls) == met + (place in ("config", "launch"))
    assert len(inner.tuner.cache) == len(calls)
