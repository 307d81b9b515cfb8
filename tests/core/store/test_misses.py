"""Recorded misses: each once, bounded, JSON alone; whatever is wrong with the file is nobody's trouble."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from forecast_autotune.records import Candidate, Config
from forecast_autotune.store import Store, StoreWarning, misses
from forecast_autotune.store.files import MISSES
from forecast_autotune.store.misses import Miss
from tests.core.store.stored import problem


def miss(size: int = 1024, **grids: int) -> Miss:
    listed = {Candidate(Config.of({"BLOCK": int(name[1:])})): (n,) for name, n in grids.items()}
    return Miss.of(replace(problem(size), ttir={"x": "module"}), "frozen", 4, listed, "2026-01-01")


def add_all(store: Store, *sizes: int) -> None:
    for size in sizes:
        store.add_miss(miss(size))


def test_a_miss_is_recorded_once_by_all_processes(tmp_path: Path) -> None:
    first, second = Store(tmp_path), Store(tmp_path)
    for store in (first, second, first):
        store.add_miss(miss(b64=16, b128=8))
        store.add_miss(miss(2048))
    one, two = Store(tmp_path).misses.all()
    assert one.problem.id == problem().id
    assert (one.problem.kernel.source, dict(one.problem.ttir)) == ("", {})
    assert one.grids == (({"BLOCK": 64}, (16,)), ({"BLOCK": 128}, (8,)))
    assert len((tmp_path / MISSES).read_bytes().splitlines()) == 2
    first.misses.remove([two.problem.id])
    assert second.misses.all() == [one]
    assert second.misses.add(two)


def test_what_a_newer_release_recorded_stays_when_others_are_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    add_all(store, 1024, 2048)
    file = tmp_path / MISSES
    first, second = file.read_bytes().splitlines(keepends=True)
    newer = first.replace(b'"schema":1', b'"schema":9')
    file.write_bytes(newer + second)
    with pytest.warns(StoreWarning, match="upgrade"):
        Store(tmp_path).misses.remove([miss(2048).problem.id])
    assert file.read_bytes() == newer


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "MAX_RECORDS", 3)
    store = Store(tmp_path)
    with pytest.warns(StoreWarning, match="holds 3 records"):
        add_all(store, *range(1, 8))
    assert len(Store(tmp_path).misses.all()) == 3


def test_what_is_no_miss_is_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_miss(miss())
    good = (tmp_path / MISSES).read_text()
    bad = [
        "nonsense",
        '{"type":"miss"}',
        good.replace('"grids":[]', '"grids":[[{},[0]]]').strip(),
        good.replace('"grids":[]', '"grids":[[1,[2]]]').strip(),
    ]
    assert len({*bad, good}) == 5
    (tmp_path / MISSES).write_text("\n".join([*bad, good]))
    reader = Store(tmp_path)
    with pytest.warns(StoreWarning, match="skipped a line that is no record"):
        assert reader.misses.all() == [miss()]


def test_a_file_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / MISSES).mkdir()
    store = Store(tmp_path)
    with pytest.warns(StoreWarning, match="not kept") as text:
        add_all(store, 1024, 2048)
    assert len(text) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_that_is_forked_while_a_miss_is_recorded_records_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    add_all(store, 1)
    with store.misses._mutex:  # as another thread of the parent may hold it
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # ends a child that would wait for ever
            store.add_miss(miss(2))
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(store.misses.all()) == 2
