"""The trials of one solution, and the reasons that they give. Runs in the judge, without candidate code.

Checks and timings are one kind of launch at random places of one sequence, so a solution cannot tell which
outputs will be checked. It gets fresh contents at the same addresses, nearly equal contents, equal contents
at other addresses, and memory full of NaN around and below everything.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from forecast_harness.clocks.times import clocks_disagree, impossible_time, slow_at_first
from forecast_harness.sandbox.cell import CandidateFault, Cell
from forecast_harness.targets.packs.schema import Language, Pack, Workload
from forecast_harness.verify.cost_control import ComputeDevice, PhaseTimer, SamplingBudget
from forecast_harness.verify.inputs import DERIVED_REGIMES
from forecast_harness.verify.launch_cell import PEAK
from forecast_harness.verify.launcher import (
    LaunchResult,
    LaunchTimes,
    is_large,
    open_launcher,
)
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problem import (
    OUTSIDE_DOMAIN,
    CheckFinding,
    DrawSpec,
    LaunchCase,
    VerificationProblem,
)
from forecast_harness.verify.tolerance import same_bits
from forecast_harness.verify.verdict import CheckedLaunches, Reason, ReasonCode

_NEW_SIZES = (1, 7, 11, 17)
"""Launches of a Triton solution at sizes that it was not yet launched at: it compiles for each."""
_PLAIN_SHARE = 0.5
"""The share of launches beyond the trials whose arguments are as those that are timed."""
_SUPPRESSED_LAUNCHES = 3
"""Launches without kernels that all have to be right, before kernels are called decoys."""
_ALWAYS_REREAD = 6
"""Launches whose outputs are all read twice; of later ones, a coin decides."""
_MOST_REDRAWS = 8
"""Draws until one has outputs that a kernel has to write."""
_CHECKING_BUDGET_S = {"cpu": 4.0, "cuda": 0.5}
"""Seconds for reading and checking a workload's timed launches in a duel, on average, by where candidates run."""
_LONG_ON_DEVICE_S = 0.2
"""`long_s` of budgets where candidates run on a device: see `SamplingBudget`."""
_LARGE_CHECKS = {"cpu": 0.1, "cuda": 0.025}
"""The share of large timed launches that is checked, of those that would be if they were small: on a device, theirs
travel through a socket."""
_MOST_TIMED_S, _LEAST_TIMED = {"cpu": math.inf, "cuda": 0.3}, 1 / 3
"""Seconds after which no more launches are timed in a verification, where this share of those planned has been:
launches that are not timed cost a tenth of that, and a contest times its own."""
_THOROUGH_SHARE = 0.05
"""The share of launches that pass the quick check and are checked with the full limits all the same."""
_DRAWING_BUDGET_S = 0.5
"""Seconds for drawing a workload's arguments anew and sending them."""


class SolutionExaminer:
    """The examination of one candidate in one cell, with all its state."""

    def __init__(
        self,
        pack: Pack,
        problem: VerificationProblem,
        cell: Cell,
        plan: VerificationPlan,
        seed: bytes,
        *,
        alone: bool = True,
    ) -> None:
        """`alone`: see `ComputeDevice`."""
        self._definition, self._problem, self._workloads = pack.definition, problem, pack.checked_workloads
        self._pack = pack
        self.plan = plan
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(self.rng.getrandbits(63))
        self.worst_error_ratio = 0.0
        self._history: list[LaunchTimes] = []
        self._peaks: dict[str, int] = {}
        self.ends = math.inf
        """The time by which the last launch beyond the trials has to begin, by `time.perf_counter`."""
        self._checks = self._timed_checks = 0
        self._start = self._last_check = time.perf_counter()
        self._language = Language.TORCH
        self._compute_device = ComputeDevice(plan.device, alone=alone)
        self._phase_timer, self._step_timer = PhaseTimer(), PhaseTimer()
        self._launcher = open_launcher(cell, pack.definition.format, self.rng, plan.device, self._phase_timer)
        self._checking_budget, self._drawing_budget = (
            # On a host by the processor's time: a busy machine must not decide which launches are checked.
            SamplingBudget(_CHECKING_BUDGET_S["cpu"], time.process_time)
            if plan.device == "cpu"
            else SamplingBudget(_CHECKING_BUDGET_S["cuda"], long_s=_LONG_ON_DEVICE_S),
            SamplingBudget(_DRAWING_BUDGET_S, long_s=1.0 if plan.device == "cpu" else _LONG_ON_DEVICE_S),
        )

    @property
    def trials(self) -> int:
        """Launches so far."""
        return self._launcher.trials

    @property
    def checked_launches(self) -> CheckedLaunches:
        """Launches that were compared with the reference so far."""
        return CheckedLaunches(self._checks, self._timed_checks, self._last_check - self._start)

    @property
    def facts(self) -> dict[str, Any]:
        """`seconds`, `steps`: where the time went; `host`: why the device was not used for references, if it failed.

        The kinds of seconds are `draw` (arguments), `build` (blocks of them), `check` (references and
        comparisons), `wait` (for the judge's own device), `inside` (launches, by the cell's clock) and, by question,
        those spent waiting for the cell: `prepare`, `place`, `launch`, `idle` and `again`. `launch` beyond
        `inside` went into transfers, restoring and digests. `steps` has the seconds of the same launches by
        what they were for.
        """
        results: dict[str, Any] = {
            "peak_bytes": self._peaks,
            "seconds": self._phase_timer.to_json(),
            "steps": self._step_timer.to_json(),
        }
        return results | ({"host": self._compute_device.failure} if self._compute_device.failure else {})

    def prepare(self, file: str, entry: str, language: Language) -> list[Reason]:
        """Have the candidate imported; reasons to go no further."""
        self._language = language
        reasons = self._launcher.prepare(file, entry, language)
        self._start = self._last_check = time.perf_counter()
        if not reasons and any(w.large for w in self._pack.timed_workloads(self.plan.device, language)):
            # Not sooner: a device that serves one process alone is the candidate's.
            self._compute_device.open_in_background()
        return reasons

    def examine(self, *, timed: bool = True) -> list[Reason]:
        """Run all trials, up to the first with a finding; its reasons, none if all is well.

        Without `timed`, launches in a row are left out, and so are all findings by clocks.
        """
        steps = {"varied": self._varied_trials}
        if timed:
            steps["timed"] = self._timed_trials
        steps["kernels"] = self._kernel_trials
        if timed:
            steps["memory"] = self._memory_trials
            steps["longer"] = lambda: check_longer(self, self._workloads)
        for name, step in steps.items():
            with self._step_timer.phase(name):
                reasons = step()
            if reasons:
                return reasons
        return []

    def should_check(self, workload: Workload) -> bool:
        """A coin: whether to check this timed launch of a workload. Large ones cost seconds each."""
        usual = self.plan.checked * (_LARGE_CHECKS[self.plan.device] if workload.large else 1.0)
        return self.rng.random() < self._checking_budget.launch_share(workload.name, usual)

    def should_redraw(self, workload: Workload, usual: float) -> bool:
        """A coin: whether to draw this workload's arguments anew, instead of changing some values."""
        return self.rng.random() < self._drawing_budget.launch_share(workload.name, usual)

    def new_case(
        self, axes: Mapping[str, Any] | None, regime: str = "normal", layout: str = "contiguous"
    ) -> LaunchCase:
        """Fresh arguments; None draws hidden axes."""
        with self._phase_timer.phase("draw"):
            return self._problem.case(axes, self.draw_spec(regime, layout))

    def draw_spec(self, regime: str, layout: str = "contiguous") -> DrawSpec:
        """The way to draw arguments in this examination."""
        return DrawSpec(regime, layout, self.generator, self._compute_device)

    def timed_case(self, workload: Workload) -> LaunchCase:
        """Fresh arguments of a workload; those of large ones are sent at once, and changed in place later.

        Raises `CandidateFault` when the cell fails to take them.
        """
        with self._phase_timer.phase("wait"):
            self._compute_device.wait_until_open()
        with self._drawing_budget.measure_cost(workload.name):
            case = self.new_case(workload.axes)
            if is_large(case) and not self._launcher.windowed:
                case = case.with_mutator()
                self._launcher.place(case)
            return case

    def further_case(self, workload: Workload) -> LaunchCase:
        """Fresh arguments of a workload; half of the time other values and, where nothing compiles, other sizes."""
        specs = list(self._definition.inputs.values())
        regimes = [v for t in specs for v in t.values]
        if not specs or self.rng.random() < _PLAIN_SHARE:
            return self.new_case(workload.axes)
        regime = self.rng.choice(regimes)
        if regime == "normal":
            regime = self.rng.choice(DERIVED_REGIMES)
        if self._language is not Language.TORCH:
            return self.new_case(workload.axes, regime)
        return self.new_case(None, regime, self.rng.choice([v for t in specs for v in t.layouts]))

    def next_case(self, case: LaunchCase) -> LaunchCase:
        """The same arguments, slightly changed."""
        with self._phase_timer.phase("draw"):
            return case.next(self.generator)

    def launch(self, case: LaunchCase, *, shift: int = 0, watch: str = "") -> LaunchResult:
        """One launch with every check that needs no reference; its outputs are read at once."""
        reply = self._launcher.launch(case, shift=shift, watch=watch)
        if not watch:
            self._history.append(reply.times)
        return reply

    def timed(self, case: LaunchCase, protocol: str = "") -> LaunchResult:
        """One launch as it is timed: outputs of a large case are read only if it is `checked` next."""
        reply = self._launcher.timed(case, protocol)
        self._history.append(reply.times)
        return reply

    def idle(self, case: LaunchCase, protocol: str = "") -> float:
        """Seconds of a question like that of `timed` that launches nothing."""
        return self._launcher.idle(case, protocol)

    def checked(
        self, reply: LaunchResult, workload: Workload | None = None, *, quick: bool = False
    ) -> list[Reason]:
        """The reasons of a launch, whose values are compared to the reference, too.

        `workload`: that of a timed launch. Values of a timed launch, and of a `quick` check, are compared with
        narrow limits first, and with the full ones where they break these. Raises `ValueError` where the launch
        has not been read and is not the latest one.
        """
        with self._checking_budget.measure_cost("" if workload is None else workload.name):
            if not reply.reasons:
                self._launcher.read(reply)
            if reply.reasons:
                return reply.reasons
            with self._phase_timer.phase("check"):
                sure = (quick or workload is not None) and self._is_surely_right(reply)
                finding, ratio = (None, 0.0) if sure else self.compare(reply.case, reply.tensors)
        self._checks += 1
        self._timed_checks += workload is not None
        self._last_check = time.perf_counter()
        self.worst_error_ratio = max(self.worst_error_ratio, ratio)
        return [Reason(*finding, reply.trial)] if finding else []

    def _is_surely_right(self, reply: LaunchResult) -> bool:
        """Whether the quick check suffices; for a share of the launches it never does."""
        if self.rng.random() < _THOROUGH_SHARE or (is_large(reply.case) and not self._launcher.windowed):
            return False
        return reply.case.is_surely_right(reply.tensors)

    def compare(self, case: LaunchCase, outputs: Sequence[torch.Tensor]) -> tuple[CheckFinding, float]:
        """The result of `LaunchCase.check`, on the device where that is quicker."""
        return case.check(outputs, self._compute_device) if is_large(case) else case.check(outputs)

    def _varied_trials(self) -> list[Reason]:
        inputs = self._definition.inputs.values()
        regimes = sorted({v for t in inputs for v in t.values}) or ["normal"]
        layouts = sorted({v for t in inputs for v in t.layouts}) or ["contiguous"]
        ways = list(itertools.product(regimes, layouts))
        self.rng.shuffle(ways)
        self.rng.shuffle(layouts)
        layout_cycle = itertools.cycle(layouts)
        hidden_draw: tuple[Mapping[str, Any] | None, str] | None = None
        draws: list[tuple[Mapping[str, Any] | None, str]] = []
        most_draws = max(len(self._workloads), len(layouts))
        for n in range(max(self.plan.cases, len(regimes), len(layouts))):
            # Every regime and every layout occurs, in any order of the draw.
            regime, layout = ways[n % len(ways)]
            axes = None if n % 3 else self._workloads[(n // 3) % len(self._workloads)].axes
            if self._language is Language.TRITON:
                # New sizes and strides have it compile again, so most launches differ in values alone.
                if n % 3 == 0 and len(draws) == most_draws:
                    axes, layout = draws[(n // 3) % most_draws]
                elif n % 3 and hidden_draw and n not in _NEW_SIZES:
                    axes, layout = hidden_draw
                else:
                    layout = next(layout_cycle)
            shift = self.rng.choice((0, 0, self.rng.randrange(1, 64)))
            if n < len(regimes):
                regime = regimes[n]
            if regime == "normal" and inputs:  # as most later launches are
                regime = self.rng.choice(DERIVED_REGIMES)
            case = self.new_case(axes, regime, layout)
            if n % 3:
                hidden_draw = case.sizes, layout
            elif len(draws) < most_draws:
                draws.append((axes, layout))
            first = self.launch(case, shift=shift)
            if reasons := self.checked(first):
                return reasons
            if (n < _ALWAYS_REREAD or self.rng.random() < 0.5) and (reasons := self._late_writes(first)):
                return reasons
            if n % 3 == 0 and (reasons := self.checked(self.launch(case.twin(self.generator), shift=shift))):
                return reasons
            if n % 3 == 1 and (reasons := self._repeated_trial(first)):
                return reasons
        return []

    def _late_writes(self, reply: LaunchResult) -> list[Reason]:
        """Read outputs once more after the solution has returned: they must not have changed."""
        if not self._launcher.changed_since(reply):
            return []
        text = "an output changed after the solution had returned"
        return [Reason(ReasonCode.LATE_WRITE, text, reply.trial)]

    def _repeated_trial(self, first: LaunchResult) -> list[Reason]:
        """Launch with equal inputs at other addresses, between other bytes: right again, and equal if promised."""
        second = self.launch(first.case, shift=self.rng.randrange(1, 64))
        if reasons := self.checked(second):
            return reasons
        if not self._problem.deterministic or not self._definition.deterministic:
            return []
        if all(same_bits(a, b) for a, b in zip(first.tensors, second.tensors, strict=True)):
            return []
        text = "equal inputs gave different bits, and the definition promises equal ones"
        return [Reason(ReasonCode.NONDETERMINISTIC, text, second.trial)]

    def _kernel_trials(self) -> list[Reason]:
        """Check that the solution's own kernels compute, not the framework."""
        if self._language is Language.TORCH:
            return []
        case = self.new_case(self._workloads[0].axes)
        reply = self.launch(case, watch="operations")
        if reasons := self.checked(reply):
            return reasons
        largest = max((t.numel() for t in reply.tensors), default=0)
        library = sorted(n for n, size in reply.operations.items() if is_computation(n, size, largest))
        if library:
            return [
                Reason(
                    ReasonCode.LIBRARY_COMPUTES, f"the framework computes: {', '.join(library)}", reply.trial
                )
            ]
        if self._language is not Language.TRITON:
            return []
        # A base kernel that reads foreign memory may leave a result alone by chance, but not every time.
        for _ in range(_SUPPRESSED_LAUNCHES):
            if not (trial := self._right_without_kernels()):
                return []
        text = "the result is right although no kernel ran, so the kernels are decoys"
        return [Reason(ReasonCode.NO_KERNEL, text, trial)]

    def _right_without_kernels(self) -> str:
        """The launch whose result was right though no Triton kernel ran; empty where that cannot be said."""
        for _ in range(_MOST_REDRAWS):
            case = self.new_case(self._workloads[0].axes)
            if case.already_right:
                continue  # the outputs are right as drawn: no kernel need run
            try:
                silent = self.launch(case, watch="off")
            except CandidateFault:
                return ""  # the code after the kernel could not do without it
            if silent.reasons or _are_unchanged(case, silent.tensors):
                return ""
            finding, ratio = case.check(silent.tensors)
            if ratio != OUTSIDE_DOMAIN:
                return silent.trial if finding is None else ""
        return ""

    def _memory_trials(self) -> list[Reason]:
        """One launch of each workload that is timed, whose memory is watched."""
        workloads = self._pack.timed_workloads(self.plan.device, self._language) if self.plan.timed else ()
        for workload in workloads:
            reply = self.launch(self.new_case(workload.axes), watch="memory")
            if reasons := reply.reasons if workload.large else self.checked(reply):
                return reasons
            self._peaks[workload.name] = reply.operations.get(PEAK, 0)
        return []

    def _timed_trials(self) -> list[Reason]:
        """Launches as they are timed, in a number the solution cannot know, and some of them checked."""
        workloads = self._pack.timed_workloads(self.plan.device, self._language)
        workload = workloads[self.rng.randrange(len(workloads))]
        count = self.plan.timed + self.rng.randrange(self.plan.timed + 1)
        replies: list[LaunchTimes] = []
        idle: list[float] = []
        case, ends = self.timed_case(workload), math.inf
        for n in range(count):
            if n == 1:  # the first may compile
                ends = time.perf_counter() + _MOST_TIMED_S[self.plan.device]
            last = n == count - 1 or (n >= _LEAST_TIMED * self.plan.timed and time.perf_counter() > ends)
            if n:
                redraws = self.should_redraw(workload, 0.25)
                case = self.timed_case(workload) if redraws else self.next_case(case)
            if n % 2:
                idle.append(self.idle(case))
            reply = self.timed(case)
            is_checked = last or self.should_check(workload)
            if reasons := (self.checked(reply, workload) if is_checked else reply.reasons):
                return reasons
            if n:
                if reasons := self.plausibility_reasons(reply):
                    return reasons
                replies.append(reply.times)
            if last:
                break
        return self.clock_reasons(replies, idle)

    def plausibility_reasons(self, reply: LaunchResult) -> list[Reason]:
        """A reason if one timed launch was faster than the device can be, or compiled."""
        case = reply.case
        if reply.compiled:
            text = f"compiled {reply.compiled} kernels during a launch that is timed"
            return [Reason(ReasonCode.COMPILES_WHILE_TIMED, text, case.label)]
        problem = impossible_time(reply.seconds, case.moved_bytes, case.flops, self.plan.peaks)
        return [Reason(ReasonCode.IMPOSSIBLE, problem, case.label)] if problem else []

    def clock_reasons(self, replies: Sequence[LaunchTimes], idle: Sequence[float]) -> list[Reason]:
        """Reasons not to believe the times of launches of one workload."""
        label = f"{len(replies)} timed launches"
        if not replies:
            return []
        problem = clocks_disagree([r.total_seconds for r in replies], [r.wall_seconds for r in replies], idle)
        samples = [t.seconds for t in self._history[1:] if t.protocol == replies[-1].protocol]
        problem = problem or slow_at_first(samples)
        return [Reason(ReasonCode.CLOCK, problem, label)] if problem else []


def _are_unchanged(case: LaunchCase, outputs: Sequence[torch.Tensor]) -> bool:
    """Whether outputs are as they were before the launch, and so as wrong as they were."""
    outputs_before = list(case.outputs.values())
    return len(outputs_before) == len(outputs) > 0 and all(map(same_bits, outputs_before, outputs))


_SHARE_OF_TRIALS = 0.5
"""Launches beyond the trials may take at least this share of the trials' seconds on a host."""
_VERIFICATION_S, _LEAST_ON_DEVICE_S = 1.9, 0.2
"""Seconds of a verification on a device that leave time for more launches, and the least that these get."""
_LAUNCHES_PER_PAUSE = 80
"""Launches from one pause to the next, on average."""
_PAUSE_S = (0.05, 0.3)
_REPEATED_CASES = 4
"""Cases among which repeated launches choose, never the one before: a result that was not computed anew shows."""
_CONTESTS = 2
"""The contests that a solution has to win before it is called faster."""


def check_longer(judge: SolutionExaminer, workloads: Sequence[Workload]) -> list[Reason]:
    """Check fresh launches at the quick sizes, until the planned number is checked or the time is up.

    The reasons of the first that shows a fault; none if all is well. Raises `CandidateFault`.
    """
    seconds = judge.plan.longer_s
    if judge.plan.device == "cpu":  # others use it, too: trials take long, and so may these launches
        seconds = max(seconds, _SHARE_OF_TRIALS * judge.checked_launches.seconds)
    else:
        seconds = max(_LEAST_ON_DEVICE_S, min(seconds, _VERIFICATION_S - judge.checked_launches.seconds))
    ends = min(judge.ends, time.perf_counter() + seconds)
    while judge.checked_launches.launches < judge.plan.launches and time.perf_counter() < ends:
        workload = workloads[judge.rng.randrange(len(workloads))]
        _pause_sometimes(judge, ends)
        if reasons := judge.checked(judge.launch(judge.further_case(workload)), quick=True):
            return reasons
    return []


def check_timed_longer(judge: SolutionExaminer, workloads: Sequence[Workload]) -> list[Reason]:
    """Check more launches, asked for like timed ones, up to a contest's share of the planned number.

    For half of the time with fresh contents, as timed launches have them, then with some of these again, which is
    quicker. The reasons of the first that shows a fault. Raises `CandidateFault`.
    """
    began, plan = time.perf_counter(), judge.plan
    count = -(-plan.contest_launches // _CONTESTS)
    cases_of: dict[str, list[LaunchCase]] = {workload.name: [] for workload in workloads}
    last: LaunchCase | None = None
    while judge.checked_launches.launches < count:
        seconds = time.perf_counter() - began
        if seconds > plan.longer_timed_s:
            break
        workload = workloads[judge.rng.randrange(len(workloads))]
        cases = cases_of[workload.name]
        others = [case for case in cases if case is not last]
        _pause_sometimes(judge, began + plan.longer_timed_s)
        fresh = len(others) < 2 or seconds < plan.longer_timed_s / 2
        if fresh:
            last = judge.timed_case(workload)
            cases[:] = [*cases, last][-_REPEATED_CASES:]
        else:
            last = others[judge.rng.randrange(len(others))]
        reply = judge.timed(last)
        reasons = judge.checked(reply, workload) if fresh else judge.checked(reply, quick=True)
        if reasons:
            return reasons
    return []


def _pause_sometimes(judge: SolutionExaminer, ends: float) -> None:
    if judge.rng.random() < 1 / _LAUNCHES_PER_PAUSE:
        time.sleep(min(judge.rng.uniform(*_PAUSE_S), max(0.0, ends - time.perf_counter())))


_DATA_MOVEMENT = [
    "empty", "zeros", "ones", "full", "fill", "zero_", "copy_", "_to_copy", "view", "reshape", "as_strided",
    "slice", "select", "transpose", "permute", "expand", "unsqueeze", "squeeze", "t", "alias", "detach",
    "clone", "set_", "arange", "resize_", "_reshape_alias", "is_pinned", "lift_fresh", "new_empty",
    "empty_like", "zeros_like", "ones_like", "full_like", "empty_strided", "new_empty_strided", "new_zeros",
    "new_ones", "new_full", "contiguous", "unbind", "split", "narrow", "_unsafe_view", "item",
    "_local_scalar_dense", "to", "scalar_tensor", "record_stream",
]  # fmt: skip
"""Operations that move or make data, but compute nothing: a launcher may use them on whole tensors."""


def is_computation(name: str, size: int, largest: int) -> bool:
    """Whether a framework operation does arithmetic on tensors of the problem's size.

    `size` are the elements it touched, `largest` those of the largest output.
    """
    plain = name.partition("::")[2].partition(".")[0]
    return plain not in _DATA_MOVEMENT and size > 0 and size * 8 >= largest
