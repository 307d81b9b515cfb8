"""Claim: candidates are timed no longer than picking the right one needs.

    python -m benchmarks.timing.timing_lengths --out benchmarks/results/timing_lengths.json

All configs of a case are compiled and timed once, and the fastest timed in turns for long: the truth. Then a
decision's timing is played again and again: the four fastest and eight more of the fastest 24, in an order
drawn anew, are raced as a live decision races them, those within 6 % of the fastest are timed in turns, and
the fastest of these is picked. Every choice of lengths plays the same draws in the same process, in an order
drawn anew. Given per choice: seconds of the device's time a play, and the regret of what it picked.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from argparse import Namespace
from functools import partial
from typing import Any

from benchmarks import kernels
from benchmarks.lib import devices, kernel_timing, result_files
from benchmarks.lib.variants.variant_forecasts import call_with_variants
from forecast_autotune.records import Candidate
from forecast_autotune.tuning.results import FINALIST_MARGIN, MAX_FINALISTS
from forecast_integrations.triton.problem.call import KernelCall, outcome_of
from forecast_integrations.triton.timer.timers import EventTimer, TimingLengths

CASES = (
    "matmul/4096x4096x4096",
    "matmul/2048x2048x2048",
    "softmax/4096x1000",
    "rms_norm/64x5120",
    "attention/32x12x12x577x64",
    "vis_conv3x3_nhwc/8x64x64x128-128",
)
LENGTHS = {
    "do_bench": TimingLengths(100.0, 100.0, 100.0, math.inf, math.inf),
    "20 ms within 1.25, 40 ms in turns": TimingLengths(5.0, 20.0, 40.0, 1.25),
    "10 ms within 1.1, 24 ms in turns": TimingLengths(5.0, 10.0, 24.0, 1.1),
    "5 ms, 24 ms in turns": TimingLengths(5.0, 5.0, 24.0),
    "2.5 ms, 24 ms in turns": TimingLengths(2.5, 2.5, 24.0),
    "2.5 ms, 12 ms in turns": TimingLengths(2.5, 2.5, 12.0),
}
FAST, TOP, MORE = 24, 4, 8


def race_medians(clock: EventTimer, candidates: list[Candidate]) -> dict[Candidate, float]:
    """Median milliseconds of those that ran, each raced against the fastest before it."""
    found: dict[Candidate, float] = {}
    for candidate in candidates:
        try:
            clock.first(candidate, 20.0)
            times = clock.time_adaptively(candidate, min(found.values(), default=math.inf))
        except Exception as error:
            if outcome_of(error) is None:
                raise
            continue
        if times is not None:
            found[candidate] = statistics.median(times)
    return found


def play(call: KernelCall, lengths: TimingLengths, candidates: list[Candidate]) -> tuple[Candidate, float]:
    """What a decision that measures these picks, and the seconds of its timing."""
    begin = time.perf_counter()
    clock = EventTimer(call, lengths)
    found = race_medians(clock, candidates)
    best = min(found.values())
    close = sorted(
        (c for c, ms in found.items() if ms <= best * (1 + FINALIST_MARGIN)), key=lambda c: found[c]
    )
    close = close[:MAX_FINALISTS]
    if len(close) > 1:
        found = {c: statistics.median(t) for c, t in zip(close, clock.in_turns(close), strict=True)}
    clock.close()
    return min(close, key=lambda c: found[c]), time.perf_counter() - begin


def one_case(case: kernels.Case, where: str, a: Namespace) -> dict[str, Any]:
    """The plays of one case."""
    data = case.make(where)
    call = call_with_variants(case, data, [])
    kernel_timing.precompile(case.kernel, data, kernels.configs(case), a.threads)
    clock = EventTimer(call)
    rough = race_medians(clock, list(call.configs))
    clock.close()
    fast = sorted(rough, key=lambda c: rough[c])[: FAST if not a.null else 6]
    top = fast[: TOP + MORE]
    times = kernel_timing.time_in_turns([partial(call.launch_once, c) for c in top], a.rounds)
    truth = {c: statistics.median(t) for c, t in zip(top, times, strict=True)}
    # The others are compared by the first pass, put on the scale of the truth.
    scale = truth[fast[0]] / rough[fast[0]]
    truth |= {c: rough[c] * scale for c in fast if c not in truth}
    best = min(truth.values())
    draw = random.Random(a.seed)
    plays: list[dict[str, Any]] = []
    for _ in range(a.repeats):
        order = fast[:TOP] + draw.sample(fast[TOP:], min(MORE, len(fast) - TOP))
        draw.shuffle(order)
        names = list(LENGTHS)
        draw.shuffle(names)
        for name in names:
            picked, seconds = play(call, LENGTHS[name], order)
            plays.append(
                {"lengths": name, "seconds": round(seconds, 4), "regret": round(truth[picked] / best - 1, 5)}
            )
    return {"case": case.name, "candidates": len(rough), "best_ms": best, "plays": plays}


def run(a: Namespace, report: result_files.ResultFile) -> None:
    """All cases; a case's result is written before the next begins."""
    found: list[dict[str, Any]] = []
    with devices.device(a.null) as where:
        devices.warm_up_device(where)
        for name in CASES[: 1 if a.null else None]:
            (case,) = kernels.cases([name])
            found.append(one_case(case, where, a))
            report.add("cases", found[-1])
            for lengths, line in summary_by_lengths(found[-1]["plays"]).items():
                result_files.say(f"{name}: {lengths}: {line}")
    plays = [play for case in found for play in case["plays"]]
    report.finish(
        {"all": summary_by_lengths(plays), **{c["case"]: summary_by_lengths(c["plays"]) for c in found}}
    )


def summary_by_lengths(plays: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median seconds, mean and largest regret of each choice of lengths."""
    found = {}
    for name in LENGTHS:
        own = [p for p in plays if p["lengths"] == name]
        regrets = [p["regret"] for p in own]
        found[name] = {
            "seconds": round(statistics.median(p["seconds"] for p in own), 4),
            "mean_regret": round(statistics.mean(regrets), 5),
            "largest_regret": max(regrets),
        }
    return found


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=10, help="draws per case")
    parser.add_argument("--rounds", type=int, default=200, help="launches per config of the truth")
    parser.add_argument("--threads", type=int, default=16, help="threads that compile")
    parser.add_argument("--seed", type=int, default=0)
    a = result_files.parse_arguments(parser)
    run(a, result_files.ResultFile(a, "timing_lengths", a.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
