"""Trace files are JSON at any moment, whatever happens to the program, the disk or its other processes."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.telemetry import spans
from forecast_autotune.telemetry.trace_file import TraceFile


def events(path: Path, *, ended: bool = True) -> list[dict[str, Any]]:
    """The events of a file, but for names of processes and threads."""
    text = path.read_text(encoding="utf-8")
    found: list[dict[str, Any]] = json.loads(text if ended else text + "]")
    return [event for event in found if event["ph"] != "M"]


def test_spans_nest_by_thread_and_counters_add_up(tmp_path: Path) -> None:
    place = tmp_path / "trace.json"
    file = TraceFile(place)
    outer = file.begin("decide", {"kernel": "k"})
    inner = file.begin("measure", {})
    file.count("measured", 2, {})
    file.count("measured", 3, {})
    assert [e["ph"] for e in events(place, ended=False)] == ["B", "B", "C", "C"]
    file.end(inner, {"outcome": "ok", "median_ms": float("inf")}, False)
    file.end(outer, {}, True)
    file.close()
    file.close()
    found = events(place)
    assert [(e["ph"], e.get("name")) for e in found] == [
        ("B", "decide"),
        ("B", "measure"),
        ("C", "measured"),
        ("C", "measured"),
        ("E", None),
        ("E", None),
    ]
    assert found[0]["args"] == {"kernel": "k"}
    assert found[3]["args"] == {"measured": 5}
    assert found[4]["args"] == {"outcome": "ok", "median_ms": "inf"}
    assert found[5]["args"] == {"failed": True}
    assert {(e["pid"], e["cat"]) for e in found} == {(os.getpid(), "forecast_autotune")}
    assert [e["ts"] for e in found] == sorted(e["ts"] for e in found)


def test_a_rank_says_which_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Path(sys.argv[0]).name
    for rank, shown in (("3", " (rank 3)"), ("", ""), ("\x1b[2J", " (rank \ufffd[2J)")):
        monkeypatch.setenv("RANK", rank)
        TraceFile(tmp_path / "trace.json").close()
        told = {
            e["name"]: e["args"] for e in json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
        }
        assert told["process_name"]["name"] == f"{program}{shown}"
        assert ("process_sort_index" in told) == (rank == "3")


def test_compilations_that_overlap_have_rows_of_their_own(tmp_path: Path) -> None:
    place = tmp_path / "trace.json"
    file = TraceFile(place)
    for begin, end in ((1.0, 3.0), (2.0, 4.0), (3.0, 5.0), (4.5, 6.0)):
        file.record("compile", "compile", begin, end, {})
    file.close()
    rows: dict[int, list[tuple[float, float]]] = {}
    for e in events(place):
        rows.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    assert sorted(rows.values()) == [[(1e6, 3e6), (3e6, 5e6)], [(2e6, 4e6), (4.5e6, 6e6)]]
    names = [e for e in json.loads(place.read_text(encoding="utf-8")) if e["name"] == "thread_name"]
    assert {e["args"]["name"] for e in names} >= {"compile 1", "compile 2"}


def test_another_process_takes_a_name_of_its_own(tmp_path: Path) -> None:
    place = tmp_path / "trace.json"
    first = TraceFile(place)
    first.begin("decide", {})
    child = os.fork()
    if child == 0:
        try:
            token = first.begin("measure", {})  # forked: what follows goes to a file of its own
            first.end(token, {}, False)
            first.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    other = TraceFile(place)  # as another program would
    assert other.path == tmp_path / f"trace-{os.getpid()}.json"
    other.close()
    first.close()
    assert [e["ph"] for e in events(place)] == ["B"]
    assert [e["pid"] for e in events(tmp_path / f"trace-{child}.json")] == [child, child]
    TraceFile(place).close()
    assert events(place) == []  # nobody writes to it any more: it begins anew


def test_what_a_killed_program_leaves_is_a_trace(tmp_path: Path) -> None:
    for turn in range(5):
        place = tmp_path / f"trace-of-{turn}.json"
        child = os.fork()
        if child == 0:
            try:
                file = TraceFile(place)
                for _ in range(1_000_000):
                    file.end(file.begin("measure", {"candidate": "x" * 100}), {"outcome": "ok"}, False)
            finally:
                os._exit(1)
        while not place.exists() or place.stat().st_size < 10_000 * turn + 1:
            os.sched_yield()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert events(place, ended=False) or turn == 0


def test_no_event_lies_on_two_pages(tmp_path: Path) -> None:
    """A kill may come between the pages of one write."""
    place = tmp_path / "trace.json"
    file = TraceFile(place)
    for n in range(200):
        file.end(file.begin("measure", {"candidate": "x" * (n % 90)}), {}, False)
    file.close()
    begin = 0
    for line in place.read_bytes().split(b"\n")[:-2]:
        text = line.rstrip(b" ,")
        assert begin // 4096 == (begin + len(text) - 1) // 4096
        begin += len(line) + 1
    assert begin > 5 * 4096
    assert len(events(place)) == 400


def test_a_full_file_says_so_and_leaves_no_span_open(tmp_path: Path) -> None:
    place = tmp_path / "trace.json"
    file = TraceFile(place, limit=3000)
    outer = file.begin("decide", {})
    for _ in range(100):
        file.end(file.begin("measure", {"candidate": "x" * 50}), {"outcome": "ok"}, False)
    file.end(outer, {}, False)
    file.close()
    phases = Counter(e["ph"] for e in events(place))
    assert phases["B"] == phases["E"] < 50
    assert phases["i"] == 1
    assert place.stat().st_size < 4000


def test_a_full_disk_costs_one_warning_and_leaves_whole_events(tmp_path: Path) -> None:
    place = tmp_path / "trace.json"
    spans.configure("off", place)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a write is done in part
        try:
            for _ in range(20):
                with spans.span("measure", candidate="x" * 100):
                    pass
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with pytest.warns(RuntimeWarning, match="TraceFile failed") as caught:
        fill()
    assert len(caught) == 1
    left = place.read_text(encoding="utf-8")
    assert 0 < len(events(place, ended=left.endswith("]\n"))) < 20


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_device_that_is_full_from_the_beginning(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="no trace is written to /dev/full"):
        spans.configure("off", Path("/dev/full"), at_once=True)
    with warnings.catch_warnings(), spans.span("decide"):
        warnings.simplefilter("error")
