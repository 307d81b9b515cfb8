"""Claim: duels seldom promote an equal kernel, and find a true gain of 2 %.

    python -m benchmarks.verification.paired_comparisons --out benchmarks/results/duels.json \
        [--duels 200] [--gains 60] [--null] [--lengths 5000] [--earlier OTHER.json]

One kernel computes for as long as it is told, so that the truth is known: its length is set for 6, 8, 20, 50
and 200 us and 5 ms as the harness' own timer measures them (cold L2, replays of one recorded launch).
Equal kernels meet `--duels` times, shared evenly by the lengths; a kernel that is told to take 2 % less meets
its like `--gains` times per length. Each duel has the rules that the harness ships (`timing.duel.DEFAULT`).
Some lengths may be run by themselves, and added to an earlier run of others. `--null` takes invented times.
"""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from benchmarks.lib.devices import warm_up_device
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_harness.timing.device import DeviceTimer, device_conditions
from forecast_harness.timing.graph_replay import ReplayBuffers
from forecast_harness.timing.paired_clock import PairedClock, SimulatedPairedClock
from forecast_harness.timing.paired_comparison import (
    DEFAULT_RULES,
    ComparisonOutcome,
    ComparisonResult,
    run_comparison,
)
from forecast_integrations.triton.timer.warmup import keep_busy

LENGTHS_S = (6e-6, 8e-6, 20e-6, 50e-6, 200e-6, 5e-3)
GAIN = 0.02
_LONG_TURNS = 100_000
"""Some 0.3 ms of them."""
_WARM_S = 2.0
"""Seconds of work after which a device's clock has left its idle rate."""
BUDGET_S = 60.0
"""Seconds of a device that a duel may take, by the issue that asks for it; of the whole duel here."""


@triton.jit(do_not_specialize=["turns"])
def spin(out, turns, BLOCK: tl.constexpr):
    """A chain of dependent multiplications of the length that is asked for."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = at.to(tl.float32)
    for _ in range(turns):
        value = value * 0.999 + 0.5
    tl.store(out + at, value)


def time_once(timer: DeviceTimer, call: Callable[[], Any]) -> float:
    """Seconds of one launch, as the harness times what it has to judge."""
    return float(timer.time(call, ReplayBuffers()).seconds)


class SpinPairedClock:
    """Times `spin` for two contestants: numbers of turns, incumbent's and candidate's."""

    def __init__(self, timer: DeviceTimer, launch: Callable[[int], Any], turns: tuple[int, int]) -> None:
        self._timer, self._launch, self._turns = timer, launch, turns

    def sample(self, which: int, fresh: bool) -> float:
        """Seconds of one launch."""
        return time_once(self._timer, partial(self._launch, self._turns[which]))


def fit_turn_time(around: int, timer: DeviceTimer, launch: Callable[[int], Any]) -> tuple[float, float]:
    """(seconds per turn, seconds of no turn), by a straight line through medians of a few lengths."""
    points = [max(1, round(around * share)) for share in (0.6, 0.8, 1.0, 1.2)]
    times = [statistics.median(time_once(timer, partial(launch, n)) for _ in range(40)) for n in points]
    slope, offset = np.polyfit(points, times, 1)
    return float(slope), float(offset)


def turns_for(seconds: float, timer: DeviceTimer, launch: Callable[[int], Any]) -> int:
    """Turns that take so long. Raises `ValueError` for a time that an empty launch takes."""
    turns, offset = 1000, 0.0
    for _ in range(4):  # a short kernel says little about a long one's slope: go there step by step
        slope, offset = fit_turn_time(turns, timer, launch)
        turns = max(10, round((seconds - offset) / slope))
    if seconds <= 1.1 * offset:
        raise ValueError(f"{seconds:g} s is hardly more than an empty launch takes, {offset:g} s")
    return turns


def device_clocks(lengths: Sequence[float]) -> dict[float, Callable[[float, int], PairedClock]]:
    """For each length: a clock of two kernels, the second of them shorter by a gain."""
    timer = DeviceTimer(torch)
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(blocks * 128, device="cuda")

    def launch(turns: int) -> None:
        spin[(blocks,)](out, turns, 128, num_warps=4)

    warm_up_device("cuda")
    keep_busy(partial(launch, 20_000), torch.cuda.synchronize, _WARM_S)
    found: dict[float, Callable[[float, int], PairedClock]] = {}
    # A turn takes the same in a long kernel as in a short one, whose own slope drowns in noise.
    per_turn = fit_turn_time(_LONG_TURNS, timer, launch)[0]
    for length in lengths:
        try:
            full = turns_for(length, timer, launch)
        except ValueError as error:
            say(f"{length * 1e6:g} us is left out: {error}")
            continue

        samples = [time_once(timer, partial(launch, full)) for _ in range(100)]
        spread = statistics.pstdev(samples) / statistics.fmean(samples)
        taken = statistics.median(samples)
        less = full - round(GAIN * taken / per_turn)

        def clock(gain: float, seed: int, full: int = full, less: int = less) -> PairedClock:
            return SpinPairedClock(timer, launch, (full, less if gain else full))

        found[length] = clock
        say(
            f"{length * 1e6:g} us: {full} turns take {taken * 1e6:.2f} us, +-{spread:.1%}; less: {less} turns"
        )
    return found


def simulated_clocks(lengths: Sequence[float]) -> dict[float, Callable[[float, int], PairedClock]]:
    """Invented ones."""

    def clock(gain: float, seed: int, length: float) -> PairedClock:
        return SimulatedPairedClock(length, gain, seed=seed)

    return {length: partial(clock, length=length) for length in lengths}


def run_one(clock: PairedClock, seed: int) -> dict[str, Any]:
    """A duel's end, without its samples."""
    begin = time.perf_counter()
    found: ComparisonResult = run_comparison(clock, DEFAULT_RULES, seed)
    kept = {name: value for name, value in found.to_json().items() if name != "differences"}
    return {**kept, "wall_s": round(time.perf_counter() - begin, 3)}


def summary(raw: dict[float, dict[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    """False promotions, detections, and what the median duel of equals says, over all and per length."""
    equal = [row for rows in raw.values() for row in rows["equal"]]
    faster = [row for rows in raw.values() for row in rows["gain"]]

    def share(rows: Sequence[dict[str, Any]], outcome: ComparisonOutcome) -> float:
        return float(round(sum(r["outcome"] == outcome for r in rows) / len(rows), 4))

    return {
        "duels_of_equals": len(equal),
        "false_promotions": share(equal, ComparisonOutcome.FASTER),
        "called_slower": share(equal, ComparisonOutcome.SLOWER),
        "median_log_ratio": round(statistics.median(np.log1p(r["gain"]) for r in equal), 5),
        "largest_median_of_a_length": round(
            max(abs(statistics.median(np.log1p(r["gain"]) for r in rows["equal"])) for rows in raw.values()),
            5,
        ),
        "duels_of_two_percent": len(faster),
        "detected": share(faster, ComparisonOutcome.FASTER),
        "detected_least_of_a_length": min(
            share(rows["gain"], ComparisonOutcome.FASTER) for rows in raw.values()
        ),
        "most_wall_seconds": max(r["wall_s"] for r in [*equal, *faster]),
        "within_budget": all(r["wall_s"] <= BUDGET_S for r in [*equal, *faster]),
        "per_length_us": {
            f"{length * 1e6:g}": {
                "false": share(rows["equal"], ComparisonOutcome.FASTER),
                "detected": share(rows["gain"], ComparisonOutcome.FASTER),
                "median_gain": round(statistics.median(r["gain"] for r in rows["gain"]), 5),
                "blocks": statistics.median(r["blocks"] for r in rows["gain"]),
            }
            for length, rows in raw.items()
        },
    }


def main() -> int:
    """Run the benchmark."""
    made = parser(__doc__)
    made.add_argument("--duels", type=int, default=200, help="of equal kernels, all lengths together")
    made.add_argument("--gains", type=int, default=60, help="of a kernel that is 2 %% faster, per length")
    made.add_argument("--lengths", type=float, nargs="+", metavar="US", help="microseconds: these alone")
    made.add_argument("--earlier", type=Path, help="a run of other lengths, which counts too")
    arguments = parse_arguments(made)
    report = ResultFile(arguments, "duels: equal kernels are seldom promoted, 2 % are found", seed=0)
    lengths = [us * 1e-6 for us in arguments.lengths] if arguments.lengths else LENGTHS_S
    raw: dict[float, dict[str, list[dict[str, Any]]]] = {}
    if arguments.earlier:
        earlier = json.loads(arguments.earlier.read_text(encoding="utf-8"))
        report.add("earlier", {"environment": earlier["environment"], "options": earlier["options"]})
        for found in earlier["raw"]["lengths"]:
            report.add("lengths", found)
            raw[found["seconds"]] = {kind: found[kind] for kind in ("equal", "gain")}
    clocks = simulated_clocks(lengths) if arguments.null else device_clocks(lengths)
    each = -(-arguments.duels // len(LENGTHS_S))
    for length, clock in clocks.items():
        before = {} if arguments.null else device_conditions(0)
        rows = {
            "equal": [run_one(clock(0.0, n), n) for n in range(each)],
            "gain": [run_one(clock(GAIN, n), n) for n in range(arguments.gains)],
        }
        raw[length] = rows
        report.add("lengths", {"seconds": length, "conditions": before, **rows})
        ended = {
            kind: [r["outcome"] for r in found].count(ComparisonOutcome.FASTER)
            for kind, found in rows.items()
        }
        say(f"{length * 1e6:g} us: of {each} equal and {arguments.gains} faster ones, promoted: {ended}")
    report.finish(summary(raw))
    return 0


if __name__ == "__main__":
    sys.exit(main())
