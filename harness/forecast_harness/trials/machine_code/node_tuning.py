"""The configs of one node, timed until its best is known: as few are compiled, and for as few calls, as tell that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from forecast_autotune.records import Outcome
from forecast_harness.clocks.compilation.requests import BuildResult
from forecast_harness.clocks.records import Program
from forecast_harness.records import NodeJob
from forecast_harness.trials.judging.lane_judge import COMPILE_ERRORS
from forecast_harness.trials.machine_code.node_builds import NodeBuilds, node_key, parts_by_code
from forecast_harness.trials.machine_code.node_trial import NodeRefused, NodeTrial, NoMachineCode, PathFailed
from forecast_harness.trials.machine_code.shared_host import WorkUnderWay
from forecast_harness.trials.machine_code.shared_runner import SharedRunner
from forecast_harness.trials.machine_code.target_trials import TargetTrials, TrialConfig, first_violation

_HOPELESS = 1.3
"""Times the rival's seconds, at which a config is given up."""
_FAR_BEYOND = 2.0
"""Times the rival's seconds, beyond which the first config speaks for its source: no other one is compiled."""
_FIRST_CONFIGS = 2
"""Configs of which one must not be hopeless for others to be compiled; these are compiled for all calls at once."""
_BEHIND_BEST = 1.05
"""Times the seconds of the source's best config so far, at which another one is given up."""


class NodeTuner:
    """Compiles, checks and times configs of nodes. `tuned` may be called from many threads."""

    def __init__(
        self, builds: NodeBuilds, runner: SharedRunner, trials: TargetTrials, work: WorkUnderWay
    ) -> None:
        self._builds, self._runner, self._trials, self._work = builds, runner, trials, work
        self._rival_seconds: dict[tuple[str, str], float] = {}

    def tuned(self, job: NodeJob) -> NodeTrial:
        """A trial of which one config at least is timed at all calls.

        Raises `NodeRefused` where none runs, `NoMachineCode`, `PathFailed`.
        """
        with self._runner.spending("configs"):
            configs, note = self._trials.configs(job, self._work.check)
        # Nobody else needs them: waiting for the first to be promising would save nothing.
        ahead = max(1, min(len(configs), self._builds.idle))
        building = {n: self._begin(job, configs[n]) for n in range(ahead)}
        trial, parts = self._opened(job, configs, note)
        failure = self._time_configs(trial, building, parts)
        if not trial.seconds:
            raise failure
        timed = {**trial.partly, **trial.seconds}
        self._trials.learn(
            job,
            [(configs[n], [s.get(name, math.nan) for name in trial.rivals]) for n, s in timed.items()],
            [*trial.rival_s.values()],
        )
        return trial

    def programs(self, built: BuildResult, cases: Sequence[int] = ()) -> Mapping[str, Program]:
        """A config's programs by workload, right on the small call where that is one of these cases.

        Raises `NodeRefused`, `NoMachineCode`, `PathFailed`.
        """
        if built.infrastructure:
            raise PathFailed(built.infrastructure)
        if built.host_code:
            raise NoMachineCode(built.host_code)
        if built.error:
            if COMPILE_ERRORS.search(built.error):
                raise NodeRefused(Outcome.COMPILE_ERROR, "compile", built.error)
            raise NoMachineCode(f"its launches could not be recorded: {built.error}")
        calls = self._trials.calls
        numbers = cases or range(1 + len(calls.timed))
        found = dict(zip(numbers, map(self._trials.sealed, built.programs), strict=True))
        if (small := found.get(0)) is not None:
            answer = self._runner.check(small, calls.small)
            if said := first_violation(answer.violations) or calls.small.wrong(small, answer.launches):
                raise NodeRefused(Outcome.INCORRECT, "verify", said)
        return {name: found[n] for n, name in enumerate(calls.timed, 1) if n in found}

    def is_hopeless(self, trial: NodeTrial, times: float = _HOPELESS) -> bool:
        """Whether every config so far is far from the rival on the whole."""
        return bool(trial.seconds) and trial.log_ratio(trial.best) > math.log(times)

    # --- the rival ---

    def _opened(
        self, job: NodeJob, configs: Sequence[TrialConfig], note: str
    ) -> tuple[NodeTrial, tuple[Sequence[int], Sequence[int]]]:
        """A trial beside the rival, and the cases for which configs are compiled first, and later.

        Raises `NoMachineCode`, `PathFailed`.
        """
        chosen = job.against_config or (configs[0] if job.against.id == job.node.id else {})
        with self._runner.spending("builds"):
            built = self._builds.begin_once(job.against, chosen, self._runner.began).result()
        if built.host_code:
            raise NoMachineCode(f"the node to be timed beside: {built.host_code}")
        if not built.programs:
            self._builds.forget(job.against, chosen)
            raise PathFailed(f"the node to be timed beside: {built.error or built.infrastructure}")
        programs = [self._trials.sealed(p) for p in built.programs[1:]]
        rivals = dict(zip(self._trials.calls.timed, programs, strict=True))
        keys = {name: (node_key(job.against, chosen), name) for name in rivals}
        try:
            missing = {n: (p, 0.0) for n, p in rivals.items() if keys[n] not in self._rival_seconds}
            for name, seconds in self._runner.seconds(missing).items():
                self._rival_seconds[keys[name]] = seconds
        except NodeRefused as refused:
            raise PathFailed(f"the node to be timed beside: {refused.detail}") from refused
        rival_s = {name: self._rival_seconds[key] for name, key in keys.items()}
        # CUDA is compiled once for all calls.
        parts = parts_by_code(built.programs) if built.request.cuda is None else ((), ())
        return NodeTrial(job, configs, note, rivals, rival_s), parts

    # --- its own configs ---

    def _begin(self, job: NodeJob, config: TrialConfig, cases: Sequence[int] = ()) -> Future[BuildResult]:
        return self._builds.begin(job.node, config, self._runner.began, cases)

    def _time_configs(
        self,
        trial: NodeTrial,
        building: dict[int, Future[BuildResult]],
        parts: tuple[Sequence[int], Sequence[int]],
    ) -> NodeRefused:
        """Time all that may be the best, and some that are not; why the last that failed did.

        `building` holds those that are compiled for all calls. Raises as `programs`, where the first config is wrong.
        """
        job, configs, (first, rest) = trial.job, trial.configs, parts
        failure = NodeRefused(Outcome.COMPILE_ERROR, "compile", "no config was built")
        cases = dict[int, Sequence[int]]()
        resting = dict[int, Future[BuildResult]]()
        for number in range(len(configs)):
            if number not in building:  # one of the first may win: all others are compiled at once
                left = range(number, len(configs)) if number >= _FIRST_CONFIGS else (number,)
                cases |= {n: first for n in left if n >= _FIRST_CONFIGS and rest}
                building |= {n: self._begin(job, configs[n], cases.get(n, ())) for n in left}
            try:
                self._time_config(trial, number, building[number], cases.get(number, ()))
            except NodeRefused as refused:
                failure = refused
                if number == 0 and refused.outcome is Outcome.INCORRECT:
                    raise
            if number < _FIRST_CONFIGS and self._ends_after(trial, number):
                break
            if number in trial.partly and not trial.is_behind(number):
                resting[number] = self._begin(job, configs[number], rest)
        for number, more in resting.items():
            if trial.is_behind(number):
                more.cancel()
                continue
            try:
                self._time_config(trial, number, more, rest, is_last=True)
            except NodeRefused as refused:
                failure = refused
                trial.partly.pop(number, None)  # how fast a wrong config is teaches nothing
        return failure

    def _time_config(
        self,
        trial: NodeTrial,
        number: int,
        building: Future[BuildResult],
        cases: Sequence[int],
        is_last: bool = False,
    ) -> None:
        """Time a config at the calls of these cases, or at all; not one that takes too long to compile."""
        with self._runner.spending("builds"):
            built = self._builds.within_patience(building, trial.usual_s, self._work.check)
        if built is None:
            trial.late += 1
            return
        programs = self.programs(built, cases)
        best = trial.seconds[trial.best] if trial.seconds else {}
        asked = {}
        for name, program in programs.items():
            bound = trial.rival_s[name] * _HOPELESS
            asked[name] = program, min(bound, best.get(name, bound) * _BEHIND_BEST)
        trial.add(number, programs, self._runner.seconds(asked), is_whole=is_last or not cases)
        trial.usual_s = max(trial.usual_s or 0.0, built.seconds)

    def _ends_after(self, trial: NodeTrial, number: int) -> bool:
        """Whether no config after this one is worth its compilation."""
        return self.is_hopeless(trial, _HOPELESS if number == _FIRST_CONFIGS - 1 else _FAR_BEYOND)
