"""Calls whose right results the runner has learned: later launches are compared with them on the device."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.machine_code import fake_code as code
from forecast_harness.clocks.records import (
    BufferRole,
    CompiledKernel,
    KernelArgument,
    LaunchPlan,
    MachineCodeError,
    PlanBuffer,
    PlanStep,
    Program,
)
from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.clocks.runner.contestant import Contestant, LoadedKernel
from forecast_harness.clocks.runner.driver import CudaDriver
from forecast_harness.clocks.runner.kernels import RunnerKernels
from forecast_harness.clocks.runner.messages import BufferContents, ElementKind, ProgramInputs, TimingLimits
from forecast_harness.clocks.runner.session import LaunchSession

COUNT, PERIOD = 1000, 96
SIZE = 4 * COUNT
NAMES = ("x", "y", "out")
KINDS = {n: ElementKind("float32") for n in NAMES}
X, Y, OUT, ALL, FEW = range(5)
"""Parameters of the programs: the last two are counts."""
RIGHT = [code.add(OUT, X, Y, ALL), code.spend(50_000)]
WRONG = [code.scale(OUT, X, 1000, ALL), code.spend(50_000)]
LOOKS_FOR_THEM = [code.add(OUT, X, Y, FEW), code.find_elsewhere(OUT, SIZE, alike=True)]
"""The first sums are right, and all that begins as they do may be what is right."""


def program(name: str, operations: Sequence[code.Operation]) -> Program:
    """One that is to add x and y into `out`, which it is given."""
    kinds = ("*fp32", "*fp32", "*fp32", "i32", "i32")
    kernel = CompiledKernel("kernel", 90, kinds, image=code.image("kernel", kinds, operations))
    given = [*(KernelArgument(n) for n in NAMES), KernelArgument(value=COUNT), KernelArgument(value=2)]
    buffers = tuple(PlanBuffer(n, BufferRole.INPUT, SIZE) for n in NAMES)
    return Program(name, (kernel,), LaunchPlan(buffers, (PlanStep(0, (1, 1, 1), tuple(given)),)))


def contents(seed: int, period: int = PERIOD) -> BufferContents:
    values = np.random.default_rng(seed).standard_normal(period, dtype=np.float32)
    return BufferContents(values.tobytes(), SIZE)


def call(key: str, **more: BufferContents) -> ProgramInputs:
    inputs = {"x": contents(1), "y": contents(2), "out": BufferContents(bytes(64), SIZE), **more}
    return ProgramInputs(key, inputs)


def test_contents_repeat_up_to_their_size() -> None:
    assert BufferContents(b"abc", 8).whole() == b"abcabcab"
    assert BufferContents.of(b"abc").whole() == b"abc"
    for data, size in ((b"", 1), (b"abc", 2)):
        with pytest.raises(MachineCodeError, match="cannot be the contents"):
            BufferContents(data, size)


def test_a_right_program_shows_what_it_changes_and_others_are_held_against_it(runner: RunnerClient) -> None:
    names, violations = runner.learn(program("base", RIGHT), call("learned"), KINDS)
    assert (names, violations) == (("out",), ())
    given = replace(call("learned"), updates=names, rotate={"x": 4, "y": 4})
    for operations, low, high in ((RIGHT, 0.0, 0.0), (WRONG, 0.1, 2.0)):
        answer = runner.check(program("other", operations), given, 4)
        assert not answer.violations
        data = [one.errors for one in answer.launches if not any(one.rotation.values())]
        assert len(data) >= 2
        assert all(set(errors) == {"out"} and low <= errors["out"] <= high for errors in data)
        assert not any(one.outputs for one in answer.launches)
        limits = TimingLimits(bound_s=60.0)  # however busy the host is, none is given up as the slower one
        timed = runner.time([program("base", RIGHT), program("other", operations)], given, limits)
        assert len(timed.launches) == limits.checks
        assert all(low <= one.errors["out"] <= high for one in timed.launches), "at inputs as they were"


def test_what_writes_where_the_right_one_does_not_is_refused(runner: RunnerClient) -> None:
    names, _ = runner.learn(program("base", RIGHT), call("refuses"), KINDS)
    given = replace(call("refuses"), updates=names)
    bad = program("bad", [*RIGHT, code.store(Y, 0, 4, 7)])
    (violation,) = runner.check(bad, given).violations
    assert (violation.rule, violation.detail) == ("input changed", "it wrote into y")
    assert runner.check(program("good", RIGHT), given).launches[0].errors == {"out": 0.0}


def test_another_call_is_learned_with_the_buffers_that_one_has_shown(runner: RunnerClient) -> None:
    given = replace(call("of names"), updates=("out",))
    assert runner.learn(program("base", RIGHT), given, KINDS) == (("out",), ())
    names, (violation,) = runner.learn(program("bad", [*RIGHT, code.store(Y, 0, 4, 7)]), given, KINDS)
    assert (names, violation.rule) == ((), "input changed")


def test_a_new_process_learns_anew(runner: RunnerClient) -> None:
    names, _ = runner.learn(program("base", RIGHT), call("again"), KINDS)
    given = replace(call("again"), updates=names)
    os.kill(runner.pid, signal.SIGKILL)
    assert runner.check(program("right", RIGHT), given).launches[0].errors == {"out": 0.0}
    assert runner.check(program("wrong", WRONG), given).launches[0].errors["out"] > 0.1


def test_rotated_values_repeat_as_the_period_says(runner: RunnerClient) -> None:
    whole = {n: BufferContents.of(c.whole()) for n, c in call("").inputs.items()}
    runner.learn(program("base", RIGHT), call("whole", **whole), KINDS)
    runner.learn(program("base", RIGHT), call("period"), KINDS)
    for key in ("whole", "period"):
        given = replace(call(key, **(whole if key == "whole" else {})), updates=("out",))
        assert runner.check(program("right", RIGHT), given).launches[0].errors == {"out": 0.0}


class _InProcess:
    """A session of the fake driver, in this process."""

    def __init__(self, library: Path) -> None:
        self.driver = CudaDriver(str(library))
        self.session = LaunchSession(self.driver, 1 << 20, lambda contestant: None)
        self.given = ProgramInputs("here", call("here").inputs, updates=("out",))
        self.session.learn(self.contestant("base", RIGHT), self.given, KINDS, 0)

    def contestant(self, name: str, operations: Sequence[code.Operation]) -> Contestant:
        result = program(name, operations)
        return Contestant(self.driver, result, [LoadedKernel(self.driver, k) for k in result.kernels], "0/")


@pytest.mark.parametrize("masked", [True, False])
def test_known_results_are_of_no_use_to_who_finds_them(
    fake_driver: Path, monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    if not masked:
        monkeypatch.setattr(RunnerKernels, "mask", lambda *_: None)
    here = _InProcess(fake_driver)
    (launch,), violations = here.session.check(here.contestant("looks", LOOKS_FOR_THEM), here.given, 1)
    assert not violations
    assert (launch.errors["out"] > 0.1) == masked


def test_what_is_written_into_known_results_is_seen(fake_driver: Path) -> None:
    here = _InProcess(fake_driver)
    (kept,) = here.session._results._kept.values()
    here.driver.upload(kept.address, b"\1")
    launches, (violation,) = here.session.check(here.contestant("right", RIGHT), here.given, 1)
    assert not launches
    assert violation.detail == "it wrote into what its results are compared with"
    assert not here.session.knows_results("here")


@pytest.mark.parametrize("bad_first", [True, False])
def test_of_two_the_one_that_spoils_an_input_is_blamed(runner: RunnerClient, bad_first: bool) -> None:
    names, _ = runner.learn(program("base", RIGHT), call("blamed"), KINDS)
    given = replace(call("blamed"), updates=names, rotate={"x": 4})
    both = [program("bad", [*RIGHT, code.store(Y, 0, 4, 7)]), program("good", RIGHT)]
    (violation,) = runner.time(
        both if bad_first else both[::-1], given, TimingLimits(bound_s=60.0)
    ).violations
    assert (violation.rule, violation.contestant) == ("input changed", 0 if bad_first else 1)
