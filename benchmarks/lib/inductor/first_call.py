"""The parts of a compiled model's first call: by Inductor's own clock, and operation by operation."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.processes.compile_processes import Row, inductor_clock, inductor_seconds
from forecast_integrations.inductor.api import TorchCompileHandle

PARTS = (
    "trace_s",
    "codegen_s",
    "precompile_s",
    "timing_s",
    "forecast_s",
    "kernels_s",
    "generated_s",
    "rest_s",
)
"""Dynamo and AOTAutograd; lowering, scheduling and code, with trials of fusions; waiting for choices to compile;
timing them; our forecasts; waiting for the kernels of the graph; configs of generated kernels, timed at their
first launch, with coordinate descent; loading, first launches, and whatever else."""
_GENERATED = ("CachingAutotuner.benchmark_all_configs", "CachingAutotuner.coordinate_descent_tuning")
_SHOWN_S = 0.05
"""Seconds by Inductor's own names that are kept."""


@dataclass
class FirstCall:
    """The record of one first call."""

    began: float = field(default_factory=time.perf_counter)
    before: Mapping[str, float] = field(default_factory=inductor_clock)
    timed: int = 0
    """Choices that were timed, of a list of which at least one was."""
    operations: list[Row] = field(default_factory=list)
    """Our decisions, in their order."""
    """Seconds that the summary line says."""

    def begin(self) -> None:
        """Start the clock."""
        self.began, self.before = time.perf_counter(), inductor_clock()

    def note_decision(self, label: str, decision: Any) -> None:
        """Keep what is known when a decision falls: where the clock stands, and what it rests on."""
        self.operations.append(
            {
                "label": label,
                "at_s": time.perf_counter() - self.began,
                "precompile_s": inductor_seconds("_template_precompiling", self.before),
                "timing_s": inductor_seconds("_template_autotuning", self.before),
                "forecast_s": decision.cost.forecast_s,
                "candidates": decision.candidates,
                "measured": decision.measured,
                "rounds": len(decision.rounds),
            }
        )

    def row(self) -> Row:
        """The whole call until now, in seconds and counts."""
        seconds = time.perf_counter() - self.began
        spent = {
            name: inductor_seconds(suffix, self.before)
            for name, suffix in (
                ("precompile_s", "_template_precompiling"),
                ("timing_s", "_template_autotuning"),
                ("kernels_s", "async_compile.wait"),
                ("dynamo", "_compile.compile_inner"),
                ("backward", "<locals>.bw_compiler"),
                ("inductor", "compile_fx_inner"),
            )
        }
        spent["generated_s"] = sum(inductor_seconds(name, self.before) for name in _GENERATED)
        forecast = sum(one["forecast_s"] for one in self.operations)
        dynamo, inductor = spent.pop("dynamo") + spent.pop("backward"), spent.pop("inductor")
        tuning = spent["precompile_s"] + spent["timing_s"] + forecast
        return {
            "seconds": seconds,
            "tuning_s": tuning,
            **spent,
            "forecast_s": forecast,
            "trace_s": max(0.0, dynamo - inductor),
            "codegen_s": max(0.0, inductor - tuning - spent["kernels_s"]),
            "rest_s": max(0.0, seconds - max(dynamo, inductor) - spent["generated_s"]),
            "clock": {
                name: round(passed, 3)
                for name, total in inductor_clock().items()
                if (passed := total - self.before.get(name, 0.0)) > _SHOWN_S
            },
            "timed": self.timed,
            "operations": len(self.operations),
            "measured": sum(one["measured"] for one in self.operations),
            "considered": sum(one["candidates"] for one in self.operations),
            "timeline": self.operations,
        }


@contextlib.contextmanager
def counted_timings(call: FirstCall) -> Iterator[None]:
    """Count the choices that Inductor really times meanwhile."""
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    original: Callable[..., Any] = AlgorithmSelectorCache.benchmark

    def benchmark(self: Any, choices: Any, *args: Any, **kwargs: Any) -> Any:
        call.timed += len(choices)
        return original(self, choices, *args, **kwargs)

    AlgorithmSelectorCache.benchmark = benchmark
    try:
        yield
    finally:
        AlgorithmSelectorCache.benchmark = original


@contextlib.contextmanager
def tuning_service(store: Path, call: FirstCall) -> Iterator[TorchCompileHandle]:
    """Our service with a store of its own, its decisions kept in `call`."""
    from forecast_autotune import enable_torch_compile
    from forecast_integrations.inductor.summary import LISTENERS

    LISTENERS.append(call.note_decision)
    try:
        with enable_torch_compile(store=store) as handle:
            yield handle
    finally:
        LISTENERS.remove(call.note_decision)


def settle(service: TorchCompileHandle, again: Callable[[], object], limit_s: float = 60.0) -> Row:
    """Call a compiled model until nothing about its kernels is tuned any more, and return what that took.

    `settling_s` is wall time, most of it that of the model itself; `settling_extra_s` is what these calls took
    beyond the median of the twenty that follow.
    """

    def seconds() -> float:
        begin = time.perf_counter()
        again()
        return time.perf_counter() - begin

    begin, calls = time.perf_counter(), []
    while service.descending and time.perf_counter() - begin < limit_s:
        calls.append(seconds())
    passed = time.perf_counter() - begin
    usual = statistics.median(seconds() for _ in range(20))
    return {
        "settling_s": passed,
        "settling_calls": len(calls),
        "settling_extra_s": sum(calls) - len(calls) * usual,
        "settled": not service.descending,
    }
