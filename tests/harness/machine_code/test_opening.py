"""What is made ready before a search judges through machine code."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.lib.machine_code.opened import FAKE_FLUSH_BYTES
from forecast_harness.machine_code import opening
from forecast_harness.machine_code.opening import HostJudgeAhead, NoMachineCodePath, open_fit_runner
from forecast_harness.search.interfaces import LaneFailure
from forecast_harness.verify.plan import VerificationPlan
from tests.harness.machine_code.noting_host import NotingHost


def test_the_first_judge_of_host_code_is_opened_before_anybody_asks() -> None:
    opened, made = threading.Event(), list[NotingHost]()

    def make() -> NotingHost:
        made.append(NotingHost({}))
        opened.set()
        return made[-1]

    hosts = HostJudgeAhead(make)
    assert opened.wait(60)
    assert [hosts(), hosts()] == made
    hosts.close()
    assert not any(one.closed for one in made)


def test_a_judge_that_nobody_asked_for_is_closed() -> None:
    opened, host = threading.Event(), NotingHost({})

    def make() -> NotingHost:
        opened.set()
        return host

    hosts = HostJudgeAhead(make)
    assert opened.wait(60)
    hosts.close()
    assert host.closed


def test_who_asks_hears_why_it_could_not_be_opened() -> None:
    def make() -> NotingHost:
        raise LaneFailure("no lane works", "lane")

    hosts = HostJudgeAhead(make)
    with pytest.raises(LaneFailure, match="no lane works"):
        hosts()
    hosts.close()
    HostJudgeAhead(make).close()


@pytest.mark.parametrize(("bad", "fit"), [(0, True), (9, True), (10, False)])
def test_a_clock_may_be_disturbed_for_a_while(
    fake_driver: Path, monkeypatch: pytest.MonkeyPatch, bad: int, fit: bool
) -> None:
    monkeypatch.setattr(opening, "LIBRARY", str(fake_driver))
    monkeypatch.setattr(opening, "FLUSH_BYTES", FAKE_FLUSH_BYTES)
    monkeypatch.setattr(opening, "_HEALTH_PAUSE_S", 0.0)
    told = iter(["the device's clock"] * bad + [""] * 3)
    monkeypatch.setattr(opening, "runner_problem", lambda runner: next(told))
    if fit:
        with open_fit_runner(VerificationPlan()) as runner:
            assert runner.check_health() == ""
    else:
        with (
            pytest.raises(NoMachineCodePath, match="the device's clock"),
            open_fit_runner(VerificationPlan()),
        ):
            pass
