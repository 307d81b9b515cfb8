"""The timing jobs of a search: configs of a source race each other, the winner is timed against the incumbent.

They run in a sandbox judge. `Race` has rungs, blocks and their results; its subclasses launch contestants, by kind of
target. `trace` reads the IR of a variant's configs.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from forecast_autotune.features.candidate_list import Grid
from forecast_autotune.features.traced_texts import encode_facts
from forecast_autotune.records import Config, Outcome
from forecast_harness.clocks.devices import reserve_processors
from forecast_harness.clocks.paired_comparison import (
    CANDIDATE,
    INCUMBENT,
    PairedClock,
    SignTest,
    TrialClock,
    measure_block,
)
from forecast_harness.sandbox.api import CandidateFault, Cell, CellAnswer, JobContext
from forecast_harness.targets.kernels.base_kernel import BaseKernel
from forecast_harness.targets.packs.schema import Language, Pack
from forecast_harness.trials.kernel_calls import TimedCall, error_limits
from forecast_harness.trials.race import RaceRules, drift_corrected_seconds, standard_error, wait_to_be_let_go
from forecast_harness.trials.variants.base_runner import is_config_error
from forecast_harness.verify.answers import (
    malformed_answers_as_forgery,
    read_error,
    read_times,
)
from forecast_harness.verify.cost_control import PhaseTimer
from forecast_harness.verify.examiner import SolutionExaminer
from forecast_harness.verify.launcher import NullCell
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problem import LaunchCase, problem_of
from forecast_harness.verify.timing_job import CellClock, open_null_cell, prepared_examiner
from forecast_harness.verify.verdict import ContestantRejected, Judgement, Reason, ReasonCode

CELL_MODULE = "forecast_harness.trials.kernel_cell"
SOURCE_FILES = ("against.py", "variant.py")
_WARM_UP_LAUNCHES = 3
_MOST_AXES, _MOST_PROGRAMS = 3, 1 << 31
"""The most axes of a grid, and the most programs along each."""
C = TypeVar("C", bound=PairedClock)


class HalvingRace:
    """Runs blocks and counts what they cost."""

    def __init__(self, rules: RaceRules, rng: random.Random) -> None:
        self._rules, self._rng = rules, rng
        self.spent = 0.0
        """Seconds of launches."""

    def run_rungs(
        self,
        clocks: dict[int, C],
        drop: Callable[[int, ContestantRejected], None],
        retire: Callable[[int], None] = lambda n: None,
    ) -> dict[int, float]:
        """Drop the slower half, with twice the blocks each time, until at most one clock is left.

        `drop` is called for a config that was caught, `retire` for one that is slower; both are removed from
        `clocks`. Successive halving (Karnin, Koren and Somekh 2013; Jamieson and Talwalkar 2016). Returns the
        median difference of each when it was last timed.
        """
        ranking: dict[int, float] = {}
        blocks = self._rules.rung
        while len(clocks) > 1:
            for n in list(clocks):
                try:
                    ranking[n] = statistics.median(self._measure_block(clocks[n]) for _ in range(blocks))
                except ContestantRejected as rejection:
                    del clocks[n]
                    drop(n, rejection)
            order = sorted(clocks, key=lambda n: (-ranking[n], n))
            for n in order[-(-len(order) // 2) :] if len(order) > 1 else []:
                del clocks[n]
                retire(n)
            blocks *= 2
        return ranking

    def time_winner(self, clock: PairedClock) -> tuple[list[float], str]:
        """Fresh blocks of the winner until it is known well enough, and why that was.

        Blocks of the race are left out: they were selected for being fast. Raises `ContestantRejected`.
        """
        rules, result = self._rules, list[float]()
        faster, slower = SignTest(0.0), SignTest(0.0)
        began, since = self.spent, time.perf_counter()
        while True:
            result.append(self._measure_block(clock))
            faster.add(result[-1])
            slower.add(-result[-1])
            n = len(result)
            if n == rules.first and max(result) < -rules.hopeless:
                return result, "hopeless"
            if n >= rules.least:
                if slower.reached(rules.alpha):
                    return result, "slower"
                if standard_error(result) <= rules.precise * math.log(2):
                    return result, "precise"
                if faster.reached(rules.alpha) and n >= 2 * rules.least:
                    return result, "faster"
            late = time.perf_counter() - since >= rules.wall
            if n >= rules.most or late or self.spent - began >= rules.seconds:
                return result, "budget"

    def _measure_block(self, clock: PairedClock) -> float:
        difference, seconds = measure_block(clock, self._rng)
        self.spent += seconds
        return difference


class KernelClock:
    """Times launches of two sources, each with one config, at all calls in turn."""

    def __init__(
        self, cell: Cell, launches: tuple[Sequence[Any], Sequence[Any]], writes: Sequence[Any]
    ) -> None:
        """`writes`: of every call, the tensors that are compared, each with its limit of `error_limits`."""
        self._cell, self._launches, self._writes = cell, launches, writes
        self.checks = 0
        self.seconds: dict[tuple[int, int], list[float]] = defaultdict(list)

    def sample(self, which: int, fresh: bool) -> float:
        """Geometric mean over calls of the seconds of one launch. Raises `ContestantRejected`."""
        request = {"which": which, "launches": self._launches[which]}
        try:
            answer = self._cell.ask(f"{CELL_MODULE}:launch", request)
            seconds = read_times(answer, len(self._launches[which]))
        except CandidateFault as fault:
            code = ReasonCode.TIMEOUT if "time" in str(fault.fault) else ReasonCode.FAILS
            raise ContestantRejected(which, [Reason(code, str(fault)[:2000])]) from fault
        for number, value in enumerate(seconds):
            self.seconds[which, number].append(value)
        return math.exp(statistics.fmean(math.log(v) for v in seconds))

    def place(self) -> None:
        """Launch each side a few times; none of it counts. Tensors were placed, and all compiled, for all configs."""
        for _ in range(_WARM_UP_LAUNCHES):
            for which in (INCUMBENT, CANDIDATE):
                self.sample(which, True)
        self.seconds.clear()

    def check(self) -> None:
        """Compare results at real sizes. Raises `ContestantRejected`."""
        pairs = [list(pair) for pair in zip(*self._launches, strict=True)]
        try:
            answer = self._cell.ask(f"{CELL_MODULE}:compare", {"pairs": pairs, "writes": self._writes})
            error = read_error(answer)
        except CandidateFault as fault:
            raise ContestantRejected(CANDIDATE, [Reason(ReasonCode.FAILS, str(fault)[:2000])]) from fault
        self.checks += 1
        if error > 1.0:
            text = f"at the sizes of the calls, results differ by {error:.3g} times what roundings explain"
            raise ContestantRejected(CANDIDATE, [Reason(ReasonCode.WRONG_VALUES, text)])


class Race(ABC):
    """A race of a source's configs beside the incumbent, in any kind of cell; each timing job is one."""

    def __init__(self, rules: RaceRules, seed: bytes) -> None:
        self.heat, self.steps = HalvingRace(rules, random.Random(seed)), PhaseTimer()
        self.caught: dict[int, Sequence[Reason]] = {}
        """The reasons against each config, by number."""
        self.unable: dict[int, Outcome] = {}
        """The outcomes of configs that could not run, which is no fault of the source."""

    checks_first: ClassVar[bool]
    """Whether results are compared before anything is timed, or those of the winner at the end: each config of a
    source that was verified in one of them alone is still to be verified."""

    @abstractmethod
    def open_clock(self, n: int) -> TrialClock:
        """The clock of a config. Raises `ContestantRejected`."""

    @abstractmethod
    def reject(self, n: int, rejection: ContestantRejected) -> None:
        """Note why a config is rejected. Raises the rejection where the race cannot go on."""

    @abstractmethod
    def retire(self, n: int) -> None:
        """A config is slower, and not launched again."""

    @property
    def is_spoiled(self) -> bool:
        """Whether a fault of one config rules out the others, too."""
        return any(r.judgement is Judgement.SUSPICIOUS for reasons in self.caught.values() for r in reasons)

    def run(self, count: int, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Warm up, race, time the winner. With `hold` in the payload, it waits after the warm-up (see `PreparedRace`).

        The value has `winner` (a config's number), `differences` (natural log of incumbent's over candidate's time, one
        per block), `ended` (why no more blocks), `ranking` (config number -> median difference when it was last timed),
        `seconds` (median per contestant, 0 or 1, and workload), `timed` (seconds by workload of every config that was
        raced, see `drift_corrected_seconds`) and `checks`; it is empty where no config is left.
        """
        clocks: dict[int, TrialClock] = {}
        with self.steps.phase("warm_up"):
            for n in range(count):
                try:
                    clock = self.open_clock(n)
                    clock.place()
                    if self.checks_first:
                        clock.check()
                    clocks[n] = clock
                except ContestantRejected as rejection:
                    self.reject(n, rejection)
        all_clocks = dict(clocks)
        with self.steps.phase("held"):
            wait_to_be_let_go(payload)
        with self.steps.phase("rungs"):
            ranking = self.heat.run_rungs(clocks, self.reject, self.retire)
        if not clocks or self.is_spoiled:
            return {}
        (best,) = clocks
        try:
            with self.steps.phase("contest"):
                differences, stop_reason = self.heat.time_winner(clocks[best])
                if not self.checks_first:
                    clocks[best].check()
        except ContestantRejected as rejection:
            self.reject(best, rejection)
            return {}
        samples = {n: dict(c.seconds) for n, c in all_clocks.items() if n not in {*self.caught, *self.unable}}
        seconds = {key: statistics.median(times) for key, times in samples[best].items()}
        theirs = {name: s for (which, name), s in seconds.items() if which == INCUMBENT}
        return {
            "winner": best,
            "differences": differences,
            "ended": stop_reason,
            "ranking": {str(n): d for n, d in ranking.items()},
            "seconds": {f"{which}:{name}": s for (which, name), s in seconds.items()},
            "timed": {str(n): list(drift_corrected_seconds(s, theirs).values()) for n, s in samples.items()},
            "checks": clocks[best].checks,
        }

    def answer(self, race: Callable[[], dict[str, Any]]) -> CellAnswer:
        """The job's answer: the value of `race`, `caught` (reasons by config number), `unable`, `spent` (seconds of
        launches) and `steps`; of an incumbent that could not be timed, the reasons as `incumbent`."""
        value: dict[str, Any] = {}
        try:
            value = race()
        except ContestantRejected as rejection:
            if rejection.which == INCUMBENT:
                value = {"incumbent": [r.to_json() for r in rejection.reasons]}
            elif not self.caught:
                self.caught[0] = rejection.reasons
        caught = {str(n): [r.to_json() for r in reasons] for n, reasons in self.caught.items()}
        unable = {str(n): str(outcome) for n, outcome in self.unable.items()}
        facts = {"caught": caught, "unable": unable, "spent": self.heat.spent, "steps": self.steps.to_json()}
        return CellAnswer({**value, **facts})


def race_kernel(work: JobContext) -> CellAnswer:
    """Race a variant's configs and time the best.

    The payload has `subjects`, `writes` and `updates` (of each), `against` and `variant` (`source`, `configs`),
    `device` and `rules`. A workload's name is the number of a call. The value's `beside` is the number of the first
    config of `against` that runs.
    """
    with work.cell() as cell:
        race = _KernelRace(cell, work.payload)
        return race.answer(lambda: race.run_all(work.payload))


class _KernelRace(Race):
    """All configs in one cell, compiled side by side."""

    checks_first = True

    def __init__(self, cell: Cell, request: Mapping[str, Any]) -> None:
        super().__init__(RaceRules.from_json(request["rules"]), os.urandom(16))
        self._cell = cell
        calls = [TimedCall.of(BaseKernel.from_json(s)) for s in request["subjects"]]
        limits = (
            error_limits({a.name: a.dtype for a in c.drawn.arguments if a.kind == "tensor"}, c.subject.source)
            for c in calls
        )
        self._writes = [{n: each[n] for n in w} for w, each in zip(request["writes"], limits, strict=True)]
        theirs, own = request["against"], request["variant"]
        besides = (Config.from_json(c) for c in theirs["configs"])
        self._calls, self._besides = calls, [[c.launch(theirs["source"], b) for c in calls] for b in besides]
        configs = (Config.from_json(c) for c in own["configs"])
        self._each = [[call.launch(own["source"], config) for call in calls] for config in configs]

    def run_all(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Open the cell and compile, then `run`."""
        with self.steps.phase("prepare"):
            _prepare_cell(self._cell, request, self._calls, SOURCE_FILES)
        with self.steps.phase("compile"):
            _compile_ahead(self._cell, request["device"], self._besides[0], self._each)
        self._first, beside = self._besides[0], 0
        while len(self._besides) > 1:  # else it is known to run
            try:
                KernelClock(self._cell, (self._first, self._first), self._writes).sample(INCUMBENT, True)
                break
            except ContestantRejected as rejection:
                if not is_config_error(rejection.__cause__) or beside + 1 == len(self._besides):
                    raise
                beside += 1
                self._first = self._besides[beside]
        return {**self.run(len(self._each), request), "beside": beside}

    def open_clock(self, n: int) -> KernelClock:
        return KernelClock(self._cell, (self._first, self._each[n]), self._writes)

    def reject(self, n: int, rejection: ContestantRejected) -> None:
        if rejection.which == INCUMBENT:
            raise rejection
        cause = rejection.__cause__
        if is_config_error(cause):
            large = cause.kind == "OutOfResources"
            self.unable[n] = Outcome.OUT_OF_RESOURCES if large else Outcome.COMPILE_ERROR
            return
        self.caught[n] = rejection.reasons
        if isinstance(cause, CandidateFault):
            raise rejection  # a device that met a fault is not to be trusted with the others

    def retire(self, n: int) -> None:
        """Nothing is closed: the other configs run in the same cell."""

    @property
    def is_spoiled(self) -> bool:
        """Whether any config was caught: all configs share one source."""
        return bool(self.caught)


def race_pack(work: JobContext) -> CellAnswer:
    """Race a solution's configs and time the best: every launch is under suspicion, as in `verify.timing_job`.

    The payload has `pack`, `plan`, `rules`, and of each contestant `file`, `entry` and `language`: `against` is the
    incumbent, `configs` are the candidate's.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cells:
        race = _PackRace(work, Path(folder), cells)
        return race.answer(race.run_all)


class _PackRace(Race):
    """Every config in a cell of its own: one that crashes takes no other along.

    All are timed in pairs with the incumbent, so that drift and co-tenants meet both sides of every comparison.
    """

    checks_first = False

    def __init__(self, work: JobContext, folder: Path, cells: ExitStack) -> None:
        self._work, self._payload, self._cells = work, work.payload, cells
        self._pack = Pack.from_json(self._payload["pack"])
        self._plan = VerificationPlan.from_json(self._payload["plan"])
        self._problem, self._seed = problem_of(self._pack, folder), os.urandom(16)
        super().__init__(RaceRules.from_json(self._payload["rules"]), self._seed)
        self._processors = reserve_processors() if self._plan.device == "cpu" else ()
        self._open_cells: dict[int, Cell] = {}
        self._cases: list[LaunchCase] = []
        """Shared, so that the incumbent's cell need not be sent each clock's own."""
        self._base: SolutionExaminer | None = None
        self._null: NullCell | None = None

    def run_all(self) -> dict[str, Any]:
        """Open the incumbent's cell, then `run`."""
        against, configs = self._payload["against"], self._payload["configs"]
        self._base = self._prepared_judge(-1, against)
        languages = (Language(contestant["language"]) for contestant in (against, *configs))
        self._workloads = self._pack.timed_workloads(self._plan.device, *languages)
        if self._plan.device == "cpu":
            self._null = open_null_cell(self._work, self._cells, self._processors)
        return self.run(len(configs), self._payload)

    def open_clock(self, n: int) -> CellClock:
        assert self._base is not None
        judge = self._prepared_judge(n, self._payload["configs"][n])
        return CellClock((self._base, judge), self._workloads, self._cases, self._null)

    def reject(self, n: int, rejection: ContestantRejected) -> None:
        if rejection.which == INCUMBENT:
            raise rejection
        self.caught[n] = rejection.reasons
        self.retire(n)

    def retire(self, n: int) -> None:
        self._open_cells[n].close()

    def _prepared_judge(self, n: int, contestant: Mapping[str, Any]) -> SolutionExaminer:
        """A judge over a fresh cell that has imported the contestant. Raises `ContestantRejected`."""
        cell = self._open_cells[n] = self._cells.enter_context(self._work.cell(processors=self._processors))
        seed = hashlib.sha256(self._seed + str(n).encode()).digest()
        examiner = SolutionExaminer(self._pack, self._problem, cell, self._plan, seed)
        return prepared_examiner(INCUMBENT if n < 0 else CANDIDATE, contestant, examiner)


def trace(work: JobContext) -> CellAnswer:
    """The TTIR of one source under its `configs`, for each of `subjects`; opens no device.

    The payload has `subjects`, `source`, `configs` and `arch` (compute capability times ten). The value is a list with
    `ttir` (each text once), `which` (the number of each config's, or None), `grids`, `arguments` and `facts` for every
    subject: what `encode_facts` reads of each text, at the grids that it is launched with.
    """
    request = work.payload
    calls = [TimedCall.of(BaseKernel.from_json(s)) for s in request["subjects"]]
    configs = [Config.from_json(c) for c in request["configs"]]
    launches = [[call.launch(request["source"], c) for c in configs] for call in calls]
    with work.cell() as cell:
        settings = {"device": "cpu", "empty": True, "subjects": request["subjects"]}
        _prepare_cell(cell, settings, calls, SOURCE_FILES[1:])
        answers = cell.ask(f"{CELL_MODULE}:trace", {"calls": launches, "arch": request["arch"]}).value
    with malformed_answers_as_forgery():
        return CellAnswer(
            [_with_facts(call, answer, len(configs)) for call, answer in zip(calls, answers, strict=True)]
        )


def _with_facts(call: TimedCall, answer: Mapping[str, Any], count: int) -> dict[str, Any]:
    """A cell's answer about a call, with facts read from it here, where nobody waits for it.

    Raises `ValueError` for an answer of another form.
    """
    arguments = tuple(call.drawn.arguments)
    texts, which = [str(text) for text in answer["ttir"]], list(answer["which"])
    grids = [_launchable(grid) for grid in answer["grids"]]
    numbers = [n for n in which if n is not None]
    if not len(which) == len(grids) == count or not all(type(n) is int for n in numbers):
        raise ValueError("a trace tells of other configs than were asked for")
    if not set(numbers) <= set(range(len(texts))):
        raise ValueError("a trace names texts that are not there")
    grids_of_text: dict[int, dict[Grid, None]] = {}
    for number, grid in zip(which, grids, strict=True):
        if number is not None:
            grids_of_text.setdefault(number, {})[grid] = None
    return {
        "ttir": texts,
        "which": which,
        "grids": [None if grid is None else list(grid) for grid in grids],
        "arguments": [a.to_json() for a in arguments],
        "facts": {str(n): encode_facts(texts[n], arguments, at) for n, at in grids_of_text.items()},
    }


def _launchable(grid: Any) -> Grid:
    """A grid of a cell's answer; None for one that no device launches."""
    if not isinstance(grid, list) or not 1 <= len(grid) <= _MOST_AXES:
        return None
    if not all(type(n) is int and 1 <= n < _MOST_PROGRAMS for n in grid):
        return None
    return tuple(grid)


def _prepare_cell(
    cell: Cell, request: Mapping[str, Any], calls: Sequence[TimedCall], files: Sequence[str]
) -> None:
    updates = request.get("updates") or [()] * len(calls)
    empty = bool(request.get("empty"))
    payload = {
        "files": list(files),
        "kernel": request["subjects"][0]["kernel"],
        "calls": [call.to_payload(u) for call, u in zip(calls, updates, strict=True)],
        "device": request["device"],
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
