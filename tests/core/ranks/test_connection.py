"""One thread does everything with a job's store; nobody waits for it beyond the deadline."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from forecast_autotune.ranks.job import JobStoreLostError, StoreConnection
from tests.core.ranks.small_jobs import MemoryKeyValueStore


class Watched(MemoryKeyValueStore):
    """Remembers who called, says when a key was written often enough, and can hang or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.beats, self.enough = 0, threading.Event()
        self.answering = threading.Event()
        self.answering.set()
        self.error: Exception | None = None

    def get(self, key: str) -> str | None:
        self.threads.add(threading.get_ident())
        self.answering.wait()
        if self.error is not None:
            raise self.error
        return super().get(key)

    def set(self, key: str, value: str) -> None:
        self.threads.add(threading.get_ident())
        if key == "beat":
            self.beats += 1
            if self.beats >= 3:
                self.enough.set()
        super().set(key, value)


def connect(store: Any, timeout_s: float = 60.0) -> StoreConnection:
    return StoreConnection(lambda: store, timeout_s=timeout_s, beat_s=0.01)


def test_calls_are_carried_out_in_one_other_thread() -> None:
    store = Watched()
    connection = connect(store)
    assert connection.get("a") is None
    connection.set("a", "1")
    assert connection.compare_set("a", "", "2") == "1"
    assert connection.compare_set("a", "1", "2") == "2"
    assert connection.compare_set("b", "", "3") == "3"
    assert connection.get("a") == "2"
    assert len(store.threads) == 1
    assert threading.get_ident() not in store.threads


def test_a_process_beats_while_it_is_busy_elsewhere_and_stops_at_the_end() -> None:
    store = Watched()
    connection = connect(store)
    with connection.beating("beat"):
        assert store.enough.wait(60), "while this thread does something else"
    connection.get("a")  # whatever was under way is done
    count = store.beats
    connection.get("a")
    assert store.beats == count
    assert store.get("beat") == str(count), "another value each time"


def test_a_store_that_does_not_answer_ends_the_connection() -> None:
    store = Watched()
    connection = connect(store, timeout_s=0.05)
    store.answering.clear()
    with pytest.raises(JobStoreLostError, match=r"within 0\.05 s"):
        connection.get("a")
    with pytest.raises(JobStoreLostError, match=r"within 0\.05 s"):
        connection.set("a", "1")
    store.answering.set()
    with connection.beating("beat"), pytest.raises(JobStoreLostError):
        connection.get("a")


def test_an_error_of_the_store_ends_the_connection_and_is_told_in_one_line() -> None:
    store = Watched()
    store.error = RuntimeError("Broken pipe\nframe #0: deep inside")
    connection = connect(store)
    with pytest.raises(JobStoreLostError) as text:
        connection.get("a")
    assert str(text.value) == "the job's store failed: RuntimeError: Broken pipe"
    store.error = None
    with pytest.raises(JobStoreLostError):
        connection.get("a")


def test_a_store_that_cannot_be_opened_is_lost() -> None:
    def refused() -> MemoryKeyValueStore:
        raise OSError("connection refused")

    connection = StoreConnection(refused, timeout_s=60.0, beat_s=0.01)
    with pytest.raises(JobStoreLostError, match="refused"):
        connection.get("a")


def test_a_forked_process_does_not_wait_for_a_thread_that_it_has_not() -> None:
    connection = connect(Watched())
    connection.get("a")
    pid = os.fork()
    if not pid:
        code = 1
        try:
            connection.get("a")
        except JobStoreLostError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert connection.get("a") is None, "the parent's goes on"
