"""What the host tool would have taken: against recorded compilations, and where nothing may be claimed."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.resources import as_file, files
from typing import Any

import pytest

from forecast_autotune.records import Candidate, Config, Device, Kernel, Measurement, Outcome, Problem
from forecast_autotune.records.table import Table, read_tables
from forecast_autotune.tuning.host_seconds import (
    HOST_COMPILE_RATIO,
    HOST_TIMING_S,
    STUB_S,
    forecast_compile_seconds,
    seconds_saved,
    triton_autotune_seconds,
)

PROBLEM = Problem.of(Kernel("k"), [], Device("somewhere"), toolchain={"triton": "3.6.0"})


def candidate(block: int, warps: int = 4, variant: str = "base") -> Candidate:
    return Candidate(Config.of({"BLOCK": block}, num_warps=warps), variant)


def timed(c: Candidate, compile_s: float | None, ms: float | None = 0.01, protocol: str = "") -> Measurement:
    outcome = Outcome.OUT_OF_RESOURCES if ms is None else Outcome.OK
    return Measurement(PROBLEM.id, c, outcome, ms, compile_s=compile_s, protocol=protocol)


LISTED = [candidate(32 * 2**i, warps) for i in range(5) for warps in (1, 2)]
MEASURED = {c: timed(c, 0.4) for c in LISTED[:4]}


def recorded() -> list[Table]:
    with as_file(files("forecast_autotune") / "assets" / "tables" / "h200.jsonl.gz") as path:
        tables = list(read_tables(path))
    return [t for t in tables if sum(m.compile_s or 0.0 for m in t.measurements) > 10.0]


def test_recorded_compilations_are_forecast_from_the_nine_fastest_configs() -> None:
    errors = []
    for table in recorded():
        ran = sorted((m for m in table.by_candidate().values() if m.ok), key=lambda m: m.ms)
        seconds = {m.candidate: m.compile_s or 0.0 for m in ran}
        forecast = forecast_compile_seconds(
            list(seconds), {m.candidate: seconds[m.candidate] for m in ran[:9]}
        )
        naive = len(ran) * sum(m.compile_s or 0.0 for m in ran[:9]) / 9
        if forecast is not None:
            true = sum(seconds.values())
            errors.append((abs(math.log2(forecast.sum() / true)), abs(math.log2(naive / true))))
    ours, of_means = (sum(column) / len(errors) for column in zip(*errors, strict=True))
    assert len(errors) >= 15
    assert ours < 0.45 < of_means


def test_triton_compiles_and_times_one_after_the_other() -> None:
    predicted = seconds_of(MEASURED, triton="3.9.0")
    assert predicted == pytest.approx(10 * 0.4 * HOST_COMPILE_RATIO + 10 * HOST_TIMING_S, rel=0.1)
    assert seconds_of(MEASURED, triton="3.8.1") == pytest.approx(predicted + STUB_S)


def seconds_of(measured: dict[Candidate, Measurement], **options: Any) -> float:
    predicted = triton_autotune_seconds(LISTED, measured, **options)
    assert predicted is not None
    return predicted


@pytest.mark.parametrize(
    ("ms", "timing_s"), [(0.01, 7 * 0.01 / 1000), (50.0, 0.35)], ids=["short", "long kernels take longer"]
)
def test_with_binaries_at_hand_triton_only_times(ms: float, timing_s: float) -> None:
    ready = {c: timed(c, 0.0, ms) for c in LISTED[:4]}
    assert seconds_of(ready) == pytest.approx(10 * (HOST_TIMING_S + timing_s), rel=1e-6)


def test_nothing_is_predicted_without_three_compilations_or_for_far_larger_tiles() -> None:
    assert triton_autotune_seconds(LISTED, dict(list(MEASURED.items())[:2])) is None
    far = [*LISTED[:4], *(candidate(2**20, 1) for _ in range(1)), candidate(2**19, 1)]
    assert triton_autotune_seconds(far, MEASURED) is None


def saved(listed: list[Candidate] = LISTED, problem: Problem = PROBLEM, **options: Any) -> float:
    return seconds_saved(problem, listed, options.pop("measured", MEASURED), **{"wall_s": 0.0, **options})


def test_neither_other_sources_nor_what_was_known_before_is_charged_to_triton() -> None:
    other = [candidate(c.config.kwargs[0][1], variant="v") for c in LISTED]  # type: ignore[arg-type]
    assert saved([*LISTED, *other]) == saved()
    known = LISTED[4:7]
    fewer = saved(known=[*known, *MEASURED])
    assert fewer == pytest.approx(saved([c for c in LISTED if c not in known]))


def test_nothing_is_claimed_of_other_languages_and_of_a_users_benchmark() -> None:
    assert saved(problem=replace(PROBLEM, kernel=Kernel("k", "helion"))) == 0.0
    assert saved(measured={c: timed(c, 0.4, protocol="user-do-bench") for c in LISTED[:4]}) == 0.0
