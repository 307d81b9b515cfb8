"""Sources on their way through the gates: with a real runner, and a builder that reads its code from the source."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lib.machine_code.sums import SumCall
from forecast_autotune.records import Outcome
from forecast_harness.machine_code.compile_workers import BuildRequest, BuildResult
from forecast_harness.machine_code.gate_records import (
    Gate,
    GateCounts,
    GateRules,
    LaunchOptions,
    ProposedSource,
    SourceVerdict,
)
from forecast_harness.machine_code.gates import SourceGates
from forecast_harness.machine_code.runner.client import RunnerClient
from tests.harness.machine_code.written_sources import SMALL, WrittenBuilder


@pytest.fixture
def builder() -> Iterator[WrittenBuilder]:
    found = WrittenBuilder()
    yield found
    found.close()


def gates(
    builder: WrittenBuilder, runner: RunnerClient, refused: tuple[str, ...] = (), **more: object
) -> tuple[SourceGates, list[tuple[str, LaunchOptions]]]:
    verified: list[tuple[str, LaunchOptions]] = []

    def verify(source: ProposedSource, config: LaunchOptions) -> str:
        verified.append((source.name, config))
        return "wrong at a hidden size" if source.name in refused else ""

    made = SourceGates(
        builder,
        runner,
        "run",
        SumCall(1, SMALL),
        SumCall(2),
        verify=verify,
        **more,  # type: ignore[arg-type]
    )
    return made, verified


def one(name: str, source: str, *warps: int) -> ProposedSource:
    return ProposedSource(name, source, tuple({"num_warps": w} for w in warps) or ({},))


def by_name(verdicts: list[SourceVerdict]) -> dict[str, SourceVerdict]:
    return {v.name: v for v in verdicts}


def test_every_source_gets_one_verdict_from_the_gate_that_it_failed_at(
    builder: WrittenBuilder, runner: RunnerClient
) -> None:
    judge, verified = gates(builder, runner, repeats=lambda s: "seed" if s.name == "again" else "")
    assert judge.seed(one("seed", "honest 50000", 4)).incumbent
    sources = [
        one("again", "honest 50000"),
        one("broken", "broken"),
        one("host", "host"),
        one("lost", "lost"),
        one("wrong", "wrong"),
        one("faulty", "faulty"),
        one("slow", "honest 90000", 4, 8),
        one("fast", "honest 30000"),
    ]
    found = list(judge.judge(sources))
    assert sorted(v.name for v in found) == sorted(s.name for s in sources)
    said = {n: (v.gate, v.outcome) for n, v in by_name(found).items()}
    assert said == {
        "again": (Gate.NOVELTY, Outcome.OK),
        "broken": (Gate.COMPILE, Outcome.COMPILE_ERROR),
        "host": (Gate.COMPILE, Outcome.OK),
        "lost": (Gate.COMPILE, Outcome.INFRASTRUCTURE),
        "wrong": (Gate.CHECK, Outcome.INCORRECT),
        "faulty": (Gate.CHECK, Outcome.RUNTIME_ERROR),
        "slow": (Gate.TIME, Outcome.OK),
        "fast": (Gate.VERIFY, Outcome.OK),
    }
    assert by_name(found)["host"].host_code
    assert ("slow", 8) not in builder.asked  # its first config was far from winning
    assert [name for name, _ in verified] == ["seed", "fast"]
    counts = judge.counts
    assert (counts.proposed, counts.judged, counts.repeated) == (9, 9, 1)
    assert (counts.compiled, counts.checked, counts.verified, counts.faults) == (5, 5, 2, 1)


def test_only_a_verified_source_becomes_the_incumbent(builder: WrittenBuilder, runner: RunnerClient) -> None:
    judge, _ = gates(builder, runner, refused=("cheat",))
    judge.seed(one("seed", "honest 50000"))
    (cheat,) = judge.judge([one("cheat", "honest 20000")])
    assert (cheat.gate, cheat.outcome, cheat.incumbent) == (Gate.VERIFY, Outcome.INCORRECT, False)
    assert judge.incumbent is not None
    assert judge.incumbent.candidate == "seed"
    (fair,) = judge.judge([one("fair", "honest 40000")])
    assert fair.incumbent
    assert judge.incumbent.candidate == "fair"
    assert judge.incumbent_s == pytest.approx(41e-6, rel=0.05)


def test_a_source_as_fast_as_the_incumbent_is_not_verified(
    builder: WrittenBuilder, runner: RunnerClient
) -> None:
    judge, verified = gates(builder, runner, rules=GateRules(gain=0.02))
    judge.seed(one("seed", "honest 50000"))
    (same,) = judge.judge([one("same", "honest 50000")])
    assert (same.outcome, same.incumbent) == (Outcome.OK, False)
    assert [name for name, _ in verified] == ["seed"]


def test_the_best_of_all_configs_is_verified(builder: WrittenBuilder, runner: RunnerClient) -> None:
    judge, verified = gates(builder, runner)
    judge.seed(one("seed", "honest 50000"))
    (found,) = judge.judge([one("many", "honest 48000", 4, 8, 2, 16)])
    assert found.incumbent
    assert found.timed == 4
    assert found.config == {"num_warps": 16}
    assert verified[-1] == ("many", {"num_warps": 16})


def test_one_config_that_fails_does_not_end_a_source(builder: WrittenBuilder, runner: RunnerClient) -> None:
    judge, verified = gates(builder, runner)
    judge.seed(one("seed", "honest 50000"))
    (found,) = judge.judge([one("wide", "wide 40000", 4, 8)])
    assert found.incumbent
    assert found.config == {"num_warps": 4}
    assert verified[-1] == ("wide", {"num_warps": 4})


def test_unpromising_sources_are_not_compiled(builder: WrittenBuilder, runner: RunnerClient) -> None:
    judge, _ = gates(builder, runner, promise=lambda s: 0.9 if s.name == "likely" else 0.1, least_promise=0.5)
    judge.seed(one("seed", "honest 50000"))
    found = by_name(list(judge.judge([one("unlikely", "honest 10000"), one("likely", "honest 40000")])))
    assert found["unlikely"].gate is Gate.FORECAST
    assert found["likely"].incumbent
    assert "unlikely" not in {name for name, _ in builder.asked}


def test_progress_is_told_while_nothing_ends(fake_driver: Path, builder: WrittenBuilder) -> None:
    told: list[GateCounts] = []
    enough = threading.Event()

    def progress(counts: GateCounts) -> None:
        told.append(counts)
        if len(told) >= 6:
            enough.set()

    with RunnerClient(str(fake_driver), flush_bytes=1 << 20) as runner:
        rules = GateRules(progress_s=0.01)
        judge, _ = gates(builder, runner, progress=progress, rules=rules)

        def held(request: BuildRequest) -> BuildResult:
            assert enough.wait(60)
            return BuildResult(request, error="late")

        builder._build = held  # type: ignore[method-assign]
        (found,) = judge.judge([one("late", "honest")])
    assert found.outcome is Outcome.COMPILE_ERROR
    assert {(c.proposed, c.judged) for c in told[1:6]} == {(1, 0)}
