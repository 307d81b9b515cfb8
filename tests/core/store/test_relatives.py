"""Relatives from other device classes: what is offered, in which order, and what is not even read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forecast_autotune.records import Device
from forecast_autotune.store import Store
from tests.core.store.stored import A100, measured, problem
from tests.core.tuning.loop import TABLE, Bench, decide


def device(i: int) -> Device:
    return Device(f"GPU {i}", "cuda", "90")


def test_the_nearest_problem_of_every_other_device_follows_this_ones(store: Store) -> None:
    request, here = problem(1024), problem(65536)
    near, far = problem(1024, device=A100), problem(2048, device=A100)
    other = problem(4096, device=device(1))
    for p in (far, other, near, here):
        store.add(p, measured(p, 16))
    assert [r.problem for r in store.relatives(request)] == [here, near, other]
    # Where the nearest has not run, the next one counts.
    blank = problem(1024, device=device(2))
    store.add(blank, measured(blank, 16, None))
    assert blank not in [r.problem for r in store.relatives(request)]
    second = problem(512, device=device(2))
    store.add(second, measured(second, 16))
    assert second in [r.problem for r in store.relatives(request)]


@pytest.mark.parametrize("source", ["bb", ""])
def test_another_or_an_unknown_source_does_not_count_elsewhere(store: Store, source: str) -> None:
    request, other = (
        problem(1024, source=source),
        problem(1024, source="" if source == "" else "aa", device=A100),
    )
    store.add(other, measured(other, 16))
    assert store.relatives(request) == []


def test_what_another_process_adds_elsewhere_is_seen(tmp_path: Path) -> None:
    request, there = problem(1024), problem(1024, device=A100)
    reader, writer = Store(tmp_path), Store(tmp_path)
    assert reader.relatives(request) == []
    for block in (16, 32):
        writer.add(there, measured(there, block))
        (result,) = reader.relatives(request)
        assert result.problem == there
        assert result.measurements == tuple(writer.measurements(there))


def test_a_stored_decision_opens_no_other_devices_log(tmp_path: Path) -> None:
    """Only when something has to be decided is the rest of the store worth a look."""
    here = TABLE.problem.device.slug
    there = replace(TABLE.problem, device=A100, id="elsewhere")
    first, second = Store(tmp_path), Store(tmp_path)
    first.add(there, replace(TABLE.measurements[0], problem=there.id))
    decide(first, Bench(TABLE))
    assert {d for d, _ in first._directories} == {here, A100.slug}
    assert decide(second, Bench(TABLE)).measured == 0
    assert {d for d, _ in second._directories} == {here}
