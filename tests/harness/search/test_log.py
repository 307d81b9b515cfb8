"""The log survives kills, full disks and second writers, and is only continued with the same context."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lib.search.synthetic_landscape import CONTEXT, SEEDS, TARGET, settings
from forecast_autotune.errors import RecordError, StoreError
from forecast_autotune.records import Outcome
from forecast_harness.records import NodeResult
from forecast_harness.search.events import Event, Finished, Resumed, Started, Stopped
from forecast_harness.search.log import SearchLog, read_log
from tests.harness.search.simulated_search import SimulatedSearch

STARTED = Started(CONTEXT, TARGET, SEEDS, "2026-01-01T00:00:00+00:00")


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return SimulatedSearch(settings(12)).run(random.Random(0))[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "search" / "log.jsonl"


def test_events_come_back_as_they_went_in(path: Path, events: list[Event]) -> None:
    assert isinstance(events[0], Started)
    with SearchLog.create(path, events[0]) as log:
        for event in events[1:]:
            assert log.append(event) == event
        assert log.events == events
    assert list(read_log(path)) == events
    with SearchLog.open(path, events[0].context) as log:
        assert log.events == events


def test_a_log_cut_anywhere_holds_the_whole_lines_before(path: Path, events: list[Event]) -> None:
    assert isinstance(events[0], Started)
    with SearchLog.create(path, events[0]) as log:
        for event in events[1:8]:
            log.append(event)
    raw = path.read_bytes()
    lines = raw.splitlines(keepends=True)
    chance = random.Random(1)
    cuts = [
        len(raw) - 1,
        len(lines[0]),
        len(lines[0]) + 1,
        *chance.sample(range(len(lines[0]), len(raw)), 40),
    ]
    for cut in cuts:
        path.write_bytes(raw[:cut])
        whole = raw[:cut].count(b"\n")
        assert list(read_log(path)) == events[:whole]
        assert path.read_bytes() == raw[:cut], "a reader must not change it"
        with SearchLog.open(path, events[0].context) as log:
            assert log.events == events[:whole]
            assert path.stat().st_size == sum(map(len, lines[:whole]))
            log.append(Resumed("now"))
        assert list(read_log(path)) == [*events[:whole], Resumed("now")]


def test_a_log_cut_in_its_first_line_is_started_anew(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"type":"started","con')
    assert read_log(path) == ()
    with SearchLog.create(path, STARTED) as log:
        assert log.events == [STARTED]
    assert read_log(path) == (STARTED,)


def test_a_log_with_events_is_not_started_over(path: Path) -> None:
    SearchLog.create(path, STARTED).close()
    with pytest.raises(StoreError, match="holds 1 events of an earlier search"):
        SearchLog.create(path, STARTED)
    assert read_log(path) == (STARTED,)


def test_a_changed_context_is_refused_with_what_changed(path: Path) -> None:
    SearchLog.create(path, STARTED).close()
    other = replace(
        CONTEXT, settings=settings(61, k=3), toolchain={"table": "2", "torch": "2.9"}, device="another"
    )
    with pytest.raises(RecordError) as caught:
        SearchLog.open(path, other)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert 'device: "table" in the log, "another" now' in lines
    assert "settings.budget.measurements: 200 in the log, 61 now" in lines
    assert "settings.k: 4 in the log, 3 now" in lines
    assert 'toolchain.table: "1" in the log, "2" now' in lines
    assert 'toolchain.torch: absent in the log, "2.9" now' in lines
    assert not any(line.startswith(("harness", "settings.seed")) for line in lines)
    SearchLog.open(path, CONTEXT).close()


def test_a_second_writer_is_told_who_the_first_is(path: Path) -> None:
    with SearchLog.create(path, STARTED):
        program = (
            "import sys; from pathlib import Path\n"
            "from forecast_harness.search.log import SearchLog, read_log\n"
            "from benchmarks.lib.search.synthetic_landscape import CONTEXT\n"
            "print(len(read_log(Path(sys.argv[1])))); SearchLog.open(Path(sys.argv[1]), CONTEXT)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False
        )
        assert done.stdout == "1\n", "those who only read need no lock"
        assert f"is being written by process {os.getpid()}" in done.stderr
    SearchLog.open(path, CONTEXT).close()


def test_a_writer_that_was_killed_leaves_no_lock(path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from forecast_harness.search.log import SearchLog\n"
        "from tests.harness.search.test_log import STARTED\n"
        "log = SearchLog.create(Path(sys.argv[1]), STARTED); print('ready', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    with pytest.raises(StoreError, match=f"process {child.pid}"):
        SearchLog.open(path, CONTEXT)
    child.send_signal(signal.SIGKILL)
    child.wait()
    with SearchLog.open(path, CONTEXT) as log:
        assert log.events == [STARTED]


def test_a_full_disk_loses_nothing(path: Path) -> None:
    """A limit on the size of files stands in for a full disk: writes are cut in the same way."""
    log = SearchLog.create(path, STARTED)
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
    try:
        with pytest.raises(StoreError, match="free space or make the folder writable"):
            log.append(Stopped("a reason that is longer than ten bytes"))
        assert path.stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    log.append(Stopped("space again"))
    log.close()
    assert read_log(path) == (STARTED, Stopped("space again"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="cannot be"):
            SearchLog.create(tmp_path / "log.jsonl", STARTED)
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="name a folder that can be"):
        SearchLog.create(tmp_path / "file" / "search" / "log.jsonl", STARTED)


def test_what_json_cannot_hold_is_refused_and_leaves_no_trace(path: Path) -> None:
    with SearchLog.create(path, STARTED) as log:
        with pytest.raises(RecordError, match="JSON values only"):
            log.append(Finished("j", "n", 1, NodeResult(Outcome.OK, "s", float("nan"))))
        log.append(Resumed("x"))
    assert read_log(path) == (STARTED, Resumed("x"))


def test_damage_is_named_with_its_line(path: Path) -> None:
    with SearchLog.create(path, STARTED) as log:
        log.append(Resumed("1"))
        log.append(Resumed("2"))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"type":"resumed"}\n' + lines[2])
    with pytest.raises(RecordError, match=r"log.jsonl:2: not an event"):
        read_log(path)
    path.write_bytes(lines[1])
    with pytest.raises(RecordError, match="it is not a search's log"):
        SearchLog.open(path, CONTEXT)


def test_a_closed_log_takes_no_more(path: Path) -> None:
    log = SearchLog.create(path, STARTED)
    log.close()
    with pytest.raises(StoreError, match="is closed"):
        log.append(Resumed(""))
    with pytest.raises(StoreError, match="there is no search to continue"):
        SearchLog.open(path.with_name("other.jsonl"), CONTEXT)
