"""The judge's jobs for variants of a kernel: race a variant's configs beside another, or trace them."""

from __future__ import annotations

import math
import os
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from forecast_autotune.features.candidate_list import Grid
from forecast_autotune.features.traced_texts import encode_facts
from forecast_autotune.records import Config, Outcome
from forecast_harness.clocks.paired_comparison import CANDIDATE, INCUMBENT
from forecast_harness.sandbox.api import CandidateFault, Cell, CellAnswer, Fault, JobContext
from forecast_harness.targets.kernels.base_kernel import BaseKernel
from forecast_harness.trials.judging.kernels.timed_calls import TimedCall
from forecast_harness.trials.judging.races.halving import HalvingRace
from forecast_harness.trials.judging.races.held_race import wait_to_be_let_go
from forecast_harness.trials.judging.races.rules import RaceRules, drift_corrected_seconds
from forecast_harness.verify.cost_control import PhaseTimer
from forecast_harness.verify.launches.answers import (
    malformed_answers_as_forgery,
    read_error,
    read_times,
)
from forecast_harness.verify.timing_job import ContestantRejected
from forecast_harness.verify.verdict import Reason, ReasonCode

CELL_MODULE = "forecast_harness.trials.judging.kernels.cell"
SOURCE_FILES = ("against.py", "variant.py")
_WARM_UP_LAUNCHES = 3
_MOST_AXES, _MOST_PROGRAMS = 3, 1 << 31
"""Of a grid, along each axis."""
MAX_RELATIVE_ERROR = 0.1
"""Error at real sizes, relative to the largest value, that only a wrong kernel shows. Verification is exact,
but at drawn sizes: this finds an offset that overflows."""
_CONFIG_ERRORS = (
    "OutOfResources",
    "CompilationError",
    "CompileTimeAssertionFailure",
    "PTXASError",
    "RecordError",
)


class KernelClock:
    """Times launches of two sources, each with one config, at all calls in turn."""

    def __init__(self, cell: Cell, launches: tuple[Sequence[Any], Sequence[Any]]) -> None:
        self._cell, self._launches = cell, launches
        self.seconds: dict[tuple[int, int], list[float]] = defaultdict(list)

    def sample(self, which: int, fresh: bool) -> float:
        """Geometric mean over calls of the seconds of one launch. Raises `ContestantRejected`."""
        asked = {"which": which, "launches": self._launches[which]}
        try:
            answer = self._cell.ask(f"{CELL_MODULE}:launch", asked)
            said = read_times(answer, len(self._launches[which]))
        except CandidateFault as fault:
            code = ReasonCode.TIMEOUT if "time" in str(fault.fault) else ReasonCode.FAILS
            raise ContestantRejected(which, [Reason(code, str(fault)[:2000])]) from fault
        for number, value in enumerate(said):
            self.seconds[which, number].append(value)
        return math.exp(statistics.fmean(math.log(v) for v in said))

    def warm_up(self) -> None:
        """Compile, and launch a few times; none of it counts."""
        for _ in range(_WARM_UP_LAUNCHES):
            for which in (INCUMBENT, CANDIDATE):
                self.sample(which, True)
        self.seconds.clear()


def race(work: JobContext) -> CellAnswer:
    """Race a variant's configs and time the best. The payload has `subjects`, `writes` and `updates` (of
    each), `against` and `variant` (`source`, `configs`; one of `against`), `device` and `rules`, and may have `hold`:
    all is compiled, launched and compared before it waits for that (see `HeldRace`).

    The value is as of `race`, with the call's number in place of a workload's name, and `unable`: the
    outcome of configs that could not run, by number, which is no fault of the variant; `steps` are its seconds.
    """
    asked, steps = work.payload, PhaseTimer()
    calls = [TimedCall.of(BaseKernel.from_json(s)) for s in asked["subjects"]]
    sides = [asked["against"], asked["variant"]]
    configs = [[Config.from_json(c) for c in side["configs"]] for side in sides]
    heat = HalvingRace(RaceRules.from_json(asked["rules"]), random.Random(os.urandom(16)))
    caught: dict[str, Any] = {}
    unable: dict[int, Outcome] = {}
    first = [call.launch(sides[0]["source"], configs[0][0]) for call in calls]
    with work.cell() as cell:
        with steps.phase("prepare"):
            _prepare_cell(cell, asked, calls, SOURCE_FILES)
        clocks: dict[int, KernelClock] = {}
        raced: dict[int, KernelClock] = {}

        def drop(n: int, found: ContestantRejected) -> None:
            if found.which == INCUMBENT:
                raise found
            cause = found.__cause__
            if (
                isinstance(cause, CandidateFault)
                and cause.fault is Fault.EXCEPTION
                and cause.kind in _CONFIG_ERRORS
            ):
                large = cause.kind == "OutOfResources"
                unable[n] = Outcome.OUT_OF_RESOURCES if large else Outcome.COMPILE_ERROR
                raced.pop(n, None)
                return
            caught[str(n)] = [r.to_json() for r in found.reasons]
            if isinstance(cause, CandidateFault):
                raise found  # a device that met a fault is not to be trusted with the others

        value: dict[str, Any] = {}
        try:
            each = [[call.launch(sides[1]["source"], config) for call in calls] for config in configs[1]]
            with steps.phase("compile"):
                _compile_ahead(cell, asked["device"], first, each)
            with steps.phase("warm_up"):
                for n, launches in enumerate(each):
                    clock = KernelClock(cell, (first, launches))
                    try:
                        clock.warm_up()
                        _check_agreement(cell, asked["writes"], first, launches)
                    except ContestantRejected as found:
                        drop(n, found)
                        continue
                    clocks[n] = raced[n] = clock
            with steps.phase("held"):
                wait_to_be_let_go(asked)
            with steps.phase("rungs"):
                ranking = heat.run_rungs(clocks, drop)
            if clocks and not caught:
                (best,) = clocks
                with steps.phase("contest"):
                    differences, ended = heat.time_winner(clocks[best])
                seconds = {key: statistics.median(times) for key, times in clocks[best].seconds.items()}
                theirs = {call: s for (which, call), s in seconds.items() if which == INCUMBENT}
                value = {
                    "winner": best,
                    "differences": differences,
                    "ended": ended,
                    "ranking": {str(n): d for n, d in ranking.items()},
                    "seconds": {f"{which}:{call}": s for (which, call), s in seconds.items()},
                    "timed": {
                        str(n): list(drift_corrected_seconds(c.seconds, theirs).values())
                        for n, c in raced.items()
                    },
                    "checks": len(configs[1]) - len(unable),
                }
        except ContestantRejected as found:
            if found.which == INCUMBENT:
                value = {"incumbent": [r.to_json() for r in found.reasons]}
            elif not caught:
                caught["0"] = [r.to_json() for r in found.reasons]
    lost = {str(n): str(outcome) for n, outcome in unable.items()}
    return CellAnswer(
        {**value, "caught": caught, "unable": lost, "spent": heat.spent, "steps": steps.to_json()}
    )


def trace(work: JobContext) -> CellAnswer:
    """The TTIR of one source under its `configs`, for each of `subjects`; opens no device.

    The payload has `subjects`, `source`, `configs` and `arch` (compute capability times ten). The value is a list with
    `ttir` (each text once), `which` (the number of each config's, or None), `grids`, `arguments` and `facts` for every
    subject: what `encode_facts` reads of each text, at the grids that it is launched with.
    """
    asked = work.payload
    calls = [TimedCall.of(BaseKernel.from_json(s)) for s in asked["subjects"]]
    configs = [Config.from_json(c) for c in asked["configs"]]
    launches = [[call.launch(asked["source"], c) for c in configs] for call in calls]
    with work.cell() as cell:
        about = {"device": "cpu", "empty": True, "subjects": asked["subjects"]}
        _prepare_cell(cell, about, calls, SOURCE_FILES[1:])
        said = cell.ask(f"{CELL_MODULE}:trace", {"calls": launches, "arch": asked["arch"]}).value
    with malformed_answers_as_forgery():
        return CellAnswer(
            [_with_facts(call, one, len(configs)) for call, one in zip(calls, said, strict=True)]
        )


def _with_facts(call: TimedCall, said: Mapping[str, Any], count: int) -> dict[str, Any]:
    """What a cell says of a call, with what is read of it here, where nobody waits for it.

    Raises `ValueError` for an answer of another form.
    """
    arguments = tuple(call.drawn.arguments)
    texts, which = [str(text) for text in said["ttir"]], list(said["which"])
    grids = [_launchable(grid) for grid in said["grids"]]
    numbers = [n for n in which if n is not None]
    if not len(which) == len(grids) == count or not all(type(n) is int for n in numbers):
        raise ValueError("a trace tells of other configs than were asked for")
    if not set(numbers) <= set(range(len(texts))):
        raise ValueError("a trace names texts that are not there")
    launched: dict[int, dict[Grid, None]] = {}
    for number, grid in zip(which, grids, strict=True):
        if number is not None:
            launched.setdefault(number, {})[grid] = None
    return {
        "ttir": texts,
        "which": which,
        "grids": [None if grid is None else list(grid) for grid in grids],
        "arguments": [a.to_json() for a in arguments],
        "facts": {str(n): encode_facts(texts[n], arguments, at) for n, at in launched.items()},
    }


def _launchable(grid: Any) -> Grid:
    """A grid as a cell told it; None for what no device launches."""
    if not isinstance(grid, list) or not 1 <= len(grid) <= _MOST_AXES:
        return None
    if not all(type(n) is int and 1 <= n < _MOST_PROGRAMS for n in grid):
        return None
    return tuple(grid)


def _prepare_cell(
    cell: Cell, asked: Mapping[str, Any], calls: Sequence[TimedCall], files: Sequence[str]
) -> None:
    updates = asked.get("updates") or [()] * len(calls)
    empty = bool(asked.get("empty"))
    payload = {
        "files": list(files),
        "kernel": asked["subjects"][0]["kernel"],
        "calls": [call.to_payload(u) for call, u in zip(calls, updates, strict=True)],
        "device": asked["device"],
        "seed": int.from_bytes(os.urandom(6)),
        "empty": empty,
    }
    arrays = {} if empty else {k: v for n, call in enumerate(calls) for k, v in call.arrays(n).items()}
    cell.ask(f"{CELL_MODULE}:prepare", payload, arrays)


def _compile_ahead(cell: Cell, device: str, first: Sequence[Any], each: Sequence[Sequence[Any]]) -> None:
    """Have all launches compiled side by side; one that cannot be fails when it is launched."""
    if device == "cpu":
        return  # an interpreter compiles nothing
    try:
        cell.ask(f"{CELL_MODULE}:compile_launches", {"sides": [[first], each]})
    except CandidateFault as fault:
        raise ContestantRejected(CANDIDATE, [Reason(ReasonCode.FAILS, str(fault)[:2000])]) from fault


def _check_agreement(cell: Cell, writes: Sequence[Any], first: Sequence[Any], second: Sequence[Any]) -> None:
    """Compare results at real sizes. Raises `ContestantRejected`."""
    pairs = [list(p) for p in zip(first, second, strict=True)]
    try:
        error = read_error(cell.ask(f"{CELL_MODULE}:compare", {"pairs": pairs, "writes": writes}))
    except CandidateFault as fault:
        raise ContestantRejected(CANDIDATE, [Reason(ReasonCode.FAILS, str(fault)[:2000])]) from fault
    if error > MAX_RELATIVE_ERROR:
        text = f"at the sizes of the calls, results differ by {error:.3g} of the largest value"
        raise ContestantRejected(CANDIDATE, [Reason(ReasonCode.WRONG_VALUES, text)])
