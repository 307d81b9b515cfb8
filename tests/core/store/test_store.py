"""The measurement store: what goes in comes out, for every process, and nothing is executed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Decision, Device, Evidence, Measurement, Outcome, Problem
from forecast_autotune.records.table import latest_labels, read_tables
from forecast_autotune.store import Store, StoreWarning
from forecast_autotune.store.files import device_directory, kernel_directory, problem_file
from tests.core.store.stored import A100, H200, decided, log_of, measured, problem


def test_hosts_have_logs_of_their_own_and_are_merged_by_time(tmp_path: Path) -> None:
    p = problem()
    there = Store(tmp_path)
    there.add(p, measured(p, 16, 3.0, at="2026-01-03T00:00:00+00:00"))
    there.add(p, measured(p, 32, 1.0, at="2026-01-01T00:00:00+00:00"))
    log = log_of(tmp_path)
    log.rename(log.with_name("log-another-host.jsonl"))
    here = Store(tmp_path)
    here.add(p, measured(p, 16, 2.0, at="2026-01-02T00:00:00+00:00"))
    assert [m.ms for m in here.measurements(p)] == [1.0, 2.0, 3.0]
    assert latest_labels(here.measurements(p))[measured(p, 16).candidate].ms == 3.0
    (table,) = here.tables()
    assert len(table.measurements) == 3
    for file in log.parent.glob("log-*.jsonl"):
        assert len(read_tables(file)) == 1, "every host's log can be read alone"


def test_a_decision_under_the_wrong_problem_is_refused(store: Store) -> None:
    p, other = problem(), problem(2048)
    with pytest.raises(RecordError, match="filed under its own problem"):
        store.put_decision(p, decided(other))


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}])
def test_what_json_cannot_hold_is_refused_before_anything_is_written(store: Store, value: object) -> None:
    p = problem()
    m = Measurement(p.id, measured(p, 1).candidate, Outcome.OK, 1.0, extra={"odd": value})
    with pytest.raises(RecordError, match="only JSON values"):
        store.add(p, m)
    store.add(p, measured(p, 2))
    assert store.measurements(p) == [measured(p, 2)]


def test_threads_share_a_store(store: Store) -> None:
    p = problem()

    def work(first: int) -> None:
        for block in range(first, first + 20):
            store.add(p, measured(p, block))

    threads = [threading.Thread(target=work, args=(100 * t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    blocks = sorted(dict(m.candidate.config.kwargs)["BLOCK"] for m in store.measurements(p))
    assert blocks == [100 * t + i for t in range(8) for i in range(20)]
    assert store.issued_warnings == []


def test_a_log_cleared_and_grown_to_the_same_size_is_read_anew(tmp_path: Path) -> None:
    p = problem()
    writer, reader = Store(tmp_path), Store(tmp_path)
    writer.add(p, measured(p, 0))
    for old, new in ((1, 2), (3, 4)):
        writer.clear()
        writer.add(p, measured(p, old))
        assert reader.measurements(p) == [measured(p, old)]
        size = log_of(tmp_path).stat().st_size
        writer.clear()
        writer.add(p, measured(p, new))
        assert log_of(tmp_path).stat().st_size == size
        assert reader.measurements(p) == [measured(p, new)]


def test_a_log_that_another_process_cleared_is_read_anew(tmp_path: Path) -> None:
    p = problem()
    one, two = Store(tmp_path), Store(tmp_path)
    for block in range(3):
        one.add(p, measured(p, block))
    assert len(two.measurements(p)) == 3
    assert one.clear() == 3
    assert two.measurements(p) == []
    two.add(p, measured(p, 7))
    assert one.measurements(p) == two.measurements(p) == Store(tmp_path).measurements(p) == [measured(p, 7)]


def test_kernel_directories_are_readable_safe_and_distinct() -> None:
    names = [
        "matmul",
        "mat/mul",
        "mat mul",
        "mat-mul",
        "../../etc",
        "",
        "k" * 500,
        "k" * 501,
        "カーネル",
        "Matmul",
    ]
    results = [kernel_directory(name) for name in names]
    assert len({name.lower() for name in results}) == len(names)
    assert results[0].startswith("matmul-")
    for name in results:
        assert "/" not in name
        assert not name.startswith(".")
        assert len(name.encode()) <= 100
    assert len(device_directory("x" * 1000)) <= 120
    assert device_directory(H200.slug) == "nvidia-h200-cuda90"


def test_a_problem_id_cannot_leave_its_directory(tmp_path: Path) -> None:
    p = problem()
    evil = Problem("../../../../escaped", p.kernel, p.arguments, p.device)
    store = Store(tmp_path / "cache")
    store.put_decision(evil, Decision(evil.id, measured(p, 1).candidate, Evidence.ONLY, "r", 0, 0, 1, 0))
    with store.tuning_lock(evil, 1.0) as held:
        assert held
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert Store(tmp_path / "cache").decision(evil) == store.decision(evil) is not None
    assert list(store.tables()) == [], "a decision is no measurement"
    assert problem_file(p.id) == p.id


def test_a_decision_is_one_small_file_and_the_log_is_not_needed_for_it(tmp_path: Path) -> None:
    p = problem()
    store = Store(tmp_path)
    store.add(p, measured(p, 16))
    store.put_decision(p, decided(p))
    assert [f.name for f in log_of(tmp_path).parent.joinpath("decisions").iterdir()] == [f"{p.id}.json"]
    log_of(tmp_path).unlink()
    assert Store(tmp_path).decision(p) == decided(p)
    lost = Store(tmp_path)
    with pytest.warns(StoreWarning, match="lost its problem line"):
        assert list(lost.decisions()) == []


def test_relatives_are_ordered_by_source_then_size(store: Store) -> None:
    request = problem(1024)
    near, far, changed = problem(2048), problem(65536), problem(1024, source="bb")
    failed, elsewhere, stranger = problem(512), problem(1024, device=A100), problem(1024, kernel="softmax")
    for p in (changed, far, near, elsewhere, stranger, request):
        store.add(p, measured(p, 16))
    store.add(near, measured(near, 32, None))
    store.add(failed, measured(failed, 16, None))
    result = store.relatives(request)
    # What another device measured of the same source comes last, of another source never.
    assert [r.problem for r in result] == [near, far, changed, elsewhere]
    assert list(result[0].measurements) == [measured(near, 16), measured(near, 32, None)]
    assert [r.problem for r in store.relatives(request, limit=1)] == [near, elsewhere]
    assert store.relatives(request, limit=0) == []


def test_the_tuning_lock_is_of_one_problem_lets_errors_through_and_is_given_back(store: Store) -> None:
    p, other = problem(), problem(2048)
    with store.tuning_lock(p, 1.0), store.tuning_lock(other, 1.0) as apart:
        assert apart
    with pytest.raises(OSError, match="from the body"), store.tuning_lock(p, 1.0):
        raise OSError("from the body")
    with store.tuning_lock(p, 1.0) as held:
        assert held


def test_the_default_store_is_one_per_root_and_follows_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "a"))
    store = Store.default()
    assert store.root == tmp_path / "a"
    assert Store.default() is store
    assert Store.default(tmp_path / "a") is store
    assert Store.default(tmp_path / "b") is not store
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    root = Store.default().root
    assert root is not None
    assert root.name == "forecast-autotune"
    if sys.platform == "linux":
        assert root.is_relative_to(tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing is created before something is stored"


def test_importing_and_reading_the_store_loads_no_heavy_module(tmp_path: Path) -> None:
    p = problem()
    Store(tmp_path).put_decision(p, decided(p))
    body = """
import json, sys
from pathlib import Path
from forecast_autotune.records import Problem
from forecast_autotune.store import Store
problem = Problem.from_json(json.loads(sys.argv[2]))
assert Store(Path(sys.argv[1])).decision(problem) is not None
heavy = ("numpy", "torch", "triton", "filelock", "platformdirs", "pyarrow")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", body, str(tmp_path), json.dumps(p.to_json())], capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_sync_flushes_what_was_appended(tmp_path: Path) -> None:
    store, p = Store(tmp_path), problem()
    store.add(p, measured(p, 1))
    store.sync()
    assert store.issued_warnings == []
    store.add(p, measured(p, 2))
    log_of(tmp_path).unlink()
    with pytest.warns(StoreWarning, match="not flushed to disk"):
        store.sync()


def test_nothing_in_a_log_is_ever_executed(tmp_path: Path) -> None:
    p = problem()
    Store(tmp_path).add(p, measured(p, 16))
    trap = tmp_path / "executed"
    evil = f"__import__('pathlib').Path({str(trap)!r}).touch()"
    line = {**measured(p, 32).to_json(), "variant": evil, "config": {"kwargs": {evil: evil}}, "extra": evil}
    with log_of(tmp_path).open("a") as stream:
        stream.write(json.dumps(line) + "\n")
    store = Store(tmp_path)
    assert store.measurements(p)[-1].candidate.variant == evil
    assert list(store.tables())
    assert not trap.exists()


def test_a_file_name_too_long_for_the_system_is_no_failure(tmp_path: Path) -> None:
    p = problem(kernel="k" * 4000, device=Device("D" * 4000, "cuda", "90"))
    store = Store(tmp_path)
    store.add(p, measured(p, 1))
    assert Store(tmp_path).measurements(p) == [measured(p, 1)]
    assert store.issued_warnings == []
    assert len(list((tmp_path / "v1").iterdir())) == 1
