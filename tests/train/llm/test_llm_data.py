"""Examples from tables: what they ask, what they must not give away, how they are split and kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.llm.bins import BINS
from forecast_autotune.records import Outcome
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.llm.data.build import (
    build_examples,
    cross_fit,
    cross_fit_sides,
)
from forecast_train.llm.data.examples import (
    Example,
    dataset_card,
    dataset_summary,
    read_examples,
    write_examples,
)
from forecast_train.splits import SplitError, family_of, kernel_identities, split_sides
from forecast_train.surrogate.fit import FitError

TABLES = load(shipped_tables())
FEW = [t for t in TABLES if family_of(t.problem) in ("softmax", "gemv")]


@pytest.fixture(scope="module")
def made() -> list[Example]:
    return build_examples(FEW, seed=3)


def test_labels_are_the_measured_times_over_the_references(made: list[Example]) -> None:
    by_id = {t.problem.id: {str(c.config): m for c, m in t.by_candidate().items()} for t in FEW}
    for e in made:
        rows = by_id[e.origin.problem]
        levels = set()
        for a in e.candidates:
            m = rows[a.config]
            assert a.outcome == str(m.outcome)
            assert math.isnan(a.log2_ratio) == (not m.ok)
            if m.ok:
                levels.add(round(math.log2(m.ms) - a.log2_ratio, 9))
        # One reference for all candidates; measured ones are stated as they were.
        assert len(levels) == 1
        if e.measured:
            assert levels.pop() == pytest.approx(e.reference_log2_ms)


def test_what_the_prompt_tells_is_not_asked(made: list[Example]) -> None:
    shown = [e for e in made if e.known]
    assert shown
    for e in shown:
        lines = e.prefix[e.prefix.index("Reference:") :].splitlines()
        own = {line.rpartition(": ")[0] for line in lines if " at " not in line}
        assert not own & {a.config for a in e.candidates}


def test_infrastructure_failures_are_no_labels() -> None:
    table = FEW[0]
    broken = [replace(m, outcome=Outcome.INFRASTRUCTURE, median_ms=None, p20_ms=None, p80_ms=None)
              for m in table.measurements[:5]]  # fmt: skip
    result = build_examples([Table(table.problem, [*broken, *table.measurements[5:]])])
    lost = {str(m.candidate.config) for m in broken} - {
        str(m.candidate.config) for m in table.measurements[5:]
    }
    assert lost
    assert all(a.outcome != "infrastructure" and a.config not in lost for e in result for a in e.candidates)


def test_examples_survive_a_file(made: list[Example], tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    assert write_examples(path, made) == sum(len(e.candidates) for e in made)
    assert str(read_examples(path)) == str(made)  # as text, since NaN differs from itself
    assert [p.name for p in tmp_path.iterdir()] == ["train.parquet"]


@pytest.mark.parametrize("content", [b"", b"PAR1 nonsense", b"{}\n"])
def test_what_is_no_data_set_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(RecordError, match="train data"):
        read_examples(path)
    with pytest.raises(RecordError, match="train data"):
        read_examples(tmp_path / "missing.parquet")


def test_sides_are_apart_and_complete() -> None:
    sides = split_sides(TABLES, seed=1)
    assert list(sides) == ["train", "validation", "test"]
    assert sorted(t.problem.id for s in sides.values() for t in s) == sorted(t.problem.id for t in TABLES)
    groups = [{family_of(t.problem) for t in s} for s in sides.values()]
    assert not groups[0] & groups[1] | groups[0] & groups[2] | groups[1] & groups[2]


def test_named_families_are_the_test_side() -> None:
    sides = split_sides(TABLES, hold_out=["softmax", "scan"])
    assert {family_of(t.problem) for t in sides["test"]} == {"softmax", "scan"}
    with pytest.raises(SplitError, match="no family is named"):
        split_sides(TABLES, hold_out=["soft"])


def test_a_copy_of_another_name_cannot_stand_on_the_other_side() -> None:
    table = next(t for t in TABLES if family_of(t.problem) == "softmax")
    kernel = replace(table.problem.kernel, name="copied", source_sha256="copied")
    extra = {**table.problem.extra, "family": "another", "label": "copied/1"}
    copy = Table(replace(table.problem, id="copied", kernel=kernel, extra=extra), table.measurements)
    sides = split_sides([*TABLES, copy], hold_out=["another"])
    sources = {t.problem.kernel.source for t in sides["train"]}
    assert table.problem.kernel.source not in sources


def test_the_card_counts_what_is_there(made: list[Example]) -> None:
    sides = {"train": made[:-2], "test": made[-2:]}
    counted = dataset_summary(sides)
    assert counted["train"]["rows"] == sum(len(e.candidates) for e in made[:-2])
    assert sum(counted["test"]["labels"].values()) == counted["test"]["rows"]
    text = dataset_card(sides, {"seed": 3})
    assert "path: train.parquet" in text
    assert all(f"| {label.token} | {label.meaning} |" in text for label in BINS.labels)
    assert '"seed": 3' in text


class Learned(AnalyticSurrogate):
    """Remembers what it was taught."""

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        self.taught = list(tables)


def test_no_surrogate_has_seen_the_family_or_the_kernel_it_is_asked_about() -> None:
    believe = cross_fit(TABLES, learn=Learned, parts=3)
    for table in TABLES:
        surrogate = believe(table)
        assert isinstance(surrogate, Learned)
        assert surrogate.taught
        for other in surrogate.taught:
            assert family_of(other.problem) != family_of(table.problem)
            assert not kernel_identities(other.problem) & kernel_identities(table.problem)


def test_a_missing_package_is_told() -> None:
    def missing(tables: Sequence[Table]) -> AnalyticSurrogate:
        raise FitError("fitting needs LightGBM") from ImportError("lightgbm")

    with pytest.raises(FitError, match="LightGBM"):
        cross_fit(TABLES, learn=missing)


def test_other_sides_are_believed_by_what_the_training_side_taught() -> None:
    half = len(TABLES) // 2
    sides = {"train": TABLES[:half], "test": TABLES[half:]}
    result = cross_fit_sides(sides, learn=Learned)
    surrogate = result["test"](TABLES[-1])
    assert isinstance(surrogate, Learned)
    assert surrogate.taught == sides["train"]
    train = result["train"](TABLES[0])
    assert not isinstance(train, Learned) or TABLES[0] not in train.taught
