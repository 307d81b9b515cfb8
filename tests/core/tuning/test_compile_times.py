"""What is expected of compilations: how long they take, and how slow the programs are that spill."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.compile_seconds import (
    FEATURES,
    CompileSeconds,
    deep_log2_seconds,
    shipped_compile_seconds,
    stage_doublings,
)
from forecast_autotune.features.ttir.extraction import TtirFacts, assignment_of
from forecast_autotune.records import Candidate, Config, Measurement, Outcome
from forecast_autotune.records.table import Table, read_tables
from forecast_autotune.store import Store
from forecast_autotune.tuning.compilations import UNKNOWN_S, CompileTimes, spill_slowdowns
from forecast_autotune.tuning.replays.replay import shipped_tables
from forecast_autotune.tuning.tracing import LaunchFacts, LazyTraces
from tests.core.tuning.loop import TABLE, Bench, Told, constant, decide

FLAT = CompileSeconds((0.0,) * len(FEATURES), 0.0, kernel_sd=1.0, config_sd=0.5)
NAMES = CandidateList(Candidate(Config.of({"BLOCK": 2**k})) for k in range(4))


def untraced() -> CompileTimes:
    return CompileTimes(NAMES, LazyTraces(NAMES, None), FLAT)


def recorded(kernel: str) -> Table:
    """The first shipped table of a kernel."""
    found = (table for path in shipped_tables() for table in read_tables(path))
    return next(table for table in found if kernel in table.problem.kernel.name)


def remaining(
    compiled: Mapping[Candidate, float], compiling: Mapping[Candidate, float], ready: Any = ()
) -> Any:
    return untraced().expected(compiled, compiling, ready).remaining


def test_what_is_expected_follows_what_compiled_what_compiles_and_what_is_ready() -> None:
    before = remaining({}, {})
    assert len(set(before.tolist())) == 1
    assert before[0] > UNKNOWN_S, "the mean of a log-normal variable is above its median"
    after = remaining({NAMES[0]: 4.0, NAMES[1]: 4.0}, {})
    assert after[:2].tolist() == [0.0, 0.0], "they are compiled"
    assert before[2] < after[2] < 4.0 * 1.1
    assert (remaining({}, {}, {NAMES[3]}) == 0.0).tolist() == [False, False, False, True]
    one, two = (remaining({}, {NAMES[0]: s}) for s in (0.1, 20.0))
    assert 0.0 < one[0] < one[1], "a part of it has passed"
    assert two[0] > one[0], "what has compiled for long goes on for long"
    late = remaining({}, {NAMES[0]: 20.0, NAMES[1]: 20.0})
    assert (late[:2] < late[2:]).all(), "where all are late, who has begun is ahead"
    stranger = Candidate(Config.of({"OTHER": 1}))
    np.testing.assert_array_equal(remaining({stranger: 9.0}, {stranger: 9.0}, {stranger}), before)


def test_the_longer_it_compiles_the_slower_it_is_expected_to_run() -> None:
    took = {NAMES[0]: 0.5, NAMES[1]: 0.5}
    found = [untraced().expected(took, {NAMES[3]: s}, ()).penalties[3] for s in (0.9, 2.0, 4.0, 8.0)]
    assert found[0] == 0.0
    assert found == sorted(found)
    assert found[3] - found[2] == pytest.approx(found[2] - found[1]), "the same for each doubling"


def test_ir_tells_long_compilations_from_short_ones() -> None:
    """Of a recorded kernel's candidates, those expected to take longest took longer than the others."""
    table = recorded("matmul_kernel")
    rows = table.by_candidate()
    names = CandidateList(rows)
    asked: list[int] = []

    def trace(wanted: Sequence[Candidate]) -> Mapping[str, str]:
        asked.append(len(wanted))
        return {
            key: table.problem.ttir[key] for c in wanted if (key := assignment_of(c)) in table.problem.ttir
        }

    traces = LazyTraces(names, trace, LaunchFacts(table.problem, table.grids()))
    times = CompileTimes(names, traces, shipped_compile_seconds())
    blind = times.expected({}, {}, ()).remaining
    assert len(set(blind.tolist())) == 1
    traces.trace_initial(everything=True)
    found = times.expected({}, {}, ()).remaining
    took = np.array([m.compile_s or math.nan for m in rows.values()])
    known = np.isfinite(took)
    order = np.argsort(found[known])
    third = len(order) // 3
    assert np.median(took[known][order[-third:]]) > 1.3 * np.median(took[known][order[:third]])


@pytest.mark.parametrize(
    ("target", "least", "most"), [(("hip", "3.9.0"), 8.0, 20.0), (("hip", "3.8.0"), 2.0, 4.0)]
)
def test_deep_pipelines_of_large_tiles_compile_long_on_amd(
    target: tuple[str, str], least: float, most: float
) -> None:
    large, small = TtirFacts(direct_bytes=65536.0), TtirFacts(direct_bytes=2048.0)
    doublings = stage_doublings(*target)
    assert least < 2.0 ** deep_log2_seconds(large, 5, doublings) < most
    assert deep_log2_seconds(large, 2, doublings) == 0.0
    assert 2.0 ** deep_log2_seconds(small, 5, doublings) < 1.2
    assert stage_doublings("cuda", "3.9.0") == 0.0


def config(block: int, warps: int, stages: int = 3, maxnreg: int | None = None) -> Candidate:
    return Candidate(Config.of({"BLOCK": block}, num_warps=warps, num_stages=stages, maxnreg=maxnreg))


SPILLING = CandidateList(
    config(block, warps, stages) for block in (32, 64) for warps in (2, 4, 8) for stages in (3, 4)
)


def measured(candidate: Candidate, spills: object, outcome: Outcome = Outcome.OK) -> Measurement:
    ms = 1.0 if outcome is Outcome.OK else None
    return Measurement(TABLE.problem.id, candidate, outcome, median_ms=ms, extra={"spills": spills})


def slower(
    *measurements: Measurement, names: CandidateList = SPILLING, lasted: Mapping[Candidate, float] = {}
) -> set[Candidate]:
    found = spill_slowdowns(names, measurements, lasted)
    assert found.shape == (len(names),)
    return {names[row] for row in found.nonzero()[0].tolist()}


def test_fewer_warps_of_a_program_that_spills_are_expected_to_lose_in_any_number_of_stages() -> None:
    assert slower(measured(config(64, 4), 60)) == {config(64, 2, 3), config(64, 2, 4)}
    assert slower(measured(config(64, 8), 60)) == {config(64, w, s) for w in (2, 4) for s in (3, 4)}
    assert slower(measured(config(64, 2), 60)) == set()
    assert slower(measured(config(64, 8), 60, Outcome.RUNTIME_ERROR)) == set(), "a failure says nothing"
    assert slower(measured(config(128, 8), 60)) == set(), "it is not of this list"
    little = replace(measured(config(64, 8), 36), compile_s=1.0)
    lasted = {config(64, 4): 1.4, config(64, 2): 1.6}
    assert slower(little, lasted=lasted) == {config(64, 2)}, (
        "it compiles hardly longer than what spills a little"
    )
    # A limit on registers spills by itself: another config's spills are no sign.
    names = CandidateList([config(64, 8, maxnreg=64), config(64, 4, maxnreg=64), config(64, 4)])
    assert slower(measured(names[0], 60), names=names) == {names[1]}


@pytest.mark.parametrize(("spills", "waits"), [(60, False), (36, False), (0, True)])
def test_what_must_spill_is_not_waited_for(spills: int, waits: bool) -> None:
    seconds = {config(64, 2): 0.8, config(64, 4): 0.3, config(64, 8): 0.3}
    rows = [
        replace(measured(c, spills if c == config(64, 4) else 0), compile_s=s) for c, s in seconds.items()
    ]
    table = Table(TABLE.problem, rows)
    bench = Bench(table)
    decide(Store(None), bench, table=table, surrogate=Told(constant(sd=1.0)))
    assert (config(64, 2) in bench.asked) is waits
    assert (bench.spent().wall_s >= 0.8) is waits
