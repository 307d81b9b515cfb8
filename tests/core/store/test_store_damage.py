"""Property tests of the log, and every kind of damage to it: only the damaged line is lost."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecast_autotune.records import Measurement, Problem
from forecast_autotune.store import Store, StoreWarning
from forecast_autotune.store.files import acquire_lock, encode
from tests.core.records.numbered import decision, measurement, problem
from tests.core.records.test_table import TEXT, measurements
from tests.core.store.stored import log_of


def quietly(store: Store, p: Problem) -> list[Measurement]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)
        return store.measurements(p)


@given(names=st.lists(TEXT, min_size=1, max_size=3, unique=True), data=st.data())
@settings(max_examples=25)
def test_whatever_is_added_is_read_back(names: list[str], data: st.DataObject) -> None:
    problems = [problem(name) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        added: dict[str, list[Measurement]] = {p.id: [] for p in problems}
        for p in data.draw(st.lists(st.sampled_from(problems), max_size=8)):
            m = data.draw(measurements(p.id))
            store.add(p, m)
            added[p.id].append(m)
            added[p.id].sort(key=lambda m: m.at)
        for reader in (store, Store(Path(folder))):
            for p in problems:
                result = reader.measurements(p)
                assert result == added[p.id]
                assert [m.to_json() for m in result] == [m.to_json() for m in added[p.id]]
            assert {t.problem.id: t.measurements for t in reader.tables()} == {
                k: v for k, v in added.items() if v
            }
            assert reader.issued_warnings == []


@given(junk=st.lists(st.binary(max_size=60), max_size=5), data=st.data())
@settings(max_examples=60)
def test_no_bytes_between_lines_stop_the_store(junk: list[bytes], data: st.DataObject) -> None:
    p = problem()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)
        added = []
        for number, raw in enumerate([b"", *junk]):
            Store(Path(folder)).add(p, measurement(p, number))
            added.append(measurement(p, number))
            with log_of(Path(folder)).open("ab") as stream:
                stream.write(raw + data.draw(st.sampled_from([b"", b"\n"])))
        assert Store(Path(folder)).measurements(p) == added


# --- damaged logs ---


def test_a_torn_last_line_is_skipped_reported_and_fenced_off(tmp_path: Path) -> None:
    p = problem()
    for number in range(3):
        Store(tmp_path).add(p, measurement(p, number))
    log = log_of(tmp_path)
    whole = log.read_bytes()
    log.write_bytes(whole[:-40])

    reader = Store(tmp_path)
    with pytest.warns(StoreWarning, match=r"log-.*:4: skipped a torn last line"):
        assert reader.measurements(p) == [measurement(p, 0), measurement(p, 1)]
    assert len(reader.issued_warnings) == 1
    assert reader.measurements(p) == [measurement(p, 0), measurement(p, 1)]

    reader.add(p, measurement(p, 3))  # must not be swallowed by the torn text before it
    assert len(reader.issued_warnings) == 1, "one torn line is one note"
    assert log.read_bytes().startswith(whole[:-40] + b"\n")
    fresh = Store(tmp_path)
    with pytest.warns(StoreWarning, match=r"log-.*:4: skipped a line"):
        assert fresh.measurements(p) == [measurement(p, 0), measurement(p, 1), measurement(p, 3)]


def test_a_tear_anywhere_in_a_log_loses_only_the_torn_line(tmp_path: Path) -> None:
    p = problem()
    store = Store(tmp_path)
    for number in range(2):
        store.add(p, measurement(p, number))
    log = log_of(tmp_path)
    whole = log.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 0x0A]
    for cut in sorted({*range(0, len(whole), 5), *(end - n for end in ends for n in range(4))}):
        log.write_bytes(whole[:cut])
        result = quietly(Store(tmp_path), p)
        # A line cut exactly before its newline is whole.
        complete = sum(cut >= end - 1 for end in ends[1:])
        assert result == [measurement(p, n) for n in range(complete)], cut
    for cut in range(0, len(whole), 7):
        log.write_bytes(whole[:cut])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StoreWarning)
            Store(tmp_path).add(p, measurement(p, 9))
        assert measurement(p, 9) in quietly(Store(tmp_path), p), cut


def test_a_line_cut_just_before_its_newline_is_whole_and_counts_once(tmp_path: Path) -> None:
    p = problem()
    for number in range(2):
        Store(tmp_path).add(p, measurement(p, number))
    log = log_of(tmp_path)
    log.write_bytes(log.read_bytes()[:-1])
    reader = Store(tmp_path)
    assert reader.measurements(p) == [measurement(p, 0), measurement(p, 1)]
    Store(tmp_path).add(p, measurement(p, 2))
    for store in (reader, Store(tmp_path)):
        assert store.measurements(p) == [measurement(p, n) for n in range(3)]
        assert store.issued_warnings == []


@pytest.mark.parametrize("grown", [1, 5])
def test_a_log_that_was_cut_and_grew_again_is_read_anew(tmp_path: Path, grown: int) -> None:
    p = problem()
    writer, reader = Store(tmp_path), Store(tmp_path)
    for number in range(3):
        writer.add(p, measurement(p, number))
    assert len(reader.measurements(p)) == 3
    log = log_of(tmp_path)
    with log.open("rb+") as stream:  # in place, as a writer that runs out of space takes its lines back
        stream.truncate(log.read_bytes().index(b"\n") + 1)
    for number in range(1000, 1000 + grown):
        Store(tmp_path).add(p, measurement(p, number))
    assert reader.measurements(p) == [measurement(p, n) for n in range(1000, 1000 + grown)]
    assert reader.issued_warnings == []


def test_a_write_still_under_way_is_not_called_torn(tmp_path: Path) -> None:
    p = problem()
    Store(tmp_path).add(p, measurement(p, 0))
    log, reader = log_of(tmp_path), Store(tmp_path)
    line = encode(measurement(p, 1).to_json())
    lock = acquire_lock(log.with_name(log.name + ".lock"), 5.0, 0.01)
    assert lock is not None
    with lock, log.open("ab", buffering=0) as stream:
        stream.write(line[:20])
        assert reader.measurements(p) == [measurement(p, 0)]
        stream.write(line[20:])
    assert reader.measurements(p) == [measurement(p, 0), measurement(p, 1)]
    assert reader.issued_warnings == []


GARBAGE = [
    b"not json at all",
    b"\xff\xfe\x00 no utf-8 \x80",
    b"[" * 100_000,
    b"null",
    b'{"type":"measurement"}',
    b'{"type":"measurement","schema":99,"problem":"x","config":{},"outcome":"ok","median_ms":1}',
    b'{"type":"measurement","schema":1,"problem":"x","config":{},"outcome":"ok","median_ms":1e999}',
    b'{"type":"problem","schema":1,"id":""}',
    b'{"type":"problem","schema":1,"id":"x","kernel":{"name":"k"},"device":{"name":"d"},"arguments":7}',
    b"\x00" * 512,
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda raw: raw[:24].decode("ascii", "replace"))
def test_a_garbage_line_is_skipped_and_named(tmp_path: Path, garbage: bytes) -> None:
    p = problem()
    Store(tmp_path).add(p, measurement(p, 0))
    log = log_of(tmp_path)
    with log.open("ab") as stream:
        stream.write(garbage + b"\n")
    with log.open("ab") as stream:
        stream.write(encode(measurement(p, 1).to_json()))
    store = Store(tmp_path)
    with pytest.warns(StoreWarning, match=r":3: skipped a line that is no record"):
        assert store.measurements(p) == [measurement(p, 0), measurement(p, 1)]
    assert len(store.issued_warnings) == 1


def test_much_garbage_gives_one_note(tmp_path: Path) -> None:
    p = problem()
    Store(tmp_path).add(p, measurement(p, 0))
    with log_of(tmp_path).open("ab") as stream:
        stream.write(b"garbage\n" * 1000)
    store = Store(tmp_path)
    assert quietly(store, p) == [measurement(p, 0)]
    (message,) = store.issued_warnings
    assert "skipped 1000 lines" in message
    assert message.count("JSONDecodeError") == 3


def test_lines_of_a_newer_release_are_passed_over_in_silence(tmp_path: Path) -> None:
    p = problem()
    Store(tmp_path).add(p, measurement(p, 0))
    with log_of(tmp_path).open("ab") as stream:
        stream.write(b'{"type":"weather","schema":7,"rain":true}\n\n')
    store = Store(tmp_path)
    assert store.measurements(p) == [measurement(p, 0)]
    assert store.issued_warnings == []


DECISION = decision(problem()).to_json()
WRONG: list[dict[str, object]] = [
    {"type": "measurement"},
    {"evidence": "guessed"},
    {"config": None},
    {"config": {"kwargs": 3}},
    {"config": {"num_warps": []}},
    {"cost": {"no_such_cost": 1}},
    {"rounds": 3},
]


@pytest.mark.parametrize(
    "damage",
    [
        *(json.dumps({**DECISION, **change}).encode() for change in WRONG),
        *(b"", b"{", b"[]", b'{"type":"decision","schema":1}', b"\xff"),
    ],
)
def test_a_damaged_decision_is_noted_and_counts_as_none(tmp_path: Path, damage: bytes) -> None:
    p = problem()
    chosen = decision(p)
    Store(tmp_path).put_decision(p, chosen)
    (path,) = tmp_path.glob("v1/*/*/decisions/*.json")
    path.write_bytes(damage)
    store = Store(tmp_path)
    with pytest.warns(StoreWarning, match="ignored, not a decision"):
        assert store.decision(p) is None
    store.put_decision(p, chosen)
    assert store.decision(p) == chosen
