"""What a cell notices: its process, operations, and launches without a timer."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("torch")

from forecast_harness.verify import launch_cell as inside
from forecast_harness.verify.launch_cell import note_question, process_report, remember_process


def threads_noticed(between: Callable[[], None]) -> list[str]:
    """What is reported after something happened between two questions."""
    state: dict[str, Any] = {}
    remember_process(state)
    process_report(state)
    between()
    note_question(state)
    results: list[str] = process_report(state)["threads"]
    return results


@contextmanager
def left_running(
    start: Callable[[Callable[[], None]], object], work: Callable[[threading.Event], None]
) -> Iterator[None]:
    end = threading.Event()
    start(lambda: work(end))
    try:
        yield
    finally:
        end.set()


def listed(run: Callable[[], None]) -> object:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def unlisted(run: Callable[[], None]) -> object:
    return _thread.start_new_thread(run, ())


def burn(seconds: float) -> None:
    """Wait until the process has had so many CPU seconds, all of them in other threads."""
    begin = time.process_time()
    while time.process_time() - begin < seconds:
        time.sleep(0.01)


def compute(end: threading.Event) -> None:
    while not end.is_set():
        sum(range(1000))


def wait(end: threading.Event) -> None:
    end.wait()


@pytest.mark.parametrize("start", [listed, unlisted])
def test_threads_that_compute_are_noticed(start: Callable[[Callable[[], None]], object]) -> None:
    shares = []

    def between() -> None:
        begin = time.process_time(), time.monotonic()
        burn(0.5)
        shares.append((time.process_time() - begin[0]) / (time.monotonic() - begin[1]))

    with left_running(start, compute):
        problem = threads_noticed(between)
    assert problem or shares[0] < 0.3, "others had the processor"
    assert all("CPU time" in text for text in problem)


@pytest.mark.parametrize("start", [listed, unlisted])
def test_threads_that_wait_are_not(start: Callable[[Callable[[], None]], object]) -> None:
    with left_running(start, wait):
        assert threads_noticed(lambda: time.sleep(0.3)) == []


def test_pools_of_libraries_are_not() -> None:
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(abs, range(-4, 0))) == [4, 3, 2, 1]
        assert threads_noticed(lambda: time.sleep(0.3)) == []


def test_what_is_computed_when_asked_does_not_count() -> None:
    state: dict[str, Any] = {}
    remember_process(state)
    process_report(state)
    for _ in range(3):
        note_question(state)
        begin = time.process_time()
        while time.process_time() - begin < 0.15:
            sum(range(1000))
        assert process_report(state)["threads"] == []


_WATCH = """
import sys
import torch
from forecast_harness.verify.launch_cell import watch_launch
{before}
with watch_launch("operations", None) as seen:
    {launch}
print(sorted(seen.items()), "torch._dynamo" in sys.modules)
"""


def _watched(launch: str, before: str = "") -> str:
    text = _WATCH.format(launch=launch, before=before)
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=300
    ).stdout.strip()


def test_operations_are_seen_without_importing_dynamo() -> None:
    problem = _watched("torch.zeros(5) + torch.ones(3, 1)")
    assert problem.endswith("False")
    assert "('aten::add.Tensor', 15)" in problem


def test_what_a_compiling_candidate_does_is_seen_and_the_watch_itself_is_not_compiled() -> None:
    before = """
compiled = []
def backend(graph, inputs):
    compiled.append(graph)
    return graph.forward
double = torch.compile(lambda x: x * 2, backend=backend)
double(torch.ones(7))
assert len(compiled) == 1
"""
    problem = _watched("double(torch.ones(7)); assert len(compiled) == 1", before)
    assert problem.endswith("True")
    assert "('aten::mul.Tensor', 7)" in problem


def test_a_launch_on_a_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(inside, "_synchronize", lambda: done.append("waited"))

    def launch() -> int:
        done.append("launched")
        return 7

    taken = inside._timed(launch, {"watch": "", "protocol": ""}, [], {"device": "cuda", "timer": None})
    assert done == ["launched", "waited"]
    assert (taken.result, taken.protocol) == (7, "host")
    assert 0 <= taken.seconds == taken.total_seconds
