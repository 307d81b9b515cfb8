"""A kernel of a user's file and its variants through machine code: compiled by Triton, launched by a fake driver."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.lib.machine_code.opened import FAKE_FLUSH_BYTES
from forecast_autotune.records import Config, Outcome
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.clocks.compilation.workers import CompileWorkers
from forecast_harness.clocks.records import MachineCodeError
from forecast_harness.clocks.runner import client
from forecast_harness.clocks.runner.client import (
    NoMachineCodePath,
    RunnerClient,
    facts_for_workers,
    open_healthy_runner,
)
from forecast_harness.records import Node, NodeJob, SearchTarget, TargetKind
from forecast_harness.trials import devices
from forecast_harness.trials import machine_lanes as opening
from forecast_harness.trials.confirmation import EarlyOpener
from forecast_harness.trials.judge import SandboxJudge
from forecast_harness.trials.kernel_calls import error_limits
from forecast_harness.trials.machine_code.judge import MachineCodeJudge
from forecast_harness.trials.machine_code.kernel_trials import KernelTrials, kernel_call
from forecast_harness.trials.machine_lanes import MachineCodeLanes, open_machine_code_lanes
from forecast_harness.trials.protocol import CannotConfirm, LaneFailure
from forecast_harness.verify.plan import VerificationPlan
from tests.harness.trials.machine_code.judged_sums import NotingHost, ReadyHost
from tests.harness.trials.machine_code.translated_builds import StartedBuilder, TranslatedBuilder
from tests.harness.variant_kernels import DOUBLE, subject, vector_call
from tests.waiting import wait_until

PLAN = VerificationPlan(cases=1)


def target(source: str = DOUBLE, **more: object) -> SearchTarget:
    base = subject(source, vector_call(1000))
    payload = {"subjects": [base.to_json()], "source_sha256": "5" * 64, **more}
    return SearchTarget(TargetKind.KERNEL, "kernel", "id", "triton", "kernel", "", payload)


def node(name: str, source: str) -> Node:
    return Node(name, source, "triton", (), Provenance(Origin.HAND))


SEED = node("seed", DOUBLE)
BASE = subject(DOUBLE, vector_call(1000), vector_call(300))


def job(name: str, source: str, trials: int = 2) -> NodeJob:
    return NodeJob(f"job-{name}", node(name, source), SEED, {}, target(), 0, trials)


@pytest.fixture(scope="module")
def builder(runner: RunnerClient) -> Iterator[TranslatedBuilder]:
    with CompileWorkers(facts_for_workers(runner), 1) as workers:
        result = TranslatedBuilder(workers)
        yield result
        result.close()


@pytest.fixture(scope="module")
def trials(
    runner: RunnerClient, builder: TranslatedBuilder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KernelTrials]:
    result = KernelTrials(target(), PLAN, tmp_path_factory.mktemp("trials") / "not" / "yet")
    with contextlib.closing(result):
        result.learn_results(runner, builder)
        yield result


@pytest.fixture(scope="module")
def judge(
    runner: RunnerClient,
    builder: TranslatedBuilder,
    trials: KernelTrials,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[MachineCodeJudge]:
    folder = tmp_path_factory.mktemp("host")
    host = NotingHost({"cheat": "wrong at a hidden size"})
    with contextlib.closing(
        MachineCodeJudge(runner, builder, trials, host=lambda: host, device="fake", locks=folder)
    ) as result:
        yield result


def test_the_base_kernel_shows_what_is_written_and_what_is_right(trials: KernelTrials) -> None:
    (call,) = [c for c in trials.calls.timed.values()]
    assert call.given.updates == ("out",)
    assert set(call.arguments.tensors) == {"x", "out"}


LONG_LIST = [
    replace(c, num_warps=w, num_stages=s) for c in BASE.configs for w in (1, 2, 4, 8) for s in range(1, 8)
]
SEARCHED = replace(target(), payload={"subjects": [replace(BASE, configs=tuple(LONG_LIST)).to_json()]})


@contextlib.contextmanager
def opened_lanes(
    fake_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MachineCodeLanes]:
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(client, "LIBRARY", str(fake_driver))
    monkeypatch.setattr(client, "FLUSH_BYTES", FAKE_FLUSH_BYTES)
    monkeypatch.setattr(client, "runner_problem", lambda runner: "")
    monkeypatch.setattr(devices, "CompileWorkers", StartedBuilder)
    monkeypatch.setattr(opening, "_HostOpening", lambda *_: ReadyHost(NotingHost({})))
    answers: list[str] = []
    folder = tmp_path / "search"  # as a search names it: nothing is there yet
    with contextlib.closing(
        open_machine_code_lanes(
            SEARCHED, SEED, [PLAN], folder=folder, workers=1, insist=True, on_failure=answers.append
        )
    ) as lanes:
        yield lanes
    assert answers == []


def searched_job(made: Node) -> NodeJob:
    return NodeJob(f"job-{made.id}", made, SEED, {}, SEARCHED, 0, 5)


def test_a_search_of_a_kernel_goes_through_machine_code(
    fake_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(LONG_LIST) > 48
    with opened_lanes(fake_driver, tmp_path, monkeypatch) as lanes:
        assert lanes.capacity >= 1
        jobs = [searched_job(n) for n in (SEED, node("fast", f"{DOUBLE}# 30000 ns\n"))]
        seed, fast = (future.result(120) for future in [lanes.submit(job) for job in jobs])
    for result in (seed, fast):
        assert (result.outcome, result.measurements, result.facts["path"]) == (Outcome.OK, 5, "machine code")
        spent = result.facts["spent"]
        assert set(spent) == {"configs", "builds", "queue", "device", "runner"}
        assert 0 < spent["runner"] <= spent["device"] == pytest.approx(result.device_seconds, abs=1e-3)
    assert seed.log2_ratio == pytest.approx(0.0, abs=0.1)
    assert fast.log2_ratio == pytest.approx(-0.72, abs=0.1)
    assert not fast.may_lead
    assert Config.from_json(fast.config).kwargs[0][0] == "BLOCK"


@pytest.mark.parametrize(
    ("source", "outcome", "said"),
    [
        (DOUBLE.replace("2 * tl.load", "3 * tl.load"), Outcome.INCORRECT, "out differs by 0.5"),
        (DOUBLE.replace("2 * tl.load", "2.001 * tl.load"), Outcome.INCORRECT, "out differs by 0.0005"),
        (DOUBLE.replace("tl.store", "tl.no_such_thing"), Outcome.COMPILE_ERROR, "no_such_thing"),
    ],
)
def test_a_wrong_variant_is_refused_before_it_is_timed(
    judge: MachineCodeJudge, source: str, outcome: Outcome, said: str
) -> None:
    result = judge.judge(job("bad", source))
    assert (result.outcome, result.facts["path"]) == (outcome, "machine code")
    assert said in result.feedback


@pytest.mark.parametrize("rounding", ["tl.dot(x, y)", "x.to(tl.bfloat16)"])
def test_a_base_that_rounds_to_less_than_float32_widens_the_limit(rounding: str) -> None:
    limits = [error_limits({"out": "float32"}, source)["out"] for source in (DOUBLE, DOUBLE + rounding)]
    assert limits[0] < 2**-12 < 2**-10 < limits[1]


def test_the_base_kernel_runs_in_the_config_that_the_store_has_decided_on(
    trials: KernelTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = Config.of({"BLOCK": 128})
    known = replace(target(), payload={**target().payload, "decided": decided.to_json()})
    monkeypatch.setattr(trials, "_target", known)
    monkeypatch.setattr(trials, "base_build", (decided.to_json(), None))
    own, other = replace(job("seed", DOUBLE), node=SEED), job("other", f"{DOUBLE}# 1 ns\n")
    assert trials.configs(own) == [decided.to_json()]
    assert len(trials.configs(other)) == 2


def test_a_call_that_nothing_can_be_told_from_is_refused() -> None:
    with pytest.raises(MachineCodeError, match="no elements"):
        kernel_call(subject(DOUBLE, vector_call(0)))
    with pytest.raises(MachineCodeError, match="bytes of tensors"):
        kernel_call(subject(DOUBLE, vector_call(1 << 31)))


def test_a_base_kernel_that_does_not_compile_is_not_judged_so(
    runner: RunnerClient, builder: TranslatedBuilder, tmp_path: Path
) -> None:
    broken = target(DOUBLE.replace("tl.store", "tl.no_such_thing"))
    with (
        contextlib.closing(KernelTrials(broken, PLAN, tmp_path)) as result,
        pytest.raises(MachineCodeError, match=r"(?s)cannot be launched as machine code: .*no_such_thing"),
    ):
        result.learn_results(runner, builder)


def test_configs_of_the_base_that_do_not_fit_are_left_out(
    runner: RunnerClient, builder: TranslatedBuilder, tmp_path: Path
) -> None:
    source = DOUBLE.replace("    i =", "    tl.static_assert(BLOCK < 128)\n    i =", 1)
    listed = [Config.of({"BLOCK": b}) for b in (512, 256, 128, 64)]
    given = target(source)
    subjects = [{**s, "configs": [c.to_json() for c in listed]} for s in given.payload["subjects"]]
    given = replace(given, payload={**given.payload, "subjects": subjects})
    with contextlib.closing(KernelTrials(given, PLAN, tmp_path)) as result:
        result.learn_results(runner, builder)
        seed = replace(SEED, source=source)
        assert (
            result.configs(replace(job("seed", source), node=seed, against=seed))[0] == listed[-1].to_json()
        )


@pytest.mark.parametrize(("bad", "fit"), [(0, True), (9, True), (10, False)])
def test_a_clock_may_be_disturbed_for_a_while(
    fake_driver: Path, monkeypatch: pytest.MonkeyPatch, bad: int, fit: bool
) -> None:
    monkeypatch.setattr(client, "LIBRARY", str(fake_driver))
    monkeypatch.setattr(client, "FLUSH_BYTES", FAKE_FLUSH_BYTES)
    monkeypatch.setattr(client, "_HEALTH_PAUSE_S", 0.0)
    answer = iter(["the device's clock"] * bad + [""] * 3)
    monkeypatch.setattr(client, "runner_problem", lambda runner: next(answer))
    if fit:
        with contextlib.closing(open_healthy_runner(0)) as runner:
            assert runner.check_health() == ""
    else:
        with pytest.raises(NoMachineCodePath, match="the device's clock"):
            open_healthy_runner(0)


def test_lanes_that_close_do_not_wait_for_a_judge_that_is_still_opening() -> None:
    begun, given_up = threading.Event(), threading.Event()

    def surveying() -> SandboxJudge:
        begun.set()
        assert given_up.wait(60)
        raise LaneFailure("given up")

    host = EarlyOpener(surveying, given_up.set)
    assert begun.wait(60)
    with ExitStack() as held:
        held.callback(host.close)
        MachineCodeLanes([_NoJudge()], 1, held.pop_all(), [host]).close()  # type: ignore[list-item]
    assert given_up.is_set()


def test_what_no_judge_can_confirm_is_known_while_others_time(tmp_path: Path) -> None:
    def refused() -> SandboxJudge:
        raise CannotConfirm("the base kernel: kernel does not accept drawn arguments")

    def lost() -> SandboxJudge:
        raise LaneFailure("the canary")

    for made, said in ([refused], "does not accept"), ([refused, lost], ""), ([lost], ""), ([], ""):
        hosts = [EarlyOpener(make) for make in made]
        with contextlib.closing(MachineCodeLanes([_NoJudge()], 1, ExitStack(), hosts)) as lanes:  # type: ignore[list-item]
            wait_until(lambda hosts=hosts: all(host.failure is not None for host in hosts))  # type: ignore[misc]
            assert said in lanes.problem
            assert bool(lanes.problem) == bool(said)


class _NoJudge:
    """Judges nothing."""

    def end(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is open."""
