"""The store under kill -9, sixteen processes, garbage, read-only and full disks. No mocks: real processes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.records import Problem
from forecast_autotune.store import Store, StoreWarning
from tests.core.records.numbered import decision, measurement, problem

REPOSITORY = Path(__file__).parents[3]

# Wherever it is started, a child imports this checkout's tests.
PRELUDE = f"""
import json, os, sys, warnings
from pathlib import Path
sys.path.insert(0, {str(REPOSITORY)!r})
from forecast_autotune.store import Store, StoreWarning
from tests.core.records.numbered import decision, measurement, problem
"""


def python(body: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", PRELUDE + textwrap.dedent(body), *map(str, arguments)]


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_nothing_committed_is_lost_when_writers_are_killed(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.store.killed_writers", "--rounds", "10", "--out", str(out)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["rounds"] == 10
    assert result["committed"] > 10, "the writers hardly wrote: nothing was put to the test"
    assert result["torn_on_purpose"] > 0
    assert result["found"] >= result["committed"]
    for name in ("lost", "duplicated", "corrupt", "spoiled_decisions", "stuck_locks"):
        assert result[name] == 0, name


def test_sixteen_processes_measure_each_candidate_once_in_total(tmp_path: Path) -> None:
    body = """
    store, me = Store(Path(sys.argv[1])), int(sys.argv[2])
    shared, own = problem("shared"), problem("own")
    print("ready", flush=True)
    sys.stdin.readline()
    mine = 0
    while True:
        with store.tuning_lock(shared, 60.0) as held:
            assert held
            known = {m.candidate for m in store.measurements(shared)}
            missing = [n for n in range(24) if measurement(shared, n).candidate not in known]
            for number in missing[:2]:
                store.add(shared, measurement(shared, number))
                mine += 1
        if not missing:
            break
    for number in range(10):
        store.add(own, measurement(own, number, by=me))  # no lock: appends alone must be safe
    print(mine, json.dumps(store.issued_warnings))
    """
    children = [
        subprocess.Popen(python(body, tmp_path, me), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for me in range(16)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        messages = [child.communicate(timeout=300)[0].split(maxsplit=1) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0] * 16
    assert sum(int(mine) for mine, _ in messages) == 24
    assert {notes.strip() for _, notes in messages} == {"[]"}

    store, shared, own = Store(tmp_path), problem("shared"), problem("own")
    counts = Counter(m.candidate for m in store.measurements(shared))
    assert counts == {measurement(shared, n).candidate: 1 for n in range(24)}
    counts = Counter(m.candidate for m in store.measurements(own))
    assert counts == {measurement(own, n, by=b).candidate: 1 for n in range(10) for b in range(16)}
    for log in tmp_path.glob("v1/*/*/log-*.jsonl"):
        kinds = Counter(line["type"] for line in lines_of(log))
        assert kinds["problem"] == 1, "the problem line is written once per host file"
    assert store.issued_warnings == []


def test_a_killed_holder_frees_the_tuning_lock(tmp_path: Path) -> None:
    body = """
    with Store(Path(sys.argv[1])).tuning_lock(problem(), 5.0) as held:
        print(held, flush=True)
        sys.stdin.readline()
    """
    child = subprocess.Popen(python(body, tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "True\n"
        with Store(tmp_path).tuning_lock(problem(), 0.05) as held:
            assert not held
    finally:
        child.kill()
        child.communicate()
    with Store(tmp_path).tuning_lock(problem(), 5.0) as held:
        assert held


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_writes_to_the_same_store(tmp_path: Path) -> None:
    body = """
    import threading, time
    store, p = Store(Path(sys.argv[1])), problem()
    store.add(p, measurement(p, 0))
    stop = threading.Event()
    def busy():
        while not stop.is_set():
            store.measurements(p)
    thread = threading.Thread(target=busy)
    thread.start()
    for number in range(1, 21):  # forks while another thread is inside the store
        child = os.fork()
        if child == 0:
            store.add(p, measurement(p, number))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    stop.set()
    thread.join()
    print(sorted(m.median_ms for m in store.measurements(p)))
    """
    done = subprocess.run(
        python(body, tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1.0 + n for n in range(21)]


# --- disks that refuse ---


def in_memory_after_refusal(store: Store, p: Problem, cause: str = "") -> None:
    """What holds for every store that cannot write: one warning, behind its cause; everything else as usual."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert store.measurements(p) == []
        assert store.decision(p) is None
        with store.tuning_lock(p, 0.1) as held:
            assert not held
        for number in range(3):
            store.add(p, measurement(p, number))
        chosen = decision(p)
        store.put_decision(p, chosen)
        store.sync()
        assert store.measurements(p) == [measurement(p, n) for n in range(3)]
        assert store.decision(p) == chosen
        assert [t.problem.id for t in store.tables()] == [p.id]
        assert list(store.decisions()) == [(p, chosen)]
        assert store.import_tables(store.tables()) == 0
    assert [w.category for w in caught] == [StoreWarning] * (2 if cause else 1)
    assert cause in str(caught[0].message)
    assert "FORECAST_AUTOTUNE_CACHE_DIR" in str(caught[-1].message)
    assert store.issued_warnings == [str(w.message) for w in caught]


def test_a_root_below_a_regular_file_leaves_everything_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    in_memory_after_refusal(
        Store(tmp_path / "file" / "cache"), problem(), "it is a file where a folder belongs"
    )


def test_a_quota_cuts_no_line_and_loses_nothing_of_this_process(tmp_path: Path) -> None:
    body = """
    import resource
    store, p = Store(Path(sys.argv[1])), problem()
    store.add(p, measurement(p, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(1, 40):
            store.add(p, measurement(p, number))
    (log,) = Path(sys.argv[1]).glob("v1/*/*/log-*.jsonl")
    refused = {"size": log.stat().st_size, "held": len(store.measurements(p)), "text": log.read_text()}
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.add(p, measurement(p, 40))
    refused["warnings"] = [str(w.message) for w in caught]
    print(json.dumps({**refused, "after": len(store.measurements(p))}))
    """
    pytest.importorskip("resource", reason="no resource limits on this system")
    done = subprocess.run(python(body, tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    message = json.loads(done.stdout)
    assert message["held"] == 40
    assert 0 < message["size"] <= 3000
    assert message["text"].endswith("\n"), "the part of a line that fitted must be taken back"
    assert all(json.loads(line) for line in message["text"].splitlines())
    assert len(message["warnings"]) == 1
    assert os.strerror(errno.EFBIG) in message["warnings"][0]
    # Once there is room again, what was kept in memory is written as well, each line once.
    assert message["after"] == 41
    store = Store(tmp_path)
    assert store.measurements(problem()) == [measurement(problem(), n) for n in range(41)]
    assert store.issued_warnings == []
