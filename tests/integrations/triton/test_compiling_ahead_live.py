"""What compiles before IR is traced, and beside timings, with a real compiler and no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import triton

from forecast_autotune import autotune
from forecast_autotune.records import Candidate
from forecast_autotune.testing import MeasurerContract
from forecast_autotune.tuning.measurer import Measurer
from forecast_integrations.triton.compile.children import ForkedChildren
from forecast_integrations.triton.timer.measurer import TritonMeasurer
from tests.integrations.null import binaries, blocks, double, fresh, kernel_call, launch

MANY = (16, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def tuner(sizes: Sequence[int] = MANY) -> Any:
    configs = [c for w in (2, 4) for c in blocks(*sizes, num_warps=w)]
    return autotune(configs, key=["n"], store=False)(fresh(double))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What children trace and compile, in order."""
    seen: list[tuple[str, int]] = []
    start = ForkedChildren.start

    def started(self: ForkedChildren, tag: Any, task: Callable[[], Any], *rest: Any) -> None:
        if isinstance(tag, Candidate | list):  # others look for the compiler or build stubs
            seen.append(("compile", 1) if isinstance(tag, Candidate) else ("trace", len(tag)))
        start(self, tag, task, *rest)

    monkeypatch.setattr(ForkedChildren, "start", started)
    return seen


def test_another_shape_of_the_kernel_traces_nothing(device: Any, events: list[tuple[str, int]]) -> None:
    tuned = tuner()
    launch(tuned)
    events.clear()
    launch(tuned, 8192)
    assert "trace" not in [kind for kind, _ in events]
    assert tuned.decision.measured > 0


def test_nothing_is_compiled_ahead_while_what_is_compiled_is_timed(
    device: Any, events: list[tuple[str, int]]
) -> None:
    measurer, names = measurer_of(MANY[:4], "fork", names_compiled=2)
    assert len(list(measurer.measure(names[:2], prefetch=names[2:]))) == 2
    assert "compile" not in [kind for kind, _ in events]
    assert len(list(measurer.measure(names[2:3], prefetch=names[3:]))) == 1
    assert [kind for kind, _ in events].count("compile") == 2, "one that was asked for, and one ahead"
    measurer.close()


def test_threads_compile_nothing_ahead(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would hold the interpreter's lock while it traces and times."""
    monkeypatch.setenv("FORECAST_AUTOTUNE_COMPILER", "threads")
    measurer, names = measurer_of(MANY[:4], "threads")
    measurer.prefetch(names)
    assert measurer.spent().compiled == 0
    measurer.close()
    assert binaries() == 0


def measurer_of(
    sizes: Sequence[int], compiler: str, names_compiled: int = 0
) -> tuple[TritonMeasurer, list[Candidate]]:
    x = torch.empty(4096)
    call, names = kernel_call(triton.autotune(blocks(*sizes), key=["n"])(fresh(double)), x, x, 4096)
    measurer = TritonMeasurer(
        call,
        "problem",
        workers=2,
        timeout_s=60.0,
        guard=lambda candidate: contextlib.nullcontext(),
        say=lambda candidate: None,
        compiler=compiler,
        compiled=names[:names_compiled],
    )
    return measurer, names


@pytest.mark.usefixtures("device")
class TestTritonMeasurer(MeasurerContract):
    def make(self) -> tuple[Measurer, Sequence[Candidate]]:
        return measurer_of(MANY[:4], "fork")
