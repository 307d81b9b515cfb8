"""Arguments kept intact while candidates run, and when which hook is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

from tests.integrations.interpreted.kernels import accumulate, double
from tests.integrations.interpreted.support import (
    VERSION,
    Clock,
    Decorator,
    Vector,
    Wrapper,
    blocks,
    grid,
)


def add_into(tuner: Any, acc: torch.Tensor | None, vector: Vector) -> None:
    """Launch acc += x."""
    tuner[grid](acc, vector.x, vector.tag, vector.n)


@pytest.mark.parametrize(("option", "start"), [("reset_to_zero", 0.0), ("restore_value", 5.0)])
def test_launch_after_tuning_sees_the_argument_as_promised(
    autotune: Decorator, option: str, start: float
) -> None:
    """Whatever was timed, the chosen config finds zeros, or what the caller left. A hit touches nothing."""
    vector = Vector()
    acc = torch.full_like(vector.x, 5.0)
    options: dict[str, Any] = {option: ["acc"]}
    tuner = autotune(configs=blocks(16, 32, 64), key=["n"], do_bench=Clock(vector.tag), **options)(accumulate)
    add_into(tuner, acc, vector)
    assert torch.equal(acc[:40], start + vector.x[:40])
    add_into(tuner, acc, vector)
    assert torch.equal(acc[:40], start + 2 * vector.x[:40])


def test_restore_value_given_by_keyword(autotune: Decorator) -> None:
    """Keyword arguments are restored too."""
    vector = Vector()
    acc = torch.full_like(vector.x, 5.0)
    tuner = autotune(configs=blocks(16, 32), key=["n"], restore_value=["acc"], do_bench=Clock(vector.tag))(
        accumulate
    )
    tuner[grid](x=vector.x, tag=vector.tag, n=40, acc=acc)
    assert torch.equal(acc[:40], 5.0 + vector.x[:40])


def test_restore_value_after_a_failing_config(autotune: Decorator) -> None:
    """A candidate that runs and then fails leaves no trace in a restored argument."""
    vector = Vector()
    acc = torch.full_like(vector.x, 5.0)
    clock = Clock(vector.tag, {32: OutOfResources(300_000, 200_000, "shared memory")})
    tuner = autotune(configs=blocks(16, 32, 64), key=["n"], restore_value=["acc"], do_bench=clock)(accumulate)
    add_into(tuner, acc, vector)
    assert torch.equal(acc[:40], 5.0 + vector.x[:40])


@pytest.mark.skipif(VERSION < (3, 8), reason="None arguments broke both options before 3.8")
@pytest.mark.parametrize("option", ["reset_to_zero", "restore_value"])
def test_none_arguments_need_no_care(autotune: Decorator, option: str) -> None:
    """An optional tensor that was not given is skipped."""
    vector = Vector()
    options: dict[str, Any] = {option: ["acc"]}
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag), **options)(accumulate)
    add_into(tuner, None, vector)
    assert vector.block in (16, 32)


@pytest.mark.parametrize(
    "option",
    [
        "reset_to_zero",
        pytest.param(
            "restore_value",
            marks=pytest.mark.skipif(VERSION < (3, 9), reason="an AttributeError before 3.9"),
        ),
    ],
)
def test_user_pre_hook_disarms_the_built_in_one(autotune: Decorator, option: str) -> None:
    """With a `pre_hook` of the user's own nothing is zeroed, saved or restored: each launch accumulates."""
    vector = Vector()
    acc = torch.zeros_like(vector.x)
    clock = Clock(vector.tag)
    options: dict[str, Any] = {option: ["acc"], "pre_hook": lambda kwargs, reset_only=False: None}
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=clock, **options)(accumulate)
    add_into(tuner, acc, vector)
    assert torch.equal(acc[:40], (len(clock.timed) + 1) * vector.x[:40])


def test_hooks_of_a_sweep(exhaustive: Decorator) -> None:
    """Each timed launch is pre_hook, launch, post_hook; one `reset_only` pre_hook ends the sweep."""
    vector = Vector()
    events: list[Any] = []

    def pre(kwargs: dict[str, Any], reset_only: bool = False) -> None:
        events.append(("reset" if reset_only else "pre", kwargs["BLOCK"]))

    def post(kwargs: dict[str, Any], exception: BaseException | None) -> None:
        events.append(("post", kwargs["BLOCK"], exception))

    kernel = Wrapper(double, before=lambda kwargs: events.append(("launch", kwargs["BLOCK"])))
    tuner = exhaustive(
        configs=blocks(16, 32),
        key=["n"],
        pre_hook=pre,
        post_hook=post,
        do_bench=Clock(vector.tag, {16: 2.0, 32: 1.0}),
    )(kernel)
    tuner[grid](*vector.args)
    sweep = [events[i : i + 3] for i in (0, 3)]
    assert sorted(sweep) == [[("pre", b), ("launch", b), ("post", b, None)] for b in (16, 32)]
    assert events[6:] == [("reset", 32), ("launch", 32)]


def test_hooks_see_every_argument_by_name(autotune: Decorator) -> None:
    """Hooks get positional arguments, keywords and the config's values in one dict."""
    vector = Vector()
    seen: list[dict[str, Any]] = []
    tuner = autotune(
        configs=blocks(16, 32, num_warps=2),
        key=["n"],
        pre_hook=lambda kwargs, reset_only=False: seen.append(dict(kwargs)),
        do_bench=Clock(vector.tag),
    )(double)
    tuner[grid](vector.x, vector.out, tag=vector.tag, n=40)
    assert seen
    for kwargs in seen:
        assert {"x", "out", "tag", "n", "BLOCK", "num_warps", "num_stages", "num_ctas"} <= set(kwargs)
        assert kwargs["x"] is vector.x
        assert (kwargs["n"], kwargs["num_warps"]) == (40, 2)


def test_tuner_hooks_stay_out_of_ordinary_launches(autotune: Decorator) -> None:
    """Tuner-level hooks belong to tuning: hits and single configs call neither."""
    vector = Vector()
    calls: list[str] = []
    options: dict[str, Any] = {
        "key": ["n"],
        "pre_hook": lambda kwargs, reset_only=False: calls.append("pre"),
        "post_hook": lambda kwargs, exception: calls.append("post"),
        "do_bench": Clock(vector.tag),
    }
    tuner = autotune(configs=blocks(16, 32), **options)(double)
    tuner[grid](*vector.args)
    calls.clear()
    tuner[grid](*vector.args)
    autotune(configs=blocks(16), **options)(double)[grid](*vector.args)
    assert calls == []


def test_post_hook_sees_the_exception(exhaustive: Decorator) -> None:
    """A launch that fails calls `post_hook` with its exception, and the sweep goes on."""
    vector = Vector()
    failure = OutOfResources(300_000, 200_000, "shared memory")
    calls: list[tuple[int, object]] = []

    def refuse_64(kwargs: dict[str, Any]) -> None:
        if kwargs["BLOCK"] == 64:
            raise failure

    tuner = exhaustive(
        configs=blocks(16, 64, 32),
        key=["n"],
        post_hook=lambda kwargs, exception: calls.append((kwargs["BLOCK"], exception)),
        do_bench=Clock(vector.tag, {16: 2.0, 32: 1.0}),
    )(Wrapper(double, before=refuse_64))
    tuner[grid](*vector.args)
    assert sorted(calls, key=lambda call: call[0]) == [(16, None), (32, None), (64, failure)]
    assert vector.block == 32
    assert vector.doubled()


def test_config_pre_hook_runs_before_every_launch(autotune: Decorator) -> None:
    """A config's own hook runs before each of its launches: timed, tuned and cached."""
    vector = Vector()
    events: list[tuple[str, int]] = []

    def hook(kwargs: dict[str, Any]) -> None:
        assert kwargs["x"] is vector.x
        events.append(("hook", kwargs["BLOCK"]))

    kernel = Wrapper(double, before=lambda kwargs: events.append(("launch", kwargs["BLOCK"])))
    tuner = autotune(configs=blocks(16, 32, pre_hook=hook), key=["n"], do_bench=Clock(vector.tag))(kernel)
    tuner[grid](*vector.args)
    chosen = vector.block
    launched = [launch["BLOCK"] for launch in kernel.launches]
    assert launched[-1] == chosen
    assert events == [(what, block) for block in launched for what in ("hook", "launch")]
    events.clear()
    tuner[grid](*vector.args)
    assert events == [("hook", chosen), ("launch", chosen)]


def test_single_config_pre_hook_runs(autotune: Decorator) -> None:
    """The hook of an only config runs at every launch too."""
    vector = Vector()
    calls: list[int] = []
    tuner = autotune(configs=blocks(16, pre_hook=lambda kwargs: calls.append(kwargs["BLOCK"])), key=["n"])(
        double
    )
    tuner[grid](*vector.args)
    tuner[grid](*vector.args)
    assert calls == [16, 16]


def test_config_pre_hook_can_change_arguments(autotune: Decorator) -> None:
    """Configs of one kernel differ by hook: host-side descriptors and zeroed buffers rely on it."""
    vector = Vector()
    acc = torch.full_like(vector.x, 5.0)

    def clear(kwargs: dict[str, Any]) -> None:
        kwargs["acc"].zero_()

    configs = [triton.Config({"BLOCK": b}, pre_hook=clear) for b in (16, 32)]
    tuner = autotune(configs=configs, key=["n"], do_bench=Clock(vector.tag))(accumulate)
    add_into(tuner, acc, vector)
    assert torch.equal(acc[:40], vector.x[:40])
    add_into(tuner, acc, vector)
    assert torch.equal(acc[:40], vector.x[:40])


@pytest.mark.parametrize("error", [RuntimeError, LookupError, TimeoutError, AssertionError])
def test_an_error_of_the_benchmark_function_reaches_the_caller(
    autotune: Decorator, error: type[Exception]
) -> None:
    """It says nothing of a config, and is gone with the next call."""
    vector = Vector()
    clock = Clock(vector.tag, {16: error("busy"), 32: error("busy"), 64: error("busy")})
    tuner = autotune(configs=blocks(16, 32, 64), key=["n"], do_bench=clock)(double)
    with pytest.raises(error, match="busy"):
        tuner[grid](*vector.args)
    clock.ms = {32: 0.5}
    tuner[grid](*vector.args)
    assert vector.block == 32


@pytest.mark.parametrize("error", [RuntimeError, ConnectionError, TimeoutError, AssertionError])
@pytest.mark.parametrize("when", ["pre_hook", "post_hook", "config"])
def test_an_error_of_a_hook_reaches_the_caller(
    autotune: Decorator, when: str, error: type[Exception]
) -> None:
    vector, broken = Vector(), [True]

    def hook(*_: Any, **__: Any) -> None:
        if broken[0]:
            raise error("no connection")

    options = {} if when == "config" else {when: hook}
    configs = blocks(16, 32, 64)
    if when == "config":
        configs[1].pre_hook = hook
    clock = Clock(vector.tag, {32: 0.5})
    tuner = autotune(configs=configs, key=["n"], do_bench=clock, **options)(double)
    with pytest.raises(error, match="no connection"):
        tuner[grid](*vector.args)
    broken[0] = False
    tuner[grid](*vector.args)
    assert vector.block == 32
