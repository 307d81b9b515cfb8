"""Claim: kernels of a few microseconds are told apart, though the device's clock is read every 1.2 us only.

    python -m benchmarks.timing.short_kernels --out benchmarks/results/short_kernels.json

Of each case some configs are compiled and looked at; the fastest of up to 40 us are timed side by side for long,
recorded behind pauses: the truth, in two halves that say how well it is known. Then each is timed again and again
by every method: a look by events (as every look was before short launches were recorded), the tuner's look, its
finals by events and recorded, and launches that are not recorded behind pauses. Given per method: the standard
deviation of a time that is taken again, what is left of the error when the mean over repetitions is compared with
the truth (the method's own offset, the same for all configs of a case, is taken off), the share of pairs of near
configs (0.5 to 10 % apart) that it puts in the right order, and wall milliseconds a candidate.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import kernels
from benchmarks.lib import devices, result_files
from benchmarks.lib.kernel_timing import precompile
from benchmarks.lib.variants.variant_forecasts import call_with_variants
from forecast_autotune.records import Candidate
from forecast_autotune.timing.pauses import pause_lengths, pause_seconds
from forecast_integrations.triton.problem.call import KernelCall, outcome_of
from forecast_integrations.triton.timer.short_launches import TimedLaunch
from forecast_integrations.triton.timer.timers import EventTimer, TimingLengths

CASES = (
    "softmax/4096x1000",
    "rms_norm/64x5120",
    "swiglu/16x14336",
    "layer_norm/2048x2560",
    "bp_transpose/1x1024x1024",
    "bp_tf32_matmul/512x512x512",
    "bp_persistent_matmul/1024x1024x1024",
    "fn_bmm/96x208x208x64",
    "chunk_l2norm/32768x128",
    "rows_dropout_add/512x4096",
    "srv_merge_attn_states/1024x32x128",
    "vis_heat3d/128x128x128",
)
SHORT_MS, NEAR = 0.04, (0.005, 0.1)
"""Milliseconds of the slowest kernel that takes part, and how far apart (as a share) near configs are."""
Times = dict[Candidate, list[float]]
"""Per config, what every repetition said: milliseconds."""


class EventsOnlyTimer(EventTimer):
    """The tuner's clock where nothing can be recorded."""

    def _record(self, candidate: Candidate, *, finely: bool = False) -> list[TimedLaunch]:
        return []


class PausedTimer(EventsOnlyTimer):
    """Launches behind pauses, each its own piece of work for the device."""

    def ways(self, candidate: Candidate) -> list[TimedLaunch]:
        """The launch behind every pause."""
        launch = self._call.launcher(candidate)

        def behind(pause: int) -> Callable[[], object]:
            def both() -> object:
                self._interface._sleep(pause)
                return launch()

            return both

        return [TimedLaunch(behind(p), pause_seconds(p)) for p in pause_lengths()]

    def look(self, candidate: Candidate) -> list[float]:
        """Milliseconds per round, with the cost of the pauses in them."""
        return self._rounds([candidate], [self.ways(candidate)], 7)[0]


def look_by_events(call: KernelCall, candidate: Candidate) -> float:
    """Median milliseconds of one launch, five to estimate and as many as fit into 5 ms."""
    clock = EventsOnlyTimer(call)
    clock._launches([candidate], 1)
    estimate = min(clock._launches([candidate], 5)[0])
    found = clock._launches([candidate], max(7, min(200, int(5.0 / (estimate + 0.08)))))[0]
    clock.close()
    return statistics.median(found)


def look(call: KernelCall, candidate: Candidate) -> float:
    """Median milliseconds of the tuner's look at a candidate that is not the fastest."""
    clock = EventTimer(call, TimingLengths(full_ms=0.0))
    clock._busy = time.perf_counter()  # the device is at work anyway
    times = clock.time_adaptively(candidate, math.inf) or [math.nan]
    clock.close()
    return statistics.median(times)


def look_behind_pauses(call: KernelCall, candidate: Candidate) -> float:
    """Median milliseconds of launches behind pauses that are not recorded."""
    clock = PausedTimer(call)
    found = statistics.median(clock.look(candidate))
    clock.close()
    return found


LOOKS = {
    "look by events": look_by_events,
    "look": look,
    "look behind pauses, not recorded": look_behind_pauses,
}
TURNS = {"turns by events": EventsOnlyTimer, "turns": EventTimer}


def time_by_looks(
    call: KernelCall, near: Sequence[Candidate], name: str, repeats: int
) -> tuple[Times, float]:
    """What a look says of each config, and wall milliseconds of one."""
    found: Times = {c: [] for c in near}
    begin = time.perf_counter()
    for _ in range(repeats):
        for candidate in near:
            found[candidate].append(LOOKS[name](call, candidate))
    return found, 1e3 * (time.perf_counter() - begin) / (repeats * len(near))


def time_by_turns(
    call: KernelCall, near: Sequence[Candidate], name: str, repeats: int
) -> tuple[Times, float]:
    """What finals say of each config, and wall milliseconds per config of one."""
    found: Times = {c: [] for c in near}
    begin = time.perf_counter()
    for _ in range(repeats):
        clock = TURNS[name](call)
        for candidate, times in zip(near, clock.in_turns(near), strict=True):
            found[candidate].append(statistics.median(times))
        clock.close()
    return found, 1e3 * (time.perf_counter() - begin) / (repeats * len(near))


def true_times(
    call: KernelCall, near: Sequence[Candidate], rounds: int
) -> tuple[dict[Candidate, float], float]:
    """Milliseconds of each config, timed side by side for long, and how far two halves of it are apart.

    The second is the standard deviation of the log ratios of the halves, halved: that of the mean of both.
    """
    clock = EventTimer(call)
    ways = [clock._record(c, finely=True) or [clock._plain(c)] for c in near]
    halves = [[statistics.fmean(t) for t in clock._rounds(near, ways, rounds)] for _ in range(2)]
    clock.close()
    truth = {c: (one + two) / 2 for c, one, two in zip(near, *halves, strict=True)}
    ratios = [math.log(one / two) for one, two in zip(*halves, strict=True)]
    return truth, statistics.pstdev(ratios) / 2


def compare(found: Times, truth: dict[Candidate, float]) -> dict[str, Any]:
    """Deviations of a method's times from the truth, in per cent, and its pairs: (right, all)."""
    logs = {c: [math.log(max(t, 1e-6) / truth[c]) for t in times] for c, times in found.items()}
    offset = statistics.median(v for values in logs.values() for v in values)
    again = [statistics.stdev(values) for values in logs.values() if len(values) > 1]
    left = [statistics.fmean(values) - offset for values in logs.values()]
    right = pairs = 0
    for one, two in itertools.combinations(truth, 2):
        apart = math.log(truth[one] / truth[two])
        if NEAR[0] <= abs(apart) <= NEAR[1]:
            said = [(a - b) * apart for a, b in zip(found[one], found[two], strict=True)]
            right, pairs = right + sum(s > 0 for s in said), pairs + len(said)
    return {
        "again_pct": round(100 * math.sqrt(statistics.fmean([s * s for s in again] or [0.0])), 3),
        "left_pct": round(100 * math.sqrt(statistics.fmean([v * v for v in left])), 3),
        "offset_pct": round(100 * offset, 3),
        "right": right,
        "pairs": pairs,
    }


def one_case(case: kernels.Case, where: str, a: Namespace) -> dict[str, Any] | None:
    """All methods on the near configs of one case; None where fewer than two are short."""
    data = case.make(where)
    call = call_with_variants(case, data, [])
    some = {str(c) for c in kernels.thinned(case, a.configs)}
    tried = [c for c, config in call.configs.items() if str(config) in some]
    precompile(case.kernel, data, [call.configs[c] for c in tried], a.threads)
    clock = EventTimer(call)
    rough: dict[Candidate, float] = {}
    for candidate in tried:
        try:
            clock.first(candidate, 20.0)
            rough[candidate] = statistics.median(clock.time_adaptively(candidate, math.inf) or [math.inf])
        except Exception as error:
            if outcome_of(error) is None:
                raise
    clock.close()
    near = [c for c in sorted(rough, key=lambda c: rough[c]) if rough[c] <= SHORT_MS or a.null][: a.near]
    if len(near) < 2:
        return None
    truth, truth_sd = true_times(call, near, a.rounds)
    record: dict[str, Any] = {
        "case": case.name,
        "truth_us": [round(1e3 * t, 4) for t in truth.values()],
        "truth_sd_pct": round(100 * truth_sd, 3),
        "protocol": clock.protocol_of(near[0]),
        "methods": {},
        "times_us": {},
    }
    for names, method in ((LOOKS, time_by_looks), (TURNS, time_by_turns)):
        for name in names:
            if a.null and "pauses" in name:
                continue
            found, wall_ms = method(call, near, name, a.repeats)
            record["methods"][name] = {**compare(found, truth), "wall_ms": round(wall_ms, 3)}
            record["times_us"][name] = [[round(1e3 * t, 3) for t in times] for times in found.values()]
    return record


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per method over all cases: root mean squares, pairs in the right order, wall milliseconds a candidate."""
    made: dict[str, Any] = {
        "cases": len(found),
        "truth_sd_pct": round(math.sqrt(statistics.fmean(f["truth_sd_pct"] ** 2 for f in found)), 3),
    }
    for name in found[0]["methods"]:
        rows = [f["methods"][name] for f in found]
        pairs = sum(r["pairs"] for r in rows)
        made[name] = {
            **{
                key: round(math.sqrt(statistics.fmean(r[key] ** 2 for r in rows)), 3)
                for key in ("again_pct", "left_pct")
            },
            "right_pct": round(100 * sum(r["right"] for r in rows) / pairs, 1) if pairs else None,
            "pairs": pairs,
            "wall_ms": round(statistics.median(r["wall_ms"] for r in rows), 2),
        }
    return made


def run(a: Namespace, report: result_files.ResultFile) -> None:
    """All cases; a case's result is written before the next begins."""
    found = []
    with devices.device(a.null) as where:
        devices.warm_up_device(where)
        for name in CASES[: 2 if a.null else None]:
            (case,) = kernels.cases([name])
            record = one_case(case, where, a)
            if record is None:
                result_files.say(f"{name}: fewer than two short configs")
                continue
            found.append(record)
            report.add("cases", record)
            result_files.say(f"{name}: {record['truth_us']} us; {record['methods']}")
    report.finish(summary(found))


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--configs", type=int, default=16, help="configs per case that are compiled")
    parser.add_argument("--near", type=int, default=6, help="the fastest of them, which are compared")
    parser.add_argument("--repeats", type=int, default=4, help="times that each method times each of them")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of 16 launches per half of the truth")
    parser.add_argument("--threads", type=int, default=16, help="threads that compile")
    a = result_files.parse_arguments(parser)
    run(a, result_files.ResultFile(a, "short_kernels"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
