"""Side by side, everything is compiled, in Triton's own way and in ours, and what fails stops nothing else."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from forecast_harness.trials.variants.compilation import compile_ahead
from forecast_harness.trials.variants.compilation.compile_ahead import (
    call_without_values,
    compile_calls,
    compile_most,
    compile_side_by_side,
    numbers_of_late,
)
from forecast_harness.trials.variants.launch_file import VARIANT_FILE, launcher_files
from forecast_harness.verify.launches.process_watch import (
    note_answer,
    note_question,
    process_report,
    remember_process,
)
from forecast_harness.verify.problems.problem import LaunchCase
from tests.harness.variant_kernels import DOUBLE


def test_threads_of_our_own_work_at_once_and_a_failure_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    both = threading.Barrier(2, timeout=60)
    done: list[int] = []

    def failing() -> None:
        both.wait()
        raise ValueError("does not compile")

    def working() -> None:
        both.wait()
        done.append(1)

    compile_side_by_side([failing, working], own_threads=True)
    assert done == [1]


def test_in_tritons_mode_all_are_asked_for_and_a_failure_ends_nothing() -> None:
    done: list[int] = []

    def failing() -> None:
        raise ValueError("does not compile")

    compile_side_by_side([failing, lambda: done.append(1)])
    assert done == [1]


class Compiled:
    """What Triton gives of a compiled kernel."""

    def __init__(self, **signature: str) -> None:
        self.src = SimpleNamespace(signature=signature)
        self.metadata = SimpleNamespace(num_ctas=1)


def test_a_launcher_is_made_once_for_each_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.driver import driver

    made: list[dict[str, str]] = []

    def launcher(source: SimpleNamespace, metadata: SimpleNamespace) -> None:
        made.append(source.signature)
        raise OSError("there is no C compiler")

    monkeypatch.setattr(driver, "_active", SimpleNamespace(launcher_cls=launcher))
    kinds = [Compiled(x="*fp16"), Compiled(x="*fp32"), Compiled(x="*fp16")]
    done: list[int] = []
    compile_side_by_side([lambda c=c: c for c in kinds] + [lambda: done.append(1)], own_threads=True)
    assert sorted(m["x"] for m in made) == ["*fp16", "*fp32"]
    assert done == [1], "what is no kernel has no launcher"


def test_the_cell_is_told_forms_and_no_values() -> None:
    case = LaunchCase(
        "one",
        {"args": [], "kwargs": {"x": {"t": "x"}, "n": {"v": 5}}},
        {"x": torch.tensor([3.0, 4.0])},
        lambda given, written: (None, 0.0),
        {"out": torch.zeros(7, dtype=torch.int32)},
        {"out": "offset"},
    )
    told = call_without_values(case)
    assert told == {"tensors": {"x": ["float32", 2, 0], "out": ["int32", 7, 1]}, "call": case.call}


def test_the_launched_file_has_a_way_to_compile_alone() -> None:
    text = launcher_files("double", DOUBLE, DOUBLE)[VARIANT_FILE]
    names: set[str] = {line[4 : line.index("(")] for line in text.splitlines() if line.startswith("def ")}
    assert {"run", "compile_only"} <= names


def test_what_compiling_computes_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        raise AssertionError("nothing is launched")

    def compile_only() -> None:
        ends = time.process_time() + 0.4
        while time.process_time() < ends:
            pass

    monkeypatch.setattr(sys.modules[__name__], "compile_only", compile_only, raising=False)
    run.__module__ = __name__
    state: dict[str, Any] = {"entry": run}
    remember_process(state)
    note_answer(state)
    compile_calls({"calls": [{"tensors": {}, "call": {"kwargs": {}}}]}, {}, state)
    note_question(state)
    assert process_report(state)["threads"] == []


def test_what_takes_far_longer_than_half_of_them_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "LEAST_WAIT_S", 0.1)
    ends: list[Future[None]] = [Future() for _ in range(5)]
    for place in (0, 3, 4):
        ends[place].set_result(None)
    ends[1].set_exception(ValueError("it cannot be compiled"))
    assert numbers_of_late(ends) == [2]
    monkeypatch.setattr(compile_ahead, "LEAST_WAIT_S", 60.0)
    threading.Timer(0.1, ends[2].set_result, [None]).start()
    assert numbers_of_late(ends) == [], "it is not late yet"
    assert numbers_of_late([]) == []


def test_half_of_them_are_waited_for_however_long_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "LEAST_WAIT_S", 0.0)
    monkeypatch.setattr(compile_ahead, "_TIMES_THE_USUAL", 1.0)
    ends: list[Future[None]] = [Future() for _ in range(4)]
    for place in (1, 2):
        threading.Timer(0.1 * place, ends[place].set_result, [None]).start()
    assert numbers_of_late(ends) == [0, 3]


def test_nothing_waits_for_what_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "LEAST_WAIT_S", 0.1)
    monkeypatch.setattr(compile_ahead, "_triton_mode", lambda pool: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    ended, done = threading.Event(), list[int]()
    try:
        late = compile_most([lambda: ended.wait(), lambda: done.append(1), lambda: done.append(2)])
    finally:
        ended.set()
    assert (late, done) == ([0], [1, 2])


def test_what_is_late_is_told_by_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's own way a call begins nothing where an earlier one has begun the same program."""
    monkeypatch.setattr(compile_ahead, "LEAST_WAIT_S", 0.1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    pools: list[Any] = []
    monkeypatch.setattr(compile_ahead, "_triton_mode", lambda pool: pools.append(pool) or nullcontext())
    ended, done = threading.Event(), list[int]()

    def begin(work: Any) -> Any:
        return lambda: pools[-1].submit(work)

    try:
        slow, quick = begin(ended.wait), begin(lambda: done.append(1))
        assert compile_most([quick, lambda: None, slow, quick]) == [2]
    finally:
        ended.set()
    assert done == [1, 1]
    monkeypatch.setattr(compile_ahead, "LEAST_WAIT_S", 60.0)
    assert compile_most([slow, lambda: None, quick]) == []
