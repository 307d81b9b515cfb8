"""Merging is the union of sets: whatever is merged, in whatever order and however often, the same comes out."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecast_autotune.errors import StoreError
from forecast_autotune.records import Measurement, Problem
from forecast_autotune.records.table import latest_labels
from forecast_autotune.store import Store, StoreWarning, merging
from forecast_autotune.store import log as log_module
from forecast_autotune.store.files import host_name
from forecast_autotune.store.merging import (
    StoreFolder,
    compact,
    differences,
    merge,
)
from forecast_autotune.store.rows import KernelRows, Row
from tests.core.store.stored import A100, decided, log_of, measured, problem, row_digests

PROBLEMS = [problem(), problem(2048), problem(kernel="softmax"), problem(device=A100)]
SECONDS = st.integers(0, 3).map(lambda n: f"2026-01-01T00:00:0{n}+00:00")


def row(data: dict[str, object]) -> Row:
    result = Row.of(data)
    assert result is not None
    return result


@st.composite
def records(draw: st.DrawFn) -> tuple[Problem, Measurement, bool]:
    """A measurement of few, of a problem that is told with more or less, and whether it decides."""
    p = draw(st.sampled_from(PROBLEMS))
    p = replace(p, ttir=draw(st.sampled_from([{}, {"BLOCK=16": "module {}"}])))
    m = measured(p, draw(st.integers(1, 4)), draw(st.sampled_from([None, 0.5, 1.0])), draw(SECONDS))
    return p, m, m.ok and draw(st.booleans())


def block_of(m: Measurement) -> int:
    return int(str(dict(m.candidate.config.kwargs)["BLOCK"]))


def rows_of(told: list[tuple[Problem, Measurement, bool]]) -> KernelRows:
    kernel_rows = KernelRows()
    for p, m, decides in told:
        kernel_rows.add(row(p.to_json()))
        kernel_rows.add(row(m.to_json()))
        if decides:
            kernel_rows.add(row(replace(decided(p, block_of(m)), at=m.at).to_json()))
    return kernel_rows


def joined(one: KernelRows, other: KernelRows) -> KernelRows:
    return KernelRows.of((*one, *other))


SETS = st.lists(records(), max_size=8).map(rows_of)


@given(SETS, SETS, SETS)
def test_the_union_of_rows_is_commutative_associative_and_idempotent(
    a: KernelRows, b: KernelRows, c: KernelRows
) -> None:
    assert joined(a, b).digests == joined(b, a).digests
    assert joined(joined(a, b), c).digests == joined(a, joined(b, c)).digests
    assert joined(a, a).digests == a.digests == joined(a, KernelRows()).digests
    assert not a.missing_from(joined(a, b))
    assert KernelRows.of((*b, *a.missing_from(b))).digests == joined(a, b).digests


def fill(root: Path, told: list[tuple[Problem, Measurement, bool]]) -> StoreFolder:
    store = Store(root)
    for p, m, decides in told:
        store.add(p, m)
        if decides:
            store.put_decision(p, replace(decided(p, block_of(m)), at=m.at))
    return StoreFolder(root)


TOLD = st.lists(records(), max_size=6)


@pytest.mark.slow
@settings(max_examples=12)
@given(TOLD, TOLD, st.randoms(use_true_random=False))
def test_stores_on_disk_merge_to_the_same_in_every_order(
    tmp_path_factory: pytest.TempPathFactory, first: object, second: object, chance: object
) -> None:
    folder = tmp_path_factory.mktemp("stores")
    try:
        a, b = fill(folder / "a", first), fill(folder / "b", second)  # type: ignore[arg-type]
        union = row_digests(a) | row_digests(b)
        targets = [StoreFolder(folder / name) for name in "cd"]
        merge([a, b], targets[0])
        merge([b, a, b], targets[1])
        steps = [(a, b), (b, a), (a, b), (targets[0], a), (b, targets[1])]
        chance.shuffle(steps)  # type: ignore[attr-defined]
        for source, into in [*steps, (a, b), (b, a)]:
            merge([source], into)
            if chance.random() < 0.3:  # type: ignore[attr-defined]
                compact(into)
        measurements = {d for d in union if any(d in a.rows(k).measurements for k in a.kernels())}
        for store in (a, b, *targets):
            compact(store)
            held = row_digests(store)
            assert measurements <= held <= union, "no row is lost, none is made up"
        assert row_digests(a) == row_digests(b) == row_digests(targets[0]) == row_digests(targets[1])
        assert not list(differences(a, b))
        assert merge([b, *targets], a).added == 0
        for p in PROBLEMS:
            one, two = Store(a.root).measurements(p), Store(b.root).measurements(p)
            assert set(one) == set(two)
            assert len(one) == len(set(one)), "once each"
    finally:
        shutil.rmtree(folder)


def test_a_merge_says_what_it_read_and_added(tmp_path: Path) -> None:
    p = problem()
    a = fill(tmp_path / "a", [(p, measured(p, 16), True), (p, measured(p, 32), False)])
    into = StoreFolder(tmp_path / "b")
    assert vars(merge([a], into)) == {"kernels": 1, "rows": 4, "added": 4}
    assert vars(merge([a], into)) == {"kernels": 1, "rows": 4, "added": 0}
    assert Store(into.root).decision(p) == Store(a.root).decision(p)
    assert latest_labels(Store(into.root).measurements(p)) == latest_labels(Store(a.root).measurements(p))


def test_differences_name_what_each_side_lacks(tmp_path: Path) -> None:
    p, other = problem(), problem(kernel="softmax")
    later = replace(decided(p, 32), at="2026-02-01")
    a = fill(tmp_path / "a", [(p, measured(p, 16), True), (p, measured(p, 64), False)])
    b = fill(tmp_path / "b", [(p, measured(p, 16), False), (other, measured(other, 16), True)])
    Store(b.root).put_decision(p, later)
    matmul, softmax = differences(a, b)
    assert (matmul.only_first, matmul.only_second, matmul.decided_otherwise) == (1, 0, (p.id,))
    assert (softmax.only_first, softmax.only_second, softmax.decided_by_second) == (0, 1, 1)
    Store(b.root).put_decision(p, replace(later, ties=(decided(p, 16).chosen,)))
    assert not next(differences(a, b)).decided_otherwise, "two winners of one class are no conflict"
    assert not next(differences(b, a)).decided_otherwise
    c = fill(
        tmp_path / "c", [(replace(p, ttir={"x": "module {}"}), measured(p, b), b == 16) for b in (16, 64)]
    )
    assert not list(differences(a, c)), "how fully a problem is described makes no difference"


def test_the_latest_decision_stays_whichever_is_merged_into_the_other(tmp_path: Path) -> None:
    p = problem()
    for name, other in (("a", "b"), ("b", "a")):
        old = fill(tmp_path / name / "old", [(p, measured(p, 16, at="2026-01-01"), True)])
        new = fill(tmp_path / name / "new", [(p, measured(p, 32, at="2026-01-02"), True)])
        merge([old], new) if other == "b" else merge([new], old)
        into = new if other == "b" else old
        assert Store(into.root).decision(p) == Store(new.root).decision(p)


def test_rows_of_strangers_and_lines_that_are_none_are_told_and_left_out(tmp_path: Path) -> None:
    p, other = problem(), problem(4096)
    a = fill(tmp_path / "a", [(p, measured(p, 16), False)])
    with log_of(a.root).open("ab") as log:
        log.write(
            row(measured(other, 16).to_json()).line + b'{"type":"measurement"}\nnonsense\n{"type":"new"}\n'
        )
    messages: list[str] = []
    source = StoreFolder(a.root, messages.append)
    assert merge([source], StoreFolder(tmp_path / "b")).added == 2
    assert [text.split(":", 1)[-1][:6] for text in messages[:2]] == ["4: mea", "5: not"]
    assert "1 rows of problems that it does not describe" in messages[-1]


def test_compaction_removes_what_no_reader_counts_and_nothing_else(tmp_path: Path) -> None:
    p = problem()
    a = fill(tmp_path / "a", [(p, measured(p, 16), True), (p, measured(p, 32), False)])
    log = log_of(a.root)
    log.write_bytes(log.read_bytes() * 3 + b'{"type":"measurement","half')
    before, reader = row_digests(a), Store(a.root)
    with pytest.warns(StoreWarning, match="torn"):
        known = reader.measurements(p)
    counts = compact(a)
    assert counts.lines == 7
    assert row_digests(a) == before
    assert not any(vars(compact(a)).values())
    assert set(reader.measurements(p)) == set(known), "who had read the log before reads it anew"
    assert len(reader.measurements(p)) == 2
    reader.add(p, measured(p, 64))
    assert len(Store(a.root).measurements(p)) == 3


def test_compaction_keeps_what_a_newer_release_wrote(tmp_path: Path) -> None:
    p = problem()
    a = fill(tmp_path / "a", [(p, measured(p, 16), False), (p, measured(p, 32), False)])
    log = log_of(a.root)
    newer = log.read_bytes().replace(b'"schema":1', b'"schema":9') + b'{"type":"novelty"}\n'
    log.write_bytes(newer)
    assert vars(compact(a)) == {"lines": 0, "decisions": 0, "parts": 0, "bytes": 0, "newer": 4}
    assert log.read_bytes() == newer
    with pytest.warns(StoreWarning, match="upgrade"):
        Store(a.root).add(p, measured(p, 64))
    log.write_bytes(log.read_bytes() * 2 + b"nonsense\n")
    before = row_digests(a)
    assert compact(a).lines == 7
    assert row_digests(a) == before
    kept = log.read_bytes().splitlines(keepends=True)
    assert kept[-4:] == newer.splitlines(keepends=True), "as they were, and each once"
    assert compact(a).lines == 0


def test_compaction_removes_files_of_killed_writers_once_they_are_old(tmp_path: Path) -> None:
    p = problem()
    a = fill(tmp_path / "a", [(p, measured(p, 16), True)])
    part = log_of(a.root).parent / "decisions" / ".x.json.host.1.2.part"
    part.write_text("half")
    assert compact(a, now=part.stat().st_mtime + 60).parts == 0
    assert compact(a, now=part.stat().st_mtime + 2 * 86400).parts == 1
    assert not part.exists()


def test_a_store_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    p = problem()
    a = fill(tmp_path / "a", [(p, measured(p, 16), False)])
    into = StoreFolder(tmp_path / "b")
    (tmp_path / "b").write_text("a file")
    with pytest.raises(StoreError, match="cannot write"):
        merge([a], into)
    with pytest.raises(StoreError, match="a file where a folder"):
        StoreFolder(tmp_path / "b")


def test_a_merge_goes_on_in_the_next_log_where_one_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem()
    a = fill(tmp_path / "a", [(p, measured(p, block), False) for block in range(1, 41)])
    texts = {kernel: a.rows(kernel) for kernel in a.kernels()}
    into = StoreFolder(tmp_path / "b")
    for module in (log_module, merging):
        monkeypatch.setattr(module, "MAX_LOG_BYTES", 4096)
    for kernel, rows in texts.items():
        assert into.add(kernel, rows) == 41
        assert into.add(kernel, rows) == 0, "all that was added is read again"
    first = next(into.root.rglob(f"log-{host_name()}.jsonl"))
    second = first.with_name(f"log-{host_name()}.2.jsonl")
    logs = sorted(first.parent.glob("log-*.jsonl"))
    assert {first, second} < set(logs)
    assert all(log.stat().st_size < 4096 for log in logs), "each is read whole"
    assert len(Store(into.root).measurements(p)) == 40

    before = row_digests(into)
    second.write_bytes(second.read_bytes() + second.read_bytes().splitlines(keepends=True)[-1])
    assert compact(into).lines == 1, "every log of this host is tidied"
    assert row_digests(into) == before
