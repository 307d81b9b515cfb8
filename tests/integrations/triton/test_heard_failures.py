"""Hooks and benchmark functions of a user's hear of configs that fail, as under `triton.autotune`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from forecast_autotune import autotune
from tests.integrations.null import blocks, double, fresh, launch


@triton.jit
def accumulate(x, out, n, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    """A pipelined loop keeps STAGES - 1 blocks of each load in shared memory."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, n, BLOCK, num_stages=STAGES):
        total += tl.load(x + start + i, mask=start + i < n)
    tl.store(out + i, total)


class Heard:
    """Hooks of a user's, and what they were told."""

    def __init__(self) -> None:
        self.open = 0
        self.failures: dict[int, str] = {}
        """Name of the exception, by the value of the parameter that tells the configs apart."""
        self.runs: set[int] = set()

    def before(self, kwargs: dict[str, Any], reset_only: bool = False) -> None:
        """Tuner-level `pre_hook`."""
        self.open += not reset_only

    def after(self, kwargs: dict[str, Any], exception: BaseException | None) -> None:
        """Tuner-level `post_hook`."""
        self.open -= 1
        value = kwargs.get("STAGES", kwargs["BLOCK"])
        if exception is None:
            self.runs.add(value)
        else:
            self.failures[value] = type(exception).__name__


def tuned(**options: Any) -> Any:
    listed = [triton.Config({"STAGES": stages, "BLOCK": 4096}) for stages in (2, 3, 64)]
    return autotune(configs=listed, key=["n"], store=False, **options)(fresh(accumulate))


def start(tuner: Any) -> Any:
    x = torch.empty(1 << 16)
    tuner[(1,)](x, x, 1 << 16)
    return tuner.decision


def test_what_is_refused_is_tried_where_hooks_hear_of_it(device: Any) -> None:
    assert start(tuned()).refused == 1
    heard = Heard()
    decision = start(tuned(pre_hook=heard.before, post_hook=heard.after))
    assert heard.failures == {64: OutOfResources.__name__}
    assert heard.runs
    assert heard.open == 0, "every try ends with the hook that follows it"
    assert decision.refused == 0
    assert dict(decision.chosen.config.kwargs)["STAGES"] != 64


@pytest.mark.slow
def test_it_is_tried_once(device: Any) -> None:
    heard = Heard()
    tuner = tuned(post_hook=heard.after)
    start(tuner)
    heard.failures.clear()
    start(tuner)
    assert heard.failures == {}


@pytest.mark.parametrize("compiler", ["fork", "threads"])
def test_hooks_hear_what_does_not_compile(
    device: Any, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_COMPILER", compiler)
    heard = Heard()
    options = {"pre_hook": heard.before, "post_hook": heard.after, "mode": "exhaustive"}
    launch(autotune(configs=blocks(64, 128), key=["n"], store=False, **options)(fresh(double)))
    assert heard.failures == {64: "CompileTimeAssertionFailure"}
    assert heard.runs == {128}
    assert heard.open == 0


def test_a_benchmark_function_hears_what_does_not_compile(device: Any) -> None:
    """Triton's `_bench` forgives what the function lets through; the function has seen it before."""
    seen: list[str] = []

    def do_bench(kernel_call: Any, quantiles: Any) -> list[float]:
        try:
            kernel_call()
        except Exception as error:
            seen.append(type(error).__name__)
            raise
        return [1.0, 1.0, 1.0]

    tuner = autotune(configs=blocks(64, 128), key=["n"], store=False, mode="exhaustive", do_bench=do_bench)(
        fresh(double)
    )
    launch(tuner)
    assert seen == ["CompileTimeAssertionFailure"]
    assert tuner.best_config.kwargs == {"BLOCK": 128}
