"""Which surrogate answers which question."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forecast_autotune.records import Problem
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.default import DefaultSurrogate, default_surrogate
from forecast_autotune.surrogates.learned import LearnedSurrogate, shipped_model
from forecast_autotune.surrogates.protocol import Query, Relative
from forecast_autotune.testing import SurrogateContract, example_table, query_of
from forecast_autotune.tuning.replays.replay import load, shipped_tables


class TestDefault(SurrogateContract):
    def make(self) -> DefaultSurrogate:
        return default_surrogate()


def relative(table: Table, *, device: str = "another GPU", share: float = 1.0, size: int = 0) -> Relative:
    p = table.problem
    arguments = p.arguments
    if size:
        arguments = tuple(replace(a, value=size) if isinstance(a.value, int) else a for a in arguments)
    where = replace(p.device, name=device) if device else p.device
    other = Problem.of(p.kernel, arguments, where, key=p.key, toolchain=p.toolchain)
    rows = table.measurements[: round(share * len(table.measurements))]
    return Relative(other, tuple(replace(m, problem=other.id) for m in rows))


@pytest.fixture
def table() -> Table:
    return example_table()


def answered(query: Query) -> str:
    return "pooled" if "relatives pooled" in default_surrogate().forecast(query).reason else "single"


def test_dense_tables_of_the_same_sizes_on_other_devices_are_pooled(table: Table) -> None:
    query = replace(query_of(table), ttir={"BLOCK=16": "some IR"})
    assert answered(query) == "single"
    assert answered(replace(query, relatives=[relative(table)])) == "pooled"
    assert answered(replace(query, relatives=[relative(table, share=0.3)])) == "single"
    assert answered(replace(query, relatives=[relative(table, size=77)])) == "single"
    assert answered(replace(query, relatives=[relative(table, device="", size=77)])) == "single"


def test_only_what_may_be_pooled_is(table: Table) -> None:
    mixed = [relative(table), relative(table, device="", size=77), relative(table, share=0.3)]
    query = replace(query_of(table), relatives=mixed, ttir={"BLOCK=16": "some IR"})
    alone = replace(query, relatives=mixed[:1])
    assert "1 relatives pooled" in default_surrogate().forecast(query).reason
    assert (default_surrogate().forecast(query).mean == default_surrogate().forecast(alone).mean).all()


def test_a_model_of_ones_own_takes_the_shipped_ones_place(tmp_path: Path) -> None:
    shipped = shipped_model()
    assert shipped is not None
    path = tmp_path / "mine.npz"
    replace(shipped, weight=0.0).save(path)
    query = query_of(example_table())
    mine, theirs = default_surrogate(path), default_surrogate()
    assert mine.single.model.weight == 0.0  # type: ignore[attr-defined]
    assert list(mine.forecast(query).candidates) == list(theirs.forecast(query).candidates)


@pytest.mark.parametrize("text", [b"", b"PK\x03\x04 cut off", b"\x93NUMPY pickled?"])
def test_a_model_that_cannot_be_read_costs_a_warning_and_nothing_else(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "broken.npz"
    path.write_bytes(text)
    with pytest.warns(UserWarning, match="using the shipped model"):
        result = default_surrogate(path)
    assert result.version == default_surrogate().version


def test_the_shipped_model_is_read_when_it_is_needed() -> None:
    """Its name and version are known before; what is loaded ahead is what a forecast would load."""
    fresh = DefaultSurrogate()
    assert "single" not in vars(fresh)
    assert fresh.version == f"{fresh.single.name}-{fresh.single.version}+pooled-{fresh.pooled.version}"
    fresh.load()
    assert fresh.single.model is shipped_model()  # type: ignore[attr-defined]


def test_what_is_remembered_of_relatives_changes_no_forecast() -> None:
    (first, second, third) = [
        t for t in load(shipped_tables()) if t.problem.kernel.name == "cross_entropy_fwd"
    ]
    model = shipped_model()
    assert model is not None
    asked = DefaultSurrogate(LearnedSurrogate(model))
    half = second.measurements[: len(second.measurements) // 2]
    for others in ([second], [second], [second, third], [replace(second, measurements=half), third], [third]):
        relatives = tuple(Relative(t.problem, tuple(t.measurements)) for t in others)
        query = replace(query_of(first), relatives=relatives)
        afresh = DefaultSurrogate(LearnedSurrogate(model))
        assert np.array_equal(asked.forecast(query).mean, afresh.forecast(query).mean)
