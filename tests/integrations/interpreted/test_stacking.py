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
    number,
)


def test_heuristics_below_see_the_candidates_values(exhaustive: Decorator) -> None:
    """EVEN is computed for each candidate from its own BLOCK; a wrong one writes behind n."""
    vector = Vector(96)
    asked: list[tuple[int, int]] = []

    def even(args: dict[str, Any]) -> bool:
        asked.append((args["n"], args["BLOCK"]))
        return bool(args["n"] % args["BLOCK"] == 0)

    stacked = triton.heuristics({"EVEN": even})(double_even)
    clock = Clock(vector.tag, {32: 2.0, 64: 1.0})
    tuner = exhaustive(configs=blocks(32, 64), key=["n"], do_bench=clock)(stacked)
    tuner[grid](*vector.args)
    assert vector.doubled()
    assert (vector.block, int(vector.tag[1])) == (64, 0)
    assert sorted(set(asked)) == [(96, 32), (96, 64)]


@pytest.mark.parametrize(("n", "even"), [(64, 1), (65, 0)])
def test_heuristics_below_decide_for_the_launch(autotune: Decorator, n: int, even: int) -> None:
    """The launch after tuning uses the chosen config's heuristic values."""
    vector = Vector(n)
    stacked = triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})(double_even)
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag))(stacked)
    tuner[grid](*vector.args)
    assert vector.doubled()
    assert int(vector.tag[1]) == even


def test_heuristics_above_can_be_keys(autotune: Decorator) -> None:
    """A heuristic above the tuner arrives as a keyword, and its value may be in the key (FLA's IS_VARLEN)."""
    odd, even = Vector(40), Vector(64)
    tuner = autotune(configs=blocks(16, 32), key=["EVEN"], do_bench=Clock(odd.tag))(double_even)
    stacked = triton.heuristics({"EVEN": lambda args: args["n"] % 32 == 0})(tuner)
    for vector in (odd, even, odd):
        stacked[grid](*vector.args)
        assert vector.doubled()
    dtypes = ("torch.float32", "torch.float32", "torch.int32")
    assert list(tuner.cache) == [(False, *dtypes), (True, *dtypes)]


def test_grid_function_sees_meta(autotune: Decorator) -> None:
    """A callable grid gets the arguments and the values of the config that is launched."""
    vector = Vector()
    seen: list[tuple[int, int]] = []

    def watching(meta: Any) -> tuple[int]:
        seen.append((number(meta["n"]), meta["BLOCK"]))
        return grid(meta)

    clock = Clock(vector.tag)
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=clock)(double)
    tuner[watching](*vector.args)
    assert vector.doubled()
    assert seen[-1] == (40, vector.block)
    assert {(40, block) for block in clock.timed} <= set(seen)
    seen.clear()
    tuner[watching](*vector.args)
    assert seen == [(40, vector.block)]


def test_fixed_grid(autotune: Decorator) -> None:
    """A tuple as the grid works for configs that cover the problem alike."""
    vector = Vector(16)
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag))(double)
    tuner[(1,)](*vector.args)
    assert vector.doubled()


def test_return_value_is_the_kernels(autotune: Decorator) -> None:
    """What the inner `run` returns is handed out: after tuning, on a hit, and for a single config."""
    vector = Vector()
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag))(Wrapper(double))
    assert tuner[grid](*vector.args) == ("launched", vector.block)
    assert tuner[grid](*vector.args) == ("launched", vector.block)
    single = autotune(configs=blocks(64), key=["n"])(Wrapper(double))
    assert single[grid](*vector.args) == ("launched", 64)


def test_run_can_be_called_directly(autotune: Decorator) -> None:
    """Libraries that cache launchers call `tuner.run(..., grid=..., warmup=False)`."""
    vector = Vector()
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag))(Wrapper(double))
    assert tuner.run(*vector.args, grid=grid, warmup=False) == ("launched", vector.block)
    assert vector.doubled()


@pytest.mark.skipif(not hasattr(KernelInterface, "warmup"), reason="wrappers had no warmup before 3.5")
def test_warmup_covers_every_survivor_without_timing(autotune: Decorator) -> None:
    """`warmup` asks the kernel to compile each pruned config, returns one answer each, launches nothing."""
    vector = Vector()
    clock = Clock(vector.tag)
    kernel = Wrapper(double)
    tuner = autotune(
        configs=blocks(16, 32, 64),
        key=["n"],
        do_bench=clock,
        prune_configs_by={"early_config_prune": lambda configs, nargs, **kwargs: configs[1:]},
    )(kernel)
    answers = tuner.warmup(*vector.args, grid=(1,))
    assert answers == [("launched", 32), ("launched", 64)]
    assert [(launch["BLOCK"], launch["warmup"]) for launch in kernel.launches] == [(32, True), (64, True)]
    assert not vector.out.any()
    assert (clock.timed, tuner.cache, tuner.nargs) == ([], {}, None)


@pytest.mark.parametrize("moment", ["before decoration", "after decoration", "after tuning"])
def test_run_replaced_on_the_class(autotune: Decorator, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """vLLM's VLLM_TRITON_FORCE_FIRST_CONFIG replaces `Autotuner.run`; every tuner must obey."""

    def force_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.best_config = self.configs[0]
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    def replace() -> None:
        monkeypatch.setattr(Autotuner, "run", force_first)

    vector = Vector()
    clock = Clock(vector.tag, {128: 9.0})
    if moment == "before decoration":
        replace()
    tuner = autotune(configs=blocks(128, 16, 32), key=["n"], do_bench=clock)(double)
    if moment == "after decoration":
        replace()
    elif moment == "after tuning":
        tuner[grid](*vector.args)
        replace()
    clock.timed.clear()
    vector.out.zero_()
    tuner[grid](*vector.args)
    assert vector.doubled()
    assert (vector.block, block_of(tuner.best_config), clock.timed) == (128, 128, [])


def launching(inner: Any, vector: Vector) -> Callable[[Any], None]:
    """A hook that launches another tuned kernel, for a new key each time so that it tunes."""

    def hook(kwargs: Any) -> None:
        vector.n += 1
        inner[grid](*vector.args)

    return hook


def nested(autotune: Decorator) -> tuple[Any, Vector]:
    """A tuned kernel to be launched from within another's tuning, and its arguments."""
    vector = Vector(8)
    return autotune(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag))(double), vector


def test_tuning_within_a_clock(autotune: Decorator) -> None:
    """A `do_bench` may launch another tuned kernel, which tunes at once."""
    inner, other = nested(autotune)
    vector = Vector()
    clock, hook = Clock(vector.tag), launching(inner, other)

    def bench(call: Callable[[], object], quantiles: Any) -> Any:
        hook(None)
        return clock(call, quantiles)

    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=bench)(double)
    tuner[grid](*vector.args)
    assert vector.doubled()
    assert len(inner.cache) == len(clock.timed)


def test_tuning_within_a_pre_hook(autotune: Decorator) -> None:
    """A tuner's `pre_hook` may launch another tuned kernel."""
    inner, other = nested(autotune)
    vector = Vector()
    hook = launching(inner, other)
    tuner = autotune(
        configs=blocks(16, 32),
        key=["n"],
        pre_hook=lambda kwargs, reset_only=False: hook(kwargs),
        do_bench=Clock(vector.tag),
    )(double)
    tuner[grid](*vector.args)
    assert vector.doubled()
    assert len(inner.cache) >= 1
    assert other.n == 8 + len(inner.cache)


def test_tuning_within_a_config_hook(autotune: Decorator) -> None:
    """A config's `pre_hook`, called at every launch, may launch another tuned kernel."""
    inner, other = nested(autotune)
    vector = Vector()
    configs = blocks(16, 32, pre_hook=launching(inner, other))
    tuner = autotune(configs=configs, key=["n"], do_bench=Clock(vector.tag))(double)
    tuner[grid](*vector.args)
    tuner[grid](*vector.args)
    assert vector.doubled()
    assert len(inner.cache) >= 2


def test_tuning_within_a_launch(autotune: Decorator) -> None:
    """A wrapper may launch another tuned kernel as part of its own launch."""
    inner, other = nested(autotune)
    vector = Vector()
    kernel = Wrapper(double, before=launching(inner, other))
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag))(kernel)
    tuner[grid](*vector.args)
    assert vector.doubled()
    assert len(inner.cache) == len(kernel.launches)
