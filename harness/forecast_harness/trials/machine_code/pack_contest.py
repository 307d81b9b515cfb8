"""Contests of two solutions of a pack through machine code: no Python of theirs is near the clock."""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from forecast_autotune.errors import ForecastAutotuneError
from forecast_harness.clocks.compilation.workers import BuildRequest, CompileWorkers
from forecast_harness.clocks.devices import exclusive
from forecast_harness.clocks.paired_comparison import StoppingRules, run_comparison
from forecast_harness.clocks.records import Program
from forecast_harness.clocks.runner.client import (
    NoMachineCodePath,
    RunnerClient,
    facts_for_workers,
    open_healthy_runner,
)
from forecast_harness.clocks.runner.messages import PAUSES, ProgramFault, RunnerFaultKind, TimingLimits
from forecast_harness.clocks.times import impossible_time
from forecast_harness.targets.packs.schema import Language, Pack, Solution
from forecast_harness.trials.bench import ContestUnavailable
from forecast_harness.trials.machine_code.targets import PackCalls, PreparedCall, RunnerClock
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.verdict import CheckedLaunches, ContestantRejected

_BATCH = TimingLimits(least=8 * PAUSES, most=8 * PAUSES, bound_s=1e6, checks=2)
"""Launches that are asked for at once: no bound ends them, the rules of the contest do."""
_ALWAYS_CHECKED = 4
"""Batches whose outputs are compared in any case; the n-th later one's are with the chance `_ALWAYS_CHECKED` / n:
to compare takes longer than to launch, and a contest may have hundreds of batches."""
_LEAST_WALL_S, _MOST_WALL_S = 5.0, 20.0
"""Seconds after which a contest ends undecided, however short its launches are, as its other work takes as long as
they do; the first where a confirmation has little time."""
PROTOCOL = "machine-code"


RequestOf = Callable[[str, Solution, Mapping[str, PreparedCall]], BuildRequest]
"""(name, solution, calls) -> how it is compiled for them. Raises `ContestUnavailable` for one that cannot be."""


def triton_request(name: str, solution: Solution, calls: Mapping[str, PreparedCall]) -> BuildRequest:
    """The request to compile a Triton solution. Raises `ContestUnavailable` for another one."""
    if solution.language is not Language.TRITON or solution.files:
        raise ContestUnavailable(f"{solution.name} is no Triton solution in one file")
    cases = tuple(c.arguments for c in calls.values())
    return BuildRequest(name, solution.source, solution.entry, cases)


class PackContests:
    """Contests between solutions of one pack on one device, each in a fresh runner and on fresh inputs."""

    def __init__(
        self,
        pack: Pack,
        plan: VerificationPlan,
        rules: StoppingRules,
        opened: tuple[RunnerClient, CompileWorkers] | None = None,
        request_of: RequestOf | None = None,
    ) -> None:
        """`opened`: a runner and compile workers that nobody else uses then; by default each contest opens its own.

        `request_of`: how solutions are compiled; by default as Triton.
        """
        self._pack, self._plan, self._rules, self._processes = pack, plan, rules, opened
        self._request_of = request_of or triton_request

    def __call__(self, incumbent: Solution, candidate: Solution) -> Mapping[str, Any]:
        """The value of a contest, as the timing job of host code gives it. Raises `ContestUnavailable`."""
        for solution in (incumbent, candidate):
            self._request_of("", solution, {})
        try:
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                if self._processes is not None:
                    self._processes[0].renew()
                    return self.compare(*self._processes, folder, incumbent, candidate)
                runner = open_healthy_runner(self._plan.index, self._plan.uuid)
                stack.callback(runner.close)
                builder = stack.enter_context(CompileWorkers(facts_for_workers(runner), 2))
                return self.compare(runner, builder, folder, incumbent, candidate)
        except (ForecastAutotuneError, NoMachineCodePath, OSError) as error:
            raise ContestUnavailable(str(error)) from error

    def compare(
        self,
        runner: RunnerClient,
        builder: CompileWorkers,
        folder: Path,
        incumbent: Solution,
        candidate: Solution,
    ) -> Mapping[str, Any]:
        """One contest with this runner. Raises `ContestUnavailable` and what the runner raises."""
        began = time.perf_counter()
        source = PackCalls(self._pack, folder)
        workloads = self._pack.timed_workloads(self._plan.device, Language.TRITON)
        calls = {w.name: source.draw({n: int(v) for n, v in w.axes.items()}) for w in workloads}
        programs = _programs(builder, self._request_of, calls, (incumbent, candidate))

        def implausible(name: str, seconds: float) -> str:
            case = calls[name].case
            return impossible_time(seconds, case.moved_bytes, case.flops, self._plan.peaks)

        batches, chance = itertools.count(1), random.SystemRandom()
        clock = RunnerClock(
            runner.time_calls,
            calls,
            {name: [ours[n] for ours in programs] for n, name in enumerate(calls)},
            implausible,
            _BATCH,
            checks_by_chance=lambda: chance.random() * next(batches) < _ALWAYS_CHECKED,
        )
        until = time.perf_counter() + min(_MOST_WALL_S, max(_LEAST_WALL_S, 2 * self._rules.seconds))
        try:
            with exclusive(self._plan.device_lock):
                outcome = run_comparison(
                    clock,
                    self._rules,
                    chance.getrandbits(32),
                    too_long=lambda: time.perf_counter() > until,
                )
        except ContestantRejected as rejection:
            fault = rejection.__cause__
            if isinstance(fault, ProgramFault) and fault.kind is RunnerFaultKind.REFUSED:
                # By limits of ours, or for want of memory.
                raise ContestUnavailable(fault.detail[:500]) from fault
            return {"caught": rejection.which, "reasons": [r.to_json() for r in rejection.reasons]}
        launches = CheckedLaunches(clock.checks, clock.checks, time.perf_counter() - began)
        return {
            "duel": outcome.to_json(),
            "seconds": {f"{which}:{name}": times for (which, name), times in clock.seconds.items()},
            "protocols": dict.fromkeys(calls, PROTOCOL),
            "checked": launches.to_json(),
        }


def _programs(
    builder: CompileWorkers,
    request_of: RequestOf,
    calls: Mapping[str, PreparedCall],
    solutions: Sequence[Solution],
) -> list[Sequence[Program]]:
    """Programs of each solution, one for each call. Raises `ContestUnavailable`."""
    building = [builder.submit(request_of(f"{n}: {s.name}", s, calls)) for n, s in enumerate(solutions)]
    builds = [b.result() for b in building]
    for s, build in zip(solutions, builds, strict=True):
        if not build.programs:
            raise ContestUnavailable(f"{s.name}: {build.host_code or build.error or build.infrastructure}")
    return [build.programs for build in builds]
