"""Arguments kept intact while candidates run, and when which hook is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from tests.integrations.interpreted.kernels import accumulate, double
from tests.integrations.interpreted.support import (
    VERSION,
    Decorator,
    Run,
    Wrapper,
    blocks,
    grid,
    launched,
    tuned,
)


class Accumulation:
    """acc += x by a tuned kernel: each launch shows."""

    def __init__(
        self, autotune: Decorator, start: float | None = 5.0, ms: Any = None, **options: Any
    ) -> None:
        given = {"configs": blocks(16, 32, 64), **options}
        self.run: Run = tuned(autotune, given.pop("configs"), ms, kernel=accumulate, **given)
        self.x = self.run.vector.x[:40]
        self.acc = None if start is None else torch.full_like(self.run.vector.x, start)

    def launch(self) -> Any:
        """Launch; returns what `acc` holds."""
        vector = self.run.vector
        self.run.tuner[grid](self.acc, vector.x, vector.tag, vector.n)
        return None if self.acc is None else self.acc[:40]


@pytest.mark.parametrize(("option", "start"), [("reset_to_zero", 0.0), ("restore_value", 5.0)])
def test_launch_after_tuning_sees_the_argument_as_promised(
    autotune: Decorator, option: str, start: float
) -> None:
    """Whatever was timed, the chosen config finds zeros, or what the caller left. A hit touches nothing."""
    added = Accumulation(autotune, **{option: ["acc"]})
    assert torch.equal(added.launch(), start + added.x)
    assert torch.equal(added.launch(), start + 2 * added.x)
    by_keyword = Accumulation(autotune, **{option: ["acc"]})
    vector, acc = by_keyword.run.vector, by_keyword.acc
    by_keyword.run.tuner[grid](x=vector.x, tag=vector.tag, n=40, acc=acc)
    assert torch.equal(acc[:40], start + added.x)  # type: ignore[index]


def test_restore_value_after_a_failing_config(autotune: Decorator) -> None:
    """A candidate that runs and then fails leaves no trace in a restored argument."""
    failure = OutOfResources(300_000, 200_000, "shared memory")
    added = Accumulation(autotune, ms={32: failure}, restore_value=["acc"])
    assert torch.equal(added.launch(), 5.0 + added.x)


@pytest.mark.skipif(VERSION < (3, 8), reason="None arguments broke both options before 3.8")
@pytest.mark.parametrize("option", ["reset_to_zero", "restore_value"])
def test_none_arguments_need_no_care(autotune: Decorator, option: str) -> None:
    """An optional tensor that was not given is skipped."""
    added = Accumulation(autotune, None, **{option: ["acc"]})
    added.launch()
    assert added.run.vector.block in (16, 32, 64)


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
    options: dict[str, Any] = {option: ["acc"], "pre_hook": lambda kwargs, reset_only=False: None}
    added = Accumulation(autotune, 0.0, **options)
    assert torch.equal(added.launch(), (len(added.run.clock.timed) + 1) * added.x)


def test_hooks_of_a_sweep(exhaustive: Decorator) -> None:
    """Each timed launch is pre_hook, launch, post_hook; one `reset_only` pre_hook ends the sweep."""
    events: list[Any] = []

    def pre(kwargs: dict[str, Any], reset_only: bool = False) -> None:
        events.append(("reset" if reset_only else "pre", kwargs["BLOCK"]))

    def post(kwargs: dict[str, Any], exception: BaseException | None) -> None:
        events.append(("post", kwargs["BLOCK"], exception))

    kernel = Wrapper(double, before=lambda kwargs: events.append(("launch", kwargs["BLOCK"])))
    launched(exhaustive, blocks(16, 32), {16: 2.0, 32: 1.0}, kernel=kernel, pre_hook=pre, post_hook=post)
    sweep = [events[i : i + 3] for i in (0, 3)]
    assert sorted(sweep) == [[("pre", b), ("launch", b), ("post", b, None)] for b in (16, 32)]
    assert events[6:] == [("reset", 32), ("launch", 32)]


def test_hooks_see_every_argument_by_name(autotune: Decorator) -> None:
    """Hooks get positional arguments, keywords and the config's values in one dict."""
    seen: list[dict[str, Any]] = []
    hook = lambda kwargs, reset_only=False: seen.append(dict(kwargs))  # noqa: E731
    run = tuned(autotune, blocks(16, 32, num_warps=2), pre_hook=hook)
    vector = run.vector
    run.tuner[grid](vector.x, vector.out, tag=vector.tag, n=40)
    assert seen
    for kwargs in seen:
        assert {"x", "out", "tag", "n", "BLOCK", "num_warps", "num_stages", "num_ctas"} <= set(kwargs)
        assert kwargs["x"] is vector.x
        assert (kwargs["n"], kwargs["num_warps"]) == (40, 2)


def test_tuner_hooks_stay_out_of_ordinary_launches(autotune: Decorator) -> None:
    """Tuner-level hooks belong to tuning: hits and single configs call neither."""
    calls: list[str] = []
    options: dict[str, Any] = {
        "pre_hook": lambda kwargs, reset_only=False: calls.append("pre"),
        "post_hook": lambda kwargs, exception: calls.append("post"),
    }
    run = launched(autotune, blocks(16, 32), **options)
    calls.clear()
    run.launch()
    launched(autotune, blocks(16), **options)
    assert calls == []


def test_config_pre_hook_runs_before_every_launch(autotune: Decorator) -> None:
    """A config's own hook runs before each of its launches: timed, tuned and cached, and that of an only config."""
    events: list[tuple[str, int]] = []

    def hook(kwargs: dict[str, Any]) -> None:
        assert kwargs["n"] == 40
        events.append(("hook", kwargs["BLOCK"]))

    for sizes in ((16, 32), (16,)):
        events.clear()
        kernel = Wrapper(double, before=lambda kwargs: events.append(("launch", kwargs["BLOCK"])))
        run = launched(autotune, blocks(*sizes, pre_hook=hook), kernel=kernel)
        chosen, timed = run.vector.block, [launch["BLOCK"] for launch in kernel.launches]
        assert timed[-1] == chosen
        assert events == [(what, block) for block in timed for what in ("hook", "launch")]
        events.clear()
        run.launch()
        assert events == [("hook", chosen), ("launch", chosen)]


def test_config_pre_hook_can_change_arguments(autotune: Decorator) -> None:
    """Configs of one kernel differ by hook: host-side descriptors and zeroed buffers rely on it."""
    added = Accumulation(autotune, configs=blocks(16, 32, pre_hook=lambda kwargs: kwargs["acc"].zero_()))
    for _ in range(2):
        assert torch.equal(added.launch(), added.x)
