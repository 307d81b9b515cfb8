"""Variants compiled ahead, beside, and as few as there are forms of calls."""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import PurePath
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from forecast_autotune.records import Config
from forecast_harness.sandbox.api import JobResult, ResourceLimits, SandboxJob, SandboxLane
from forecast_harness.trials.variants import compilation as compile_ahead
from forecast_harness.trials.variants.compilation import CompiledForms, compile_calls, compile_most
from forecast_harness.trials.variants.files import launcher_files
from forecast_harness.verify.launch_cell import note_answer, note_question, process_report, remember_process
from tests.harness.large import MARK
from tests.harness.variant_kernels import DOUBLE


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


HOPPER = json.dumps({"hash": "a", "target": {"backend": "cuda", "arch": 90, "warp_size": 32}}).encode()
BINARIES = {"key/double.json": base64.b64encode(HOPPER).decode()}
BROKEN = "raise RuntimeError('it needs its device')\n" + DOUBLE


def call(n: int, block: int) -> dict[str, Any]:
    given = {
        "_views": {"x": [[n], [1], {}], "out": [[n], [1], {}]},
        "_grid": [1],
        "_meta": {"BLOCK": block},
    }
    kwargs: dict[str, Any] = {name: {"v": value} for name, value in {**given, "_options": {}, "n": n}.items()}
    kwargs |= {name: {"t": name} for name in ("x", "out")}
    return {
        "tensors": {name: ["float32", n, 0] for name in ("x", "out")},
        "call": {"args": [], "kwargs": kwargs},
    }


def compiled(compiling: SandboxLane, source: str, binaries: dict[str, str]) -> JobResult:
    payload = {"calls": [call(64, 32), call(60, 32), call(64, 64)], "binaries": binaries}
    job = SandboxJob("tests.harness.large:compile_twice", payload, launcher_files("kernel", source, source))
    return compiling.run(job, ResourceLimits(wall_s=120, cpu_s=120, trusted_s=240))


def test_what_one_cell_compiled_the_other_one_only_reads(compiling: SandboxLane) -> None:
    result = compiled(compiling, DOUBLE, BINARIES)
    assert {PurePath(name).suffix for name in result.value} == {".json", ".cubin"}, result.detail
    assert [bytes(a.data) for a in result.arrays.values()] == [MARK] * 3, "one of each form and config"


@pytest.mark.parametrize("source", [BROKEN, "import os\nos._exit(3)\n"])
def test_a_variant_that_cannot_be_compiled_so_is_left_to_the_cell_that_launches(
    compiling: SandboxLane, source: str
) -> None:
    result = compiled(compiling, source, BINARIES)
    assert (result.value, result.arrays) == ([], {}), result.detail


SMALL, LARGE, HUGE = (Config.of({"BLOCK": block}) for block in (64, 128, 1024))


def test_a_config_gives_way_to_one_that_was_compiled_for_such_a_call() -> None:
    known = CompiledForms()
    known.note(SMALL, "even")
    known.note(LARGE, "odd")
    listed = [SMALL, LARGE, HUGE]
    assert known.instead_of(LARGE, listed, lambda c: "odd") == LARGE, "it was itself"
    assert known.instead_of(LARGE, listed, lambda c: "even") == SMALL
    assert known.instead_of(HUGE, listed, lambda c: "odd") == LARGE
    assert known.instead_of(SMALL, listed, lambda c: "odd") == SMALL, (
        "sizes go beyond its own tile, not a larger one"
    )
    assert known.instead_of(HUGE, listed, lambda c: "new") == HUGE
    assert known.instead_of(HUGE, [HUGE], lambda c: "odd") == HUGE, "those that cannot run are not among them"
    assert known.instead_of(HUGE, listed, lambda c: None) == HUGE, "its launch says that it has no grid"
