"""The runner as a process: it checks, times, and is started anew after whatever a program does."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.machine_code import fake_code as code
from benchmarks.lib.machine_code.exploits import EXPLOITS
from benchmarks.lib.machine_code.fake_code import addition, honest
from benchmarks.lib.machine_code.sums import COUNT, SumCall, objection
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
from forecast_harness.clocks.runner.client import RunnerClient, RunnerLost
from forecast_harness.clocks.runner.contestant import Contestant, LoadedKernel
from forecast_harness.clocks.runner.driver import CudaDriver
from forecast_harness.clocks.runner.kernels import RunnerKernels
from forecast_harness.clocks.runner.messages import (
    BufferContents,
    ElementKind,
    ProgramFault,
    ProgramInputs,
    RunnerFaultKind,
    TimingLimits,
    TimingRequest,
)
from forecast_harness.clocks.runner.session import LaunchSession
from tests.waiting import is_running, wait_until

SUM = 2
HANGS = ("never ends", "never ends at most times")
"""Judged by a runner of their own: one that gives launches little time would give up others on a busy machine."""


def test_a_right_program_is_right_in_every_placement_and_on_other_inputs(runner: RunnerClient) -> None:
    call = SumCall()
    program = addition("right", honest(), COUNT)
    answer = runner.check(program, call.given, 4)
    assert not answer.violations
    assert call.wrong(program, answer.launches) == ""
    rotations = [one.rotation for one in answer.launches]
    assert rotations[:2] == [{}, {}]
    assert any(rotations[2].values())


@pytest.mark.parametrize("name", [n for n in EXPLOITS if n not in HANGS])
def test_no_exploit_is_accepted(runner: RunnerClient, name: str) -> None:
    result, says = EXPLOITS[name]
    call = SumCall()
    message = objection(runner, result(name), call)
    assert message
    assert message.startswith(says)
    assert objection(runner, addition("right", honest(), COUNT), call) == ""


def test_what_is_not_written_differs_from_one_launch_to_the_next(runner: RunnerClient) -> None:
    call = SumCall()
    idle = addition("idle", [code.spend(10)], COUNT)
    for _ in range(24):
        assert call.wrong(idle, runner.check(idle, call.given, 2).launches).startswith("two launches")


def test_a_program_that_never_ends_is_blamed_and_the_next_runner_is_healthy(fake_driver: Path) -> None:
    with RunnerClient(str(fake_driver), launch_s=0.5, flush_bytes=1 << 20) as runner:
        first = runner.pid
        for name in HANGS:
            assert objection(runner, EXPLOITS[name][0](name), SumCall()) == str(RunnerFaultKind.HANG)
            assert runner.faults[-1].candidate == name
        assert runner.pid != first
        assert runner.check_health() == ""
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_outputs_that_a_launch_left_in_shared_memory_are_gone_at_the_next(runner: RunnerClient) -> None:
    magic = 0x33333333
    stale = [
        code.skip_if_shared(0, magic, 4),
        code.add(SUM, 0, 1, 3),
        code.keep_shared(SUM, 0, 1024, 8),
        code.keep_shared(3 + 1, 0, 4, 0),
        code.skip_if_time(1, 0, 1),
        code.take_shared(SUM, 0, 1024, 8),
        code.spend(50_000),
    ]
    # Its own memory begins with the word that it looks for, as far as it can tell.
    program = addition("stale", [code.store(4, 0, 4, 0x33), *stale], COUNT, scratch_bytes=64)
    assert objection(runner, program, SumCall()) == ""


def test_inputs_that_a_program_has_spoilt_are_sent_again(runner: RunnerClient) -> None:
    call, large = SumCall(), SumCall(1, 3 << 20)
    right = addition("right", honest(), COUNT)
    for one, count in ((call, COUNT), (large, 3 << 20)):  # the larger one is compared on the device
        spoiler = EXPLOITS["changes what its inputs are copied from"][0]("spoiler")
        if count != COUNT:
            spoiler = addition("spoiler", [*honest(), code.spoil_copies(0, 4 * count)], count)
        for _ in range(2):
            assert objection(runner, spoiler, one) == "input changed"
            honest_one = addition("right", honest(), count)
            assert objection(runner, honest_one, one, replace(honest_one, candidate="incumbent")) == ""
    assert objection(runner, right, call) == ""


def test_many_calls_share_a_device(runner: RunnerClient) -> None:
    calls = [SumCall(seed) for seed in range(8)]
    right = addition("right", honest(), COUNT)
    for call in [*calls, *reversed(calls)]:
        assert objection(runner, right, call) == ""


def test_the_slower_of_two_programs_is_given_up_early(runner: RunnerClient) -> None:
    call = SumCall()
    programs = [addition(n, honest(c), COUNT) for n, c in (("incumbent", 50_000), ("slow", 60_000))]
    result = runner.time(programs, call.given, TimingLimits(least=4, most=40))
    assert "bound" in result.stopped
    assert [len(s) for s in result.seconds] == [4, 4]


def test_the_faster_of_two_short_programs_is_told_behind_pauses(runner: RunnerClient) -> None:
    call = SumCall()
    programs = [addition(n, honest(c), COUNT) for n, c in (("incumbent", 6_000), ("fast", 5_000))]
    result = runner.time(programs, call.given)
    assert result.recorded
    assert not result.stopped
    theirs, mine = (sum(s) / len(s) for s in result.seconds)
    assert mine < theirs < 12e-6
    assert call.wrong(programs[1], result.launches) == ""


def test_several_calls_are_timed_at_once_until_the_first_violation(runner: RunnerClient) -> None:
    calls = [SumCall(seed) for seed in range(3)]
    right, bad = addition("right", honest(), COUNT), EXPLOITS["writes after its output"][0]("bad")
    result = runner.time_calls([TimingRequest([right], c.given, TimingLimits(checks=1)) for c in calls])
    assert [call.wrong(right, one.launches) for call, one in zip(calls, result, strict=True)] == [""] * 3
    assert all(len(one.launches) == 1 and one.seconds[0] for one in result)
    result = runner.time_calls([TimingRequest([right, bad], c.given) for c in calls])
    assert [v.rule for one in result for v in one.violations] == ["out of bounds"]
    assert result[0].violations[0].contestant == 1
    assert len(result) == 1


def test_one_that_is_far_beyond_its_bound_is_launched_once(runner: RunnerClient) -> None:
    slow = addition("slow", [*honest(), code.spend(60_000_000)], COUNT)
    result = runner.time([slow], SumCall().given, TimingLimits(bound_s=1e-3))
    assert [len(s) for s in result.seconds] == [1]
    assert result.seconds[0][0] > 0.05
    assert "the bound is" in result.stopped


def test_one_program_is_held_against_a_bound(runner: RunnerClient) -> None:
    program = addition("slow", honest(80_000), COUNT)
    result = runner.time([program], SumCall().given, TimingLimits(bound_s=50e-6))
    assert result.stopped
    assert not runner.time([program], SumCall().given, TimingLimits(bound_s=90e-6)).stopped


def test_a_fault_beside_the_incumbent_is_blamed_on_who_was_launched(runner: RunnerClient) -> None:
    good = addition("good", honest(), COUNT)
    evil = addition("evil", [code.fail(700)], COUNT)
    for programs in ([good, evil], [evil, good]):
        with pytest.raises(ProgramFault) as caught:
            runner.time(programs, SumCall().given)
        assert caught.value.candidate == "evil"
        assert runner.faults[-1].candidate == "evil"


def test_a_runner_that_somebody_else_kills_is_replaced_and_the_request_repeated(runner: RunnerClient) -> None:
    call, program = SumCall(), addition("right", honest(), COUNT)
    runner.check(program, call.given)
    faults = len(runner.faults)
    os.kill(runner.pid, signal.SIGKILL)
    answer = runner.check(program, call.given)
    assert call.wrong(program, answer.launches) == ""
    assert [f.candidate for f in runner.faults[faults:]] == [""]
    assert runner.check_health() == ""


def test_a_driver_that_is_not_there_is_nobodys_fault(tmp_path: Path) -> None:
    with (
        pytest.raises(RunnerLost, match="cannot use the device"),
        RunnerClient(str(tmp_path / "libnothing.so")),
    ):
        pass


def test_a_closed_runner_leaves_no_process(fake_driver: Path) -> None:
    with RunnerClient(str(fake_driver), flush_bytes=1 << 20) as runner:
        pid = runner.pid
        assert runner.check_health() == ""
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RunnerLost, match="closed"):
        runner.check(addition("late", honest(), COUNT), SumCall().given)


MIXED = {
    "right": (honest(), ""),
    "wrong": ([code.copy((SUM, 0), (0, 0), 4 * COUNT)], "wrong values"),
    "out of bounds": ([*honest(), code.store(SUM, 4 * COUNT, 64, 1)], "out of bounds"),
    "illegal address": ([code.store(SUM, 1 << 34, 16, 1)], str(RunnerFaultKind.DEVICE_ERROR)),
    "crash": ([code.crash()], str(RunnerFaultKind.CRASH)),
}


def test_faults_in_a_row_lose_no_label_and_blame_nobody_else(runner: RunnerClient) -> None:
    """Two threads ask at once: what one's program does never becomes the other's label."""
    chance = random.Random(7)
    kinds = [chance.choice(list(MIXED)) for _ in range(14)]
    data: dict[int, str] = {}

    def ask(first: int) -> None:
        call = SumCall(first)
        for n in range(first, len(kinds), 2):
            data[n] = objection(runner, addition(f"program-{n}", MIXED[kinds[n]][0], COUNT), call)

    faults = len(runner.faults)
    threads = [threading.Thread(target=ask, args=(n,)) for n in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [data[n] for n in range(len(kinds))] == [MIXED[k][1] for k in kinds]
    blamed = sorted(f.candidate for f in runner.faults[faults:] if f.candidate)
    guilty = sorted(f"program-{n}" for n, k in enumerate(kinds) if k in ("illegal address", "crash"))
    assert blamed == guilty


def test_a_runner_ends_with_its_parent(fake_driver: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with RunnerClient(str(fake_driver), flush_bytes=1 << 20) as runner:
            os.write(writer, str(runner.pid).encode())
            os._exit(0)  # without closing anything
    os.waitpid(child, 0)
    pid = int(os.read(reader, 32))
    os.close(reader)
    os.close(writer)
    wait_until(lambda: not is_running(pid), "the end of the runner")


# --- known results ---


ELEMENTS, PERIOD = 1000, 96
SIZE = 4 * ELEMENTS
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
    given = [*(KernelArgument(n) for n in NAMES), KernelArgument(value=ELEMENTS), KernelArgument(value=2)]
    buffers = tuple(PlanBuffer(n, BufferRole.INPUT, SIZE) for n in NAMES)
    return Program(name, (kernel,), LaunchPlan(buffers, (PlanStep(0, (1, 1, 1), tuple(given)),)))


def contents(seed: int) -> BufferContents:
    values = np.random.default_rng(seed).standard_normal(PERIOD, dtype=np.float32)
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
    (kept,) = here.session._results._results.values()
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
