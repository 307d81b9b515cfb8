"""Configs compile ahead in workers: in turn, urgent ones at once, and nobody waits for longer than wanted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")


from forecast_integrations.inductor.config_worker import ConfigJob
from forecast_integrations.inductor.descent import ConfigsAhead
from tests.integrations.inductor.generated_kernels import (
    Workers,
    job,
)


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_no_more_than_the_limit_compile_at_once_and_urgent_ones_do_not_wait() -> None:
    workers = Workers(at_once=False)
    ahead = ConfigsAhead(workers, 2)
    ahead.add([job(1), job(2), job(4), job(8)])
    until(lambda: workers.taken == [job(1), job(2)])
    ahead.add([job(8), job(16), job(1)], urgent=True)
    assert workers.taken[2:] == [job(8), job(16)]
    for block in (2, 1, 8):
        assert job(4) not in workers.taken
        workers.futures[job(block)].set_result(1.0)
    until(lambda: workers.taken[4:] == [job(4)])


def test_an_end_is_waited_for_no_longer_than_wanted() -> None:
    workers = Workers(at_once=False)
    ahead = ConfigsAhead(workers, 2)
    ahead.add([job(1)], urgent=True)
    assert not ahead.has_ended(job(1), time.perf_counter() + 0.01)
    assert not ahead.has_ended(job(2), time.perf_counter() + 60.0)  # nobody is at it
    assert ahead.seconds(job(1)) == 0.0
    threading.Timer(0.05, lambda: workers.futures[job(1)].set_result(7.0)).start()
    assert ahead.has_ended(job(1), time.perf_counter() + 60.0)
    assert ahead.seconds(job(1)) == 7.0


def test_a_worker_that_fails_has_ended() -> None:
    workers = Workers(at_once=False)
    ahead = ConfigsAhead(workers, 1)
    ahead.add([job(1), job(2)])
    until(lambda: workers.taken == [job(1)])
    workers.futures[job(1)].set_exception(RuntimeError("broken"))
    until(lambda: ahead.has_ended(job(1), 0.0))
    assert ahead.seconds(job(1)) == 0.0
    until(lambda: workers.taken == [job(1), job(2)])

    def refuses(given: ConfigJob, environment: Mapping[str, str]) -> Future[float]:
        raise RuntimeError("no pool")

    closed = ConfigsAhead(refuses, 1)
    closed.add([job(1), job(2)])
    closed.add([job(4)], urgent=True)
    until(lambda: closed.has_ended(job(4), 0.0))


def test_a_decided_kernel_leaves_the_queue() -> None:
    workers = Workers(at_once=False)
    ahead = ConfigsAhead(workers, 1)
    ahead.add([job(1), job(2), job(2, path="/x/other.py")])
    until(lambda: workers.taken == [job(1)])
    ahead.forget("/x/c1.py")
    workers.futures[job(1)].set_result(1.0)
    until(lambda: workers.taken == [job(1), job(2, path="/x/other.py")])


def test_who_hears_of_an_end_begins_nothing() -> None:
    """Inductor's pool tells of an end under the lock that it needs to begin something."""
    lock = threading.Lock()
    workers = Workers(at_once=False)

    def submit(given: ConfigJob, environment: Mapping[str, str]) -> Future[float]:
        with lock:
            return workers(given, environment)

    ahead = ConfigsAhead(submit, 1)
    ahead.add([job(1), job(2)])
    until(lambda: workers.taken == [job(1)])
    with lock:
        workers.futures[job(1)].set_result(1.0)
    until(lambda: workers.taken == [job(1), job(2)])
