"""A store that machines share: what one measured the others use; whatever goes wrong costs one warning."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.fleet.servers import (
    MISBEHAVIOUR,
    free_port,
    misbehaving_server,
    redis_server,
    wait_for_port,
)
from forecast_autotune.commands import main
from forecast_autotune.errors import StoreError
from forecast_autotune.store import Store
from forecast_autotune.store.files import StoreNotes, kernel_of
from forecast_autotune.store.merging import StoreFolder, merge
from forecast_autotune.store.remote import client as client_module
from forecast_autotune.store.remote.backends import entry_of, open_backend, remote_rows
from forecast_autotune.store.remote.client import RemoteClient
from forecast_autotune.store.rows import Row
from tests.core.store.bundled import PROBLEMS, filled
from tests.core.store.stored import decided, measured, problem, row_digests
from tests.waiting import wait_until

needs_redis = pytest.mark.skipif(not shutil.which("redis-server"), reason="redis-server is not installed")
P = problem()
ENTRY = entry_of(kernel_of(P), P.id)


def line(record: Any) -> bytes:
    row = Row.of(record.to_json())
    assert row is not None
    return row.line


LINES = [line(P), line(measured(P, 16, 0.5)), line(measured(P, 32)), line(decided(P))]


@contextlib.contextmanager
def connected(address: str, *, wait_s: float = 30.0, **options: Any) -> Iterator[RemoteClient]:
    """A client and its worker, both gone at the end; what it warns of is in `notes.texts`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        remote_client = RemoteClient(address, StoreNotes(), wait_s, **options)
        try:
            yield remote_client
        finally:
            remote_client.close(30.0)
            remote_client._end_worker(kill=True)


@contextlib.contextmanager
def machine(folder: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The default store of a machine of its own."""
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(folder))
    monkeypatch.setenv("FORECAST_AUTOTUNE_REMOTE", address)
    monkeypatch.setenv("FORECAST_AUTOTUNE_REMOTE_WAIT", "30")
    store = Store.default()
    remote = store.layers.remote
    assert remote is not None
    try:
        yield store
    finally:
        remote.close(30.0)
        remote._end_worker(kill=True)


def written(store: Store) -> None:
    assert store.layers.remote is not None
    assert store.layers.remote.flush(60.0)


@pytest.mark.parametrize("kind", [pytest.param("redis", marks=needs_redis), "file"])
def test_what_one_machine_measured_another_decides_by(
    kind: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        address = f"file://{tmp_path}/shared"
        if kind == "redis":
            address = stack.enter_context(redis_server(tmp_path))
        first = stack.enter_context(machine(tmp_path / "1", address, monkeypatch))
        second = stack.enter_context(machine(tmp_path / "2", address, monkeypatch))
        assert second.decision(problem(2048)) is None
        for m in (measured(P, 16, 0.5, "2026-01-01"), measured(P, 32, 1.0, "2026-01-02")):
            first.add(P, m)
        first.put_decision(P, decided(P))
        written(first)
        assert second.decision(P) == decided(P)
        assert second.measurements(P) == first.measurements(P)
        assert first.issued_warnings == second.issued_warnings == []
        assert Store(tmp_path / "2").decision(P) == decided(P), "it needs the remote store no more"
        assert row_digests(remote_rows(address)) == row_digests(StoreFolder(tmp_path / "2"))


@pytest.mark.slow
def test_a_local_s3_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    from moto.server import ThreadedMotoServer

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "not-a-real-one")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    port = free_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    try:
        wait_for_port(port)
        import s3fs

        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("kernels")
        shared = remote_rows("s3://kernels/team")
        source = filled(tmp_path / "a")
        assert merge([source], shared).added == 4 * len(PROBLEMS) + len(PROBLEMS)
        assert merge([source], shared).added == 0
        into = StoreFolder(tmp_path / "b")
        merge([shared], into)
        assert row_digests(into) == row_digests(source) == row_digests(shared)
        with connected("s3://kernels/team") as remote:
            assert len(remote.ask(ENTRY, P.id) or ()) == 4
        with pytest.raises(StoreError, match="s3://elsewhere/x: "):
            merge([source], remote_rows("s3://elsewhere/x"))
    finally:
        server.stop()


def test_every_misbehaviour_costs_one_warning_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at a time, as each takes the seconds that a client's time-outs have."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "hidden-from-logs")
    monkeypatch.setenv("REDISCLI_AUTH", "hidden-from-logs")
    with contextlib.ExitStack() as stack:
        clients = {}
        for name, behave in MISBEHAVIOUR.items():
            port = stack.enter_context(misbehaving_server(behave))
            clients[name] = stack.enter_context(connected(f"redis://127.0.0.1:{port}/0", wait_s=0.0))
        clients["nobody there"] = stack.enter_context(
            connected(f"redis://127.0.0.1:{free_port()}/0", wait_s=0.0)
        )
        clients["no such client"] = stack.enter_context(connected("nosuch://bucket/x", wait_s=0.0))
        clients["no folder"] = stack.enter_context(connected("file:///dev/null/x", wait_s=0.0))
        for remote in clients.values():
            assert remote.ask(ENTRY, P.id) is None
            remote.offer(ENTRY, P.id, LINES)
        for name, remote in clients.items():
            wait_until(lambda remote=remote: remote.counts.failures, name)
            assert remote.ask(ENTRY, P.id) is None
            assert remote.counts.sent == 0, name
            assert len(remote._notes.texts) == 1, name
            assert remote._notes.texts[0].startswith(
                f"the remote store {remote.address} is not used for a while: "
            )
            assert "hidden-from-logs" not in remote._notes.texts[0]


def test_an_s3_server_that_redirects_or_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "hidden-from-logs")
    with contextlib.ExitStack() as stack:
        clients = {}
        for name in ("redirects", "nonsense"):
            port = stack.enter_context(misbehaving_server(MISBEHAVIOUR[name]))
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
            clients[name] = stack.enter_context(connected("s3://kernels/team", wait_s=0.0))
            clients[name].ask(ENTRY, P.id)
            wait_until(lambda c=clients[name]: c._worker is not None or c.counts.failures, "started")
        for name, remote in clients.items():
            wait_until(lambda remote=remote: remote.counts.failures, name)
            assert len(remote._notes.texts) == 1
            assert "hidden-from-logs" not in remote._notes.texts[0]


@needs_redis
def test_a_remote_store_that_lies_is_not_believed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = problem(4096)
    lies = [
        [line(measured(other, 16))],
        [b'{"type":"measurement","outcome":"ok","median_ms":-1}\n'],
        [b"[" * 10_000],
        [LINES[1], b'{"type":"variant"}\n'],
    ]
    with redis_server(tmp_path) as address:
        for number, lines in enumerate(lies):
            backend = open_backend(address)
            backend._client.flushall()  # type: ignore[attr-defined]
            backend.add(ENTRY, {hashlib.sha256(text).hexdigest(): text for text in lines})
            with machine(tmp_path / f"m{number}", address, monkeypatch) as store, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert store.decision(P) is None
                assert store.measurements(P) == []
                assert len(store.issued_warnings) == 1
            with contextlib.suppress(StoreError):
                assert len(remote_rows(address).rows(ENTRY[:2])) == 0


# --- the client by itself, over workers that behave as asked ---

WORKER = """
import json, os, sys, time
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
while True:
    request = json.loads(connection.recv_bytes())
    {body}
    connection.send_bytes(json.dumps({{"id": request["id"], "lines": [], **answer}}).encode())
"""


def worker(body: str) -> tuple[str, ...]:
    return sys.executable, "-c", WORKER.format(body=body)


@pytest.mark.parametrize(
    "body",
    [
        "os.write(connection.fileno(), b'garbage that is no message'); answer = {}",
        "connection.send_bytes(b'no JSON'); answer = {}",
        "answer = {'id': -1}",
        "answer = {'lines': 'x'} if request['do'] == 'get' else {}",
        "sys.exit(3)",
        "answer = {'error': 'x' * 5000}",
    ],
)
def test_a_worker_that_fails_is_ended_and_asked_again_later(body: str) -> None:
    with connected("redis://x:1/0", command=worker(body), pause_s=0.01) as remote:
        assert remote.ask(ENTRY, P.id) is None
        assert remote.counts.failures >= 1
        assert len(remote._notes.texts) == 1
        assert len(remote._notes.texts[0]) < 400
        before = remote.counts.failures
        time.sleep(0.05)
        wait_until(lambda: remote.ask(ENTRY, P.id) is None and remote.counts.failures > before, "asked again")
        assert len(remote._notes.texts) == 1


def test_a_process_that_cannot_be_started_is_one_warning() -> None:
    with connected("redis://x:1/0", command=("/nonexistent",)) as remote:
        assert remote.ask(ENTRY, P.id) is None
        assert "no process can be started" in remote._notes.texts[0]
        store = Store(None)
        assert not store.is_doubtful(P), "nothing is where nothing was to be asked"
        store.layers.remote = remote
        assert store.decision(P) is None
        assert store.is_doubtful(P), "a miss that frozen mode does not raise for"


def test_an_answer_that_there_is_nothing_is_believed() -> None:
    with connected("redis://x:1/0", command=worker("answer = {'lines': []}")) as remote:
        store = Store(None)
        store.layers.remote = remote
        assert store.decision(P) is None
        assert not store.is_doubtful(P)


def test_a_late_answer_is_kept_and_others_do_not_wait_meanwhile() -> None:
    body = (
        "time.sleep(0.0 if request['do'] == 'ready' else 0.3); answer = {'lines': [request.get('problem')]}"
    )
    with connected("redis://x:1/0", wait_s=0.0, command=worker(body)) as remote:
        assert remote.ask(ENTRY, "late") is None
        assert not remote._prompt
        remote.wait_s = 1000.0
        assert remote.ask(ENTRY, "other") is None, "it would wait for ever if it waited"
        wait_until(lambda: remote._answers, "the answer")
        assert remote.ask(ENTRY, "late") == [b"late"]
        wait_until(lambda: remote._prompt, "a quick answer, by what is quick now")


def test_the_queue_is_bounded_and_drops_what_is_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "QUEUE_BYTES", 4 * len(LINES[1]))
    with connected("redis://x:1/0", command=("/nonexistent",), pause_s=1000.0) as remote:
        for _ in range(10):
            remote.offer(ENTRY, P.id, [LINES[1]])
        assert (remote._queue.size, remote.counts.dropped) == (4 * len(LINES[1]), 6)


def test_rows_go_out_in_batches_and_the_rest_when_the_program_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = (
        "count = sum(len(lines) for _, lines in request.get('rows', [])); "
        f"open({str(log)!r}, 'a').write(request['do'] + str(count) + ' '); answer = {{}}"
    )
    with connected("redis://x:1/0", command=worker(body)) as remote:
        for _ in range(5):
            remote.offer(ENTRY, P.id, LINES)
        assert remote.flush(30.0)
        assert log.read_text().split()[0] == "ready0"
        sent = [int(word.removeprefix("put")) for word in log.read_text().split()[1:]]
        assert sum(sent) == remote.counts.sent == 20
        assert len(sent) <= 3
        remote.offer(ENTRY, P.id, LINES)
        remote.close(30.0)
        wait_until(lambda: log.read_text().endswith("put4 "), "written after the end")
        remote.offer(ENTRY, P.id, LINES)
        assert remote.counts.dropped == 4, "nobody would write it"


def test_a_forked_child_has_a_worker_of_its_own() -> None:
    with connected("redis://x:1/0", command=worker("answer = {'lines': [str(os.getppid())]}")) as remote:
        assert remote.ask(ENTRY, "x") == [str(os.getpid()).encode()]
        child = os.fork()
        if child == 0:
            ok = remote._worker is None and remote.ask(ENTRY, "x") == [str(os.getpid()).encode()]
            remote._end_worker(kill=True)
            os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert remote.ask(ENTRY, "x") == [str(os.getpid()).encode()]


def test_the_store_is_open_to_others_while_one_waits_for_a_remote_store(tmp_path: Path) -> None:
    go = tmp_path / "go"
    wait = f"while request['do'] == 'get' and not os.path.exists({str(go)!r}): time.sleep(0.01)"
    lines = [text.decode() for text in LINES]
    body = f"{wait}\n    answer = {{'lines': {lines!r} if request['do'] == 'get' else []}}"
    store, other = Store(tmp_path / "own"), problem(4096)
    with connected("redis://x:1/0", wait_s=20.0, command=worker(body)) as remote:
        store.layers.remote = remote
        with ThreadPoolExecutor(1) as pool:
            request = pool.submit(store.decision, P)
            wait_until(lambda: remote.counts.asked == 1, "the question")
            store.add(other, measured(other, 16))
            assert len(store.measurements(other)) == 1
            go.touch()
            assert request.result(60.0) == decided(P), "the answer came in time: nothing waited for it"
        store.layers.remote = None


# --- commands ---


def test_stores_are_merged_with_a_remote_store_by_command(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, address = filled(tmp_path / "a"), f"file://{tmp_path}/shared"
    assert main(["store", "merge", str(source.root), "--into", address, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["added"] == 20
    assert main(["store", "merge", address]) == 0
    assert row_digests(StoreFolder(root)) == row_digests(source)
    assert main(["store", "diff", str(source.root), address]) == 0
    assert "the two hold the same" in capfd.readouterr().out
    assert main(["store", "check", address]) == 0
    assert "20 rows (4 problems, 12 measurements, 4 decisions), 0 faults" in capfd.readouterr().out
    assert main(["store", "merge", "redis://user:secret@host/0"]) == 2
    assert "secret" not in capfd.readouterr().err


def test_a_remote_source_has_to_be_there(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    filled(root)
    for address in (f"file://{tmp_path}/missing", f"http://127.0.0.1:{free_port()}/x"):
        for words in (("merge",), ("diff",)):
            assert main(["store", *words, address]) == 1
            assert f"nothing at {address}" in capfd.readouterr().err
    assert main(["store", "merge", str(root), "--into", f"file://{tmp_path}/missing"]) == 0


def test_an_address_without_a_client_says_what_is_missing(
    root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(root)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for address, message in (
        ("foo://x", "foo:// is no address of a remote store"),
        ("gs://x/y", "gs:// needs gcsfs, not installed here: pip install gcsfs"),
    ):
        assert main(["store", "merge", str(root), "--into", address]) == 1
        assert message in capfd.readouterr().err
        with monkeypatch.context() as variables:
            variables.setenv("FORECAST_AUTOTUNE_REMOTE", address)
            main(["doctor", "--json"])
        checks = json.loads(capfd.readouterr().out)["checks"]
        (row,) = [check for check in checks if check["name"] == "remote store"]
        assert (row["status"], message in row["detail"]) == ("fail", True)


def test_a_damaged_file_of_a_shared_folder_is_refused(tmp_path: Path) -> None:
    source, shared = filled(tmp_path / "a"), remote_rows(f"file://{tmp_path}/shared")
    merge([source], shared)
    file = next((tmp_path / "shared").rglob("*.jsonl"))
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(StoreError, match="other contents than were written"):
        row_digests(shared)


def test_what_is_handed_on_carries_no_ir(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(tmp_path / "1", f"file://{tmp_path}/shared", monkeypatch) as store:
        store.add(replace(P, ttir={"x": "module {}"}), measured(P, 16))
        written(store)
    assert b"module {}" not in b"".join(p.read_bytes() for p in (tmp_path / "shared").rglob("*.jsonl"))
