"""Claim: when the end of work is seen on a device, and how long its clock takes to rise after idling.

    python -m benchmarks.timing.device_clock --out benchmarks/results/device_clock.json

Steps: pauses that grow by a fraction of a microsecond are recorded as graphs and timed by events, as one graph
and behind another launch of their own; the time moves in steps, whose width is the interval at which the end of
work is looked for. Idling: after seconds without work, pauses of a fixed number of cycles are timed one after
another: their cycles over their seconds are the device's clock, from the first millisecond on. The same with a
little work now and then while it idles. Costs: wall microseconds of what a look is made of.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.lib import result_files
from forecast_autotune.timing.recorded_launches import GraphRecorder

STEP_CYCLES, STEPS, REPLAYS = 100, 80, 12
"""A 20th of a microsecond at 2 GHz, over 4 us."""
LONG_CYCLES, SAMPLES = 400_000, 250
"""0.2 ms at 2 GHz, for 50 ms."""
IDLE_S = (0.1, 0.25, 0.5, 1.0, 2.0)
BURST_MS, BURST_EACH_S = (2.0, 10.0), 0.25
"""Work while it idles, and how often."""


class ClockReader:
    """Times pieces of work by events, with a flushed L2 before each."""

    def __init__(self) -> None:
        import torch

        self.cuda: Any = torch.cuda
        self.flush: Callable[[], object] = torch.empty(256 << 20, dtype=torch.uint8, device="cuda").zero_

    def times_us(self, work: Callable[[], object], count: int, flush: bool = True) -> list[float]:
        """Microseconds of `count` pieces of work."""
        events = [[self.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in events:
            if flush:
                self.flush()
            start.record()
            work()
            end.record()
        self.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in events]

    def clock_mhz(self) -> list[float]:
        """The clock over the next 50 ms of work, by pauses of known cycles."""
        found = self.times_us(lambda: self.cuda._sleep(LONG_CYCLES), SAMPLES, flush=False)
        return [round(LONG_CYCLES / us, 1) for us in found]


def steps(reader: ClockReader) -> dict[str, list[list[float]]]:
    """Pauses in microseconds at 2 GHz and the median time of each: recorded alone, recorded behind another
    pause, and launched behind another one."""
    recorder = GraphRecorder(reader.cuda)
    found: dict[str, list[list[float]]] = {"recorded": [], "recorded behind": [], "launched behind": []}
    for n in range(1, STEPS + 1):
        cycles = n * STEP_CYCLES

        def pause(cycles: int = cycles) -> None:
            reader.cuda._sleep(cycles)

        def behind(pause: Callable[[], None] = pause) -> None:
            reader.cuda._sleep(6000)
            pause()

        alone, both = recorder.record(pause)[0], recorder.record(behind)[0]
        for graph in (alone, both):
            graph.replay()
        ways = {"recorded": alone.replay, "recorded behind": both.replay, "launched behind": behind}
        for name, work in ways.items():
            times = reader.times_us(work, REPLAYS)
            found[name].append([round(cycles / 2e3, 3), *(round(t, 3) for t in sorted(times)[1:-1:3])])
    return found


def step_widths(rows: Sequence[Sequence[float]]) -> list[float]:
    """Microseconds by which the median time jumps, where it jumps by more than a third of one."""
    medians = [statistics.median(times) for _, *times in rows]
    return [round(b - a, 3) for a, b in itertools.pairwise(medians) if b - a > 0.33]


def idling(reader: ClockReader, seconds: float, burst_ms: float) -> dict[str, Any]:
    """The clock after idling, with bursts of work while it does."""
    reader.clock_mhz()
    reader.clock_mhz()  # up, whatever came before
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        time.sleep(min(left, BURST_EACH_S if burst_ms else left))
        if burst_ms and end - time.perf_counter() > 0.05:
            reader.times_us(reader.flush, max(1, int(burst_ms / 0.08)), flush=False)
    found = reader.clock_mhz()
    at_ms = {0: 0, 1: 5, 5: 25, 10: 50, 20: 100, 30: 150, 49: 245}
    return {
        "idle_s": seconds,
        "burst_ms": burst_ms,
        "mhz": {f"{ms} ms": found[i] for ms, i in at_ms.items()},
        "top_mhz": max(found),
    }


def wall_us(work: Callable[[], object], count: int, synchronize: Callable[[], object]) -> float:
    """Median wall microseconds of a call, with the device idle before each."""
    found = []
    for _ in range(count):
        synchronize()
        begin = time.perf_counter()
        work()
        found.append(1e6 * (time.perf_counter() - begin))
    synchronize()
    return round(statistics.median(found), 2)


def costs(reader: ClockReader) -> dict[str, float]:
    """Wall microseconds on the host of what a look consists of, and the device's of a flush."""
    recorder = GraphRecorder(reader.cuda)
    event = reader.cuda.Event(enable_timing=True)
    held = [recorder.record(recorder.nothing, 600)[0] for _ in range(40)]
    found = {
        "record": wall_us(
            lambda: held.append(recorder.record(recorder.nothing, 600)[0]), 20, reader.cuda.synchronize
        ),
        "replay": wall_us(held[0].replay, 50, reader.cuda.synchronize),
        "forget": wall_us(held.pop, 20, reader.cuda.synchronize),
        "event": wall_us(event.record, 50, reader.cuda.synchronize),
        "flush": wall_us(reader.flush, 50, reader.cuda.synchronize),
    }
    return {
        **found,
        "device_flush": round(statistics.median(reader.times_us(reader.flush, 50, flush=False)), 2),
    }


def run(a: Namespace, report: result_files.ResultFile) -> None:
    """Steps, then costs, then idling; each part is written before the next begins."""
    if a.null:
        report.finish({})
        return
    reader = ClockReader()
    reader.clock_mhz()
    found = steps(reader)
    report.add("steps", found)
    widths = {name: step_widths(rows) for name, rows in found.items()}
    result_files.say(f"steps in us: {widths}")
    report.add("costs_us", costs(reader))
    result_files.say(f"costs: {report.data['raw']['costs_us']}")
    rows = [(s, 0.0) for s in IDLE_S] + [(1.0, b) for b in BURST_MS] + [(2.0, b) for b in BURST_MS]
    idle = []
    for seconds, burst_ms in rows:
        idle.append(idling(reader, seconds, burst_ms))
        report.add("idling", idle[-1])
        result_files.say(str(idle[-1]))
    report.finish({"step_widths_us": widths, "costs_us": report.data["raw"]["costs_us"][0], "idling": idle})


def main() -> int:
    a = result_files.parse_arguments(result_files.parser(__doc__))
    run(a, result_files.ResultFile(a, "device_clock"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
