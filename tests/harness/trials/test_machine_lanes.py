"""What is made ready before a search judges through machine code."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.lib.machine_code.opened import FAKE_FLUSH_BYTES
from forecast_harness.clocks.runner import health
from forecast_harness.clocks.runner.health import NoMachineCodePath, open_healthy_runner
from forecast_harness.trials.confirmation import EarlyOpener
from forecast_harness.trials.judge import HostJudge
from forecast_harness.trials.machine_lanes import MachineCodeLanes
from forecast_harness.trials.protocol import LaneFailure


@pytest.mark.parametrize(("bad", "fit"), [(0, True), (9, True), (10, False)])
def test_a_clock_may_be_disturbed_for_a_while(
    fake_driver: Path, monkeypatch: pytest.MonkeyPatch, bad: int, fit: bool
) -> None:
    monkeypatch.setattr(health, "LIBRARY", str(fake_driver))
    monkeypatch.setattr(health, "FLUSH_BYTES", FAKE_FLUSH_BYTES)
    monkeypatch.setattr(health, "_HEALTH_PAUSE_S", 0.0)
    answer = iter(["the device's clock"] * bad + [""] * 3)
    monkeypatch.setattr(health, "runner_problem", lambda runner: next(answer))
    if fit:
        with open_healthy_runner(0) as runner:
            assert runner.check_health() == ""
    else:
        with (
            pytest.raises(NoMachineCodePath, match="the device's clock"),
            open_healthy_runner(0),
        ):
            pass


def test_lanes_that_close_do_not_wait_for_a_judge_that_is_still_opening() -> None:
    begun, given_up = threading.Event(), threading.Event()

    def surveying() -> HostJudge:
        begun.set()
        assert given_up.wait(60)
        raise LaneFailure("given up")

    host = EarlyOpener(surveying, given_up.set)
    assert begun.wait(60)
    with ExitStack() as held:
        held.callback(host.close)
        MachineCodeLanes([_NoJudge()], 1, held.pop_all(), [host]).close()  # type: ignore[list-item]
    assert given_up.is_set()


class _NoJudge:
    """Judges nothing."""

    def end(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is open."""
