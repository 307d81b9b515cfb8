"""Nodes of a search judged through machine code: a `NodeJudge` whose candidates run no Python where the clock is.

Many threads share one device: each compiles, checks and times one node, and the runner takes one request after
the other, so the device works while others compile. Dear work is done for those that may still win: one config
is compiled, checked on a small call and timed against the rival's seconds before others are. Full verification is a
job of its own, `verify`, which the search asks for where a node may become the fastest of all, while others are
judged. A solution that is not of kernels alone is judged as host code, and so is everything where the runner fails and
that is asked for.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Outcome
from forecast_harness.clocks.compilation.requests import BuildResult
from forecast_harness.clocks.compilation.workers import CompileWorkers
from forecast_harness.clocks.devices import DeviceBusy
from forecast_harness.clocks.paired_comparison import CANDIDATE, INCUMBENT, TrialClock
from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.clocks.runner.messages import PAUSES, TimingLimits
from forecast_harness.records import (
    MIN_PROGRESS,
    ConfirmationJob,
    FullVerification,
    NodeJob,
    NodeResult,
    VerificationJob,
)
from forecast_harness.sandbox.jobs import SandboxError
from forecast_harness.trials.judge import Judge, SandboxJudge
from forecast_harness.trials.machine_code.clock import RunnerClock
from forecast_harness.trials.machine_code.device import (
    SharedHostJudge,
    SharedRunner,
    WorkUnderWay,
)
from forecast_harness.trials.machine_code.targets import (
    NoMachineCode,
    PathFailed,
    TargetTrials,
    TrialConfig,
)
from forecast_harness.trials.machine_code.tuning import NodeBuilds, NodeTrial, NodeTuner, refusing
from forecast_harness.trials.protocol import LaneFailure
from forecast_harness.trials.race import mean_log2_ratio
from forecast_harness.trials.verdict import Contest, Refusal

_UNPAIRED_SD = 0.1
"""The error of log2(time ratio) where a config was given up: it was timed after the rival, not beside it."""
_RACE = TimingLimits(least=2 * PAUSES, most=4 * PAUSES, checks=2)
_MOST_FAILURES = 3
"""Failures of our own in a row after which all is judged as host code."""
PATH = "machine code"


class MachineCodeJudge(Judge[NodeTrial]):
    """Judges nodes of one target on one device. `judge` may be called from many threads.

    `host` makes the judge for all that is no machine code, once it is needed: host code, full verification and
    confirmations. `on_failure` is told once of a failure of our own, and whether it is the last one that is tried;
    the node is then judged as host code, unless `insist`, where the lane fails.
    """

    def __init__(
        self,
        runner: RunnerClient,
        builder: CompileWorkers,
        trials: TargetTrials,
        *,
        host: Callable[[], SandboxJudge],
        device: str = "",
        insist: bool = False,
        on_failure: Callable[[str], None] = lambda reason: None,
        device_lock: str = "",
        locks: Path | None = None,
    ) -> None:
        """`device_lock`: the device's name among all processes that time on it; `locks`: where the locks lie."""
        super().__init__(device)
        self._trials = trials
        self._insist, self._on_failure = insist, on_failure
        self._work = WorkUnderWay(device)
        self._host = SharedHostJudge(host, self._work)
        self._runner = SharedRunner(runner, self._work, self._host, device_lock=device_lock, locks=locks)
        self._failures_lock = threading.Lock()
        self._lead = math.inf
        """Lowest score that was claimed here, and not refused later."""
        self._builds = NodeBuilds(builder, trials.request)
        self._tuner = NodeTuner(self._builds, self._runner, trials, self._work)
        self._failures = 0

    def _judged(self, job: NodeJob) -> NodeResult:
        """Check, tune and time a node beside `job.against`; as host code where that cannot be."""
        self._work.begin()
        self._runner.begin()
        why = "the runner failed too often" if self._failures >= _MOST_FAILURES else ""
        if not why:
            try:
                verdict = self._verdict_of(self._stages, NodeTrial(job))
                spent = self._runner.spent
                facts = {**verdict.facts, "path": PATH, "spent": spent}
                return replace(verdict, device_seconds=spent["device"], facts=facts)
            except CancelledError as error:
                raise LaneFailure("given up", self._device) from error
            except (NoMachineCode, RecordError) as error:
                why = str(error)
            except (PathFailed, SandboxError, DeviceBusy) as error:  # a lost runner is the second one
                self._work.check()  # what was given up has not failed
                if self._insist:
                    raise LaneFailure(str(error), self._device) from error
                why = str(error)
                self._note_failure(why)
        with self._host.held(timing=True) as host:
            verdict = host.judge(job)
        return replace(verdict, facts={**verdict.facts, "path": "host code", "path_reason": why[:300]})

    def verify(self, job: VerificationJob) -> FullVerification:
        """Verify a node in a sandbox, on hidden sizes and values. Raises `LaneFailure`."""
        # It times nothing that is kept, so the device may serve others at the same time.
        self._work.begin()
        began = time.perf_counter()
        with self._host.held(timing=False) as host:
            waited = time.perf_counter() - began
            host.prepare_confirmation()  # its lanes open meanwhile: it may be asked for before this has ended
            result = host.verify(job)
        if not result.is_right:
            self._lead = math.inf
        own = {"waited": round(waited, 3), "verify": round(time.perf_counter() - began - waited, 3)}
        facts = {**result.facts, "spent_verifying": {**result.facts.get("spent_verifying", {}), **own}}
        return replace(result, wall_seconds=time.perf_counter() - began, facts=facts)

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        """As the judge of host code does: in a lane of its own, with the whole protocol. Raises `LaneFailure`."""
        self._work.begin()
        began = time.perf_counter()
        with self._host.held(timing=True) as host:
            if confirm.seconds is not None:  # what waiting for the judge has left of them
                left = confirm.seconds - (time.perf_counter() - began)
                confirm = replace(confirm, seconds=max(0.0, left))
            return host.confirm(confirm)

    def try_seed(self, job: NodeJob, known: tuple[TrialConfig, BuildResult] | None = None) -> str:
        """Why this target cannot be judged through machine code, by its seed; '' if it can.

        `known`: the seed in a config, where it is compiled already. It is known to be right: what goes wrong with it
        is a failure of our own, or of what machine code can express.
        """
        try:
            config = known[0] if known else self._trials.configs(replace(job, trials=1))[0]
            if known:
                self._builds.keep(job.node, config, known[1])
            built = self._builds.begin_once(job.node, config, self._runner.began).result()
            request = {n: (program, 0.0) for n, program in self._tuner.programs(built).items()}
            for name, seconds in self._tuner.seconds(request).items():
                if problem := self._trials.implausible(name, seconds):
                    return problem
        except (Refusal, NoMachineCode, PathFailed, SandboxError, DeviceBusy) as error:
            return str(error)
        return ""

    def end(self) -> None:
        """Judge nothing more: nodes under way fail before their next use of the device."""
        self._work.end()
        self.give_up()
        self._builds.end()

    def give_up(self) -> None:
        """See `NodeJudge`. Nothing more is compiled for nodes under way, and none uses the device again."""
        self._work.give_up()
        self._builds.give_up()
        self._host.give_up()

    def close(self) -> None:
        """End the judge of host code; another is made when it is needed. Runner and builder are their owner's."""
        self._host.close()

    def _note_failure(self, reason: str) -> None:
        with self._failures_lock:
            self._failures += 1
            last = self._failures == _MOST_FAILURES
        self._on_failure(f"{reason}; from here on, all is judged as host code" if last else reason)

    # --- the stages ---

    def _read(self, trial: NodeTrial) -> None:
        job, wanted = trial.job, self._trials.language
        if job.node.language != wanted or job.against.language != wanted:
            raise NoMachineCode(f"only {wanted} sources of this target are compiled to machine code")
        with self._runner.spending("configs"):
            trial.configs = self._trials.configs(job, self._work.check)

    def _choose(self, trial: NodeTrial) -> Sequence[TrialConfig]:
        """The fastest, each compiled, right on one call and timed alone as far as that may change which it is."""
        self._tuner.tune(trial)
        return [trial.configs[trial.best]]

    def _race(self, trial: NodeTrial, configs: Sequence[TrialConfig]) -> Contest:
        """The best config beside the other node; twice, where it seems to be faster."""
        trial.facts = {"verified_in_full": False, **({"late_configs": trial.late} if trial.late else {})}
        if self._tuner.is_hopeless(trial):
            contest = self._given_up(trial)
        elif trial.job.node.id == trial.job.against.id:
            contest = self._yardstick(trial)
        else:
            contest = self._timed_beside(trial, compares=False)
            if contest.log2_ratio < -MIN_PROGRESS:
                contest = max(contest, self._timed_again(trial, contest), key=lambda one: one.log2_ratio)
            if contest.log2_ratio < -MIN_PROGRESS:
                self._lead = min(self._lead, trial.job.against_score + contest.log2_ratio)
            else:
                contest = replace(contest, log2_ratio=max(0.0, contest.log2_ratio))
            contest = replace(contest, text=contest.times_beside("Right at these sizes"))
        self._failures = 0
        return contest

    def _given_up(self, trial: NodeTrial) -> Contest:
        ratio, tried = trial.log_ratio(trial.best) / math.log(2), trial.measurements
        after = f"{tried} of {len(trial.configs)} configs"
        text = f"Right on a small call, and given up after {after}: {2**ratio:.2f} times slower."
        contest = trial.contest(
            ratio, _UNPAIRED_SD, trial.seconds[trial.best], trial.rival_s, given_up_after=tried
        )
        return replace(contest, text=text)

    def _yardstick(self, trial: NodeTrial) -> Contest:
        """A node that is timed beside itself: only which of its configs is the best is asked."""
        taken = trial.seconds[trial.best]
        for name, seconds in taken.items():
            if problem := self._trials.implausible(name, seconds):
                raise Refusal(Outcome.INFRASTRUCTURE, "time", f"impossible: {problem}")
        text = "Right at these sizes; others are timed beside it."
        return replace(trial.contest(0.0, 0.0, taken, taken, blocks=0), text=text)

    def _timed_again(self, trial: NodeTrial, first: Contest) -> Contest:
        """Beside the rival once more, with outputs compared; by a new runner, where the source may take the lead.

        Data that earlier programs may have left in memory of the driver's own let none take it.
        """
        if trial.job.against_score + first.log2_ratio >= self._lead - MIN_PROGRESS:
            return self._timed_beside(trial, compares=True)
        with self._runner.renewed():
            return self._timed_beside(trial, compares=True)

    def _timed_beside(self, trial: NodeTrial, *, compares: bool) -> Contest:
        """The best config beside the rival; `compares`: outputs of some launches with what is right.

        Raises `Refusal`, `PathFailed`, `RunnerLost`.
        """
        named = trial.programs[trial.best]
        pairs = {name: (trial.rivals[name], program) for name, program in named.items()}
        calls, implausible = self._trials.calls.timed, self._trials.implausible
        clock: TrialClock = RunnerClock(self._runner.time, calls, pairs, implausible, _RACE, strays=False)
        with refusing("time"):
            clock.place()
            if compares:
                clock.check()
            else:
                clock.sample(CANDIDATE, True)
        theirs, own = ({n: clock.seconds[which, n] for n in named} for which in (INCUMBENT, CANDIDATE))
        blocks = [[math.log(a / b) for a, b in zip(theirs[n], own[n], strict=True)] for n in named]
        medians = ({n: statistics.median(s) for n, s in side.items()} for side in (own, theirs))
        return trial.contest(*mean_log2_ratio(blocks), *medians, blocks=min(len(b) for b in blocks))
