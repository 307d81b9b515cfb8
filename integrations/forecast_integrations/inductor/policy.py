"""The policy for Inductor's choices: few rounds and wide ones, and nothing beside the library's kernels where hardly
any choice can be faster.

The library's kernels need no compilation, and say what is to be beaten.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.devices import is_measured_device
from forecast_autotune.numerics import fast_median
from forecast_autotune.policy import Policy, RiskBounded, TuningState
from forecast_autotune.records import Candidate, Decision, Device, Measurement, Plan
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.protocol import Array
from forecast_integrations.inductor.choices.graph_position import GraphPosition

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FIRST_SHARE, MAX_SHARE = 0.085, 0.12
"""Shares of an operation's choices in its first round, and at most. Inductor compiles those of a round side
by side, in one or two seconds for as many as there are cores, and times one in 0.02 s (torch 2.11, H200): it
is rounds that cost. So there are few and wide ones."""
SHORT_LIST_FIRST, SHORT_LIST_SHARE = 8, 0.35
"""Choices of a short list that go into the first round, but no more than that share. Inductor compiles
them while it lowers the rest of the graph; a second round has to be waited for, 0.3 to 1.3 s each: 11 of the
13 s that a ConvNet of 30 operations took to tune (H200). Where all choices of a list are no more than that, and no more
than there are workers, there is one round."""


LIKELY_BEST_RISK = 0.5
"""Where the library's kernel is known, and no choice is said to be as likely as this to be faster by more than the
tolerance, no choice is compiled, or the policy's least number where one could also compute what follows. In all of 29
operations of whole models where that was so, no choice was faster by more."""
LIBRARY_BEST_RISK = 1 / 31
"""The risk stated then on a device that forecasts have measurements of: after none of 29, by the rule of succession."""
FUSION_SHARE = 0.25
"""Share of the library's kernel's time that a pass over its result takes by its bytes: from there on a choice that is
slower alone may be faster with what follows. The best of those choices take 1.11 times as long as the library in the
median and 1.25 in one of six, and a part of such a pass is in the cache."""
SMALL_RISK = 0.05
"""Below this accepted risk small operations are measured like others."""
ROUND_GAIN = 0.03
"""The least product of an operation's share of its graph and of the risk of stopping that is worth to wait for
another round: a faster one is so by some 7 %, so that 0.2 % of the graph's time is expected of it."""


LONG_COMPILATION = 3.0
"""Times as long as half of a round's choices are expected to compile: then a choice is left for later. A round ends
with its last compilation, and a longer one while others wait is given up anyway (`hooks.precompilation`)."""


MIN_BATCH, LONG_LIST, MAX_BATCH = 4, 100, 16
"""Candidates of a further round; among more than so many, one for each compile worker, up to the last number.
Inductor compiles them in parallel and then times them, so that a candidate that the policy would only compile ahead
costs no more than its timing."""


@dataclass(frozen=True)
class FewRoundsPolicy(RiskBounded):
    """Few choices, most of them in one round; those that compile long have to promise more."""

    first: float = FIRST_SHARE
    share: float = MAX_SHARE
    likely: float = LIKELY_BEST_RISK
    longest: float = LONG_COMPILATION
    fusion: float = FUSION_SHARE
    gain: float = ROUND_GAIN

    def plan(self, state: TuningState) -> Plan:
        """As otherwise, without the choices that would hold up a round; one of the best promise is kept."""
        plan = super().plan(state)
        if state.compile_s is None:
            return plan
        row = CandidateList.of(state.forecasts.candidates).row_of
        seconds = {c: float(state.compile_s[row[c]]) for c in (*plan.measure, *plan.prefetch)}
        most = self.longest * statistics.median(seconds.values()) if seconds else 0.0
        quick = {c for c, s in seconds.items() if s <= most}
        measure = tuple(c for c in plan.measure if c in quick or c == plan.measure[0])
        return replace(plan, measure=measure, prefetch=tuple(c for c in plan.prefetch if c in quick))

    def trusts_library(
        self, first: Plan, stated: float, risk: float, library_ms: float, position: GraphPosition
    ) -> bool:
        """Whether the library's kernel is taken and no choice compiled: `first` is the plan that knows its time.

        `stated` is the risk that would be stated, `risk` what is accepted.
        """
        return first.risk < self.likely and stated <= risk and not self.may_fuse(library_ms, position)

    def may_fuse(self, library_ms: float, position: GraphPosition) -> bool:
        """Whether a choice that is slower alone may be faster with what is fused to it."""
        return position.fusion_ms >= self.fusion * library_ms

    def is_small(self, risk: float, library_ms: float, position: GraphPosition) -> bool:
        """Whether an operation is not worth a compilation: its graph hardly takes longer for it."""
        return risk >= SMALL_RISK and position.is_small(library_ms)

    def is_worth_waiting(self, stated: float, risk: float, best_ms: float, position: GraphPosition) -> bool:
        """Whether a further round is: what it may gain of the graph's time, where `stated` is the risk without it."""
        share = position.share(best_ms)
        return risk < SMALL_RISK or share >= 1.0 or share * stated >= self.gain

    def of(self, share: float, candidates: int) -> int:
        """As otherwise, but for short lists."""
        few = min(SHORT_LIST_FIRST, math.ceil(SHORT_LIST_SHARE * candidates))
        return max(few, super().of(share, candidates))

    def batch(self, state: TuningState, seen: int, risk: float) -> int:
        """As otherwise, but for a first round that a known time makes small, and for lists that fit one wave."""
        if state.new:
            return super().batch(state, seen, risk)
        if seen and risk < self.likely:
            return self.least
        total = len(state.forecasts)
        return total if total <= min(SHORT_LIST_FIRST, compile_workers()) else super().batch(state, 0, risk)

    def weights(self, state: TuningState, rows: npt.NDArray[np.intp]) -> Array:
        """As otherwise, by the seconds that each is expected to compile."""
        usual = super().weights(state, rows)
        if state.compile_s is None:
            return usual
        seconds = state.compile_s[rows]
        return usual * fast_median(seconds, axis=0) / seconds


def compile_workers() -> int:
    """Return the number of choices that Inductor compiles at once."""
    from torch._inductor import config

    return int(config.compile_threads or 1)


def batch_size(count: int) -> int:
    """Candidates of a further round, of so many."""
    return MIN_BATCH if count <= LONG_LIST else max(MIN_BATCH, min(MAX_BATCH, compile_workers()))


def default_policy() -> FewRoundsPolicy:
    """The policy for Inductor's own choices."""
    return FewRoundsPolicy()


# --- the library's kernels ---

TRUSTED = "no other choice is likely to be faster than the library's kernel"
SMALL = "the operation is too small a part of its graph for a compilation"
NOT_WORTH_WAITING = "the operation is too small a part of its graph for another round"
"""Reasons that hold at one place of a graph."""


class LibraryBaseline:
    """The library's kernels of one operation, in the order given, and what they decide."""

    def __init__(
        self, candidates: Sequence[Candidate], device: Device, policy: Policy, settings: Settings
    ) -> None:
        self.candidates = list(candidates)
        self.time: Callable[[], Sequence[Measurement]] | None = None
        """Times them before anything else is chosen, where that can be done."""
        self.ahead: dict[Candidate, Measurement] = {}
        """Their times so far. They are timed again beside other choices."""
        self.position = GraphPosition()
        self.taken = self.overruled = False
        """Whether one was taken and nothing else tried; whether a stored decision does not hold at this place."""
        self._device, self._risk = device, settings.risk
        self._policy = policy if isinstance(policy, FewRoundsPolicy) else None
        """None: the user's own decides alone."""

    def time_ahead(self) -> None:
        """Time them, where that can be done."""
        if self.time is not None:
            self.ahead = {m.candidate: m for m in self.time() if m.ok}

    def sufficient(
        self, first: Plan, measured: Mapping[Candidate, Measurement]
    ) -> tuple[Candidate, Plan] | None:
        """The fastest, and the plan with the reason, where it is taken before anything else is timed.

        `first` is the plan that knows their times.
        """
        times = {c: m for c, m in {**self.ahead, **measured}.items() if m.ok}
        policy = self._policy
        if not times or policy is None or not times.keys() <= set(self.candidates):
            return None
        best = min((c for c in self.candidates if c in times), key=lambda c: times[c].ms)
        stated = LIBRARY_BEST_RISK if is_measured_device(self._device) else first.risk
        if policy.trusts_library(first, stated, self._risk, times[best].ms, self.position):
            return best, replace(first, reason=TRUSTED, risk=stated)
        if policy.is_small(self._risk, times[best].ms, self.position):
            return best, replace(first, reason=SMALL)
        return None

    def is_worth_waiting(self, plan: Plan, measured: Mapping[Candidate, Measurement]) -> bool:
        """Whether a further round may gain what it is waited for, by the operation's part in its graph."""
        best_ms = min((m.ms for m in measured.values() if m.ok), default=None)
        if best_ms is None or self._policy is None:
            return True
        return self._policy.is_worth_waiting(plan.risk, self._risk, best_ms, self.position)

    def overrules(self, decision: Decision) -> bool:
        """Whether a decision does not hold here that was made elsewhere in a graph."""
        self.overruled = self._is_overruled(decision.rounds[-1:], decision.stated_risk, decision.median_ms)
        return self.overruled

    def _is_overruled(self, reason: tuple[str, ...], stated: float, ms: float | None) -> bool:
        policy = self._policy
        if policy is None or ms is None:
            return False
        if reason == (TRUSTED,):
            return policy.may_fuse(ms, self.position)
        if reason == (SMALL,):
            return not policy.is_small(self._risk, ms, self.position)
        worth = policy.is_worth_waiting(stated, self._risk, ms, self.position)
        return reason == (NOT_WORTH_WAITING,) and worth

    def kept_for_fusion(
        self, chosen: Candidate, measured: Mapping[Candidate, Measurement]
    ) -> list[Candidate]:
        """The best measured choices, where the library's kernel is decided on and one of them may fuse what follows."""
        policy, library = self._policy, measured.get(chosen)
        if policy is None or library is None or chosen not in self.candidates:
            return []
        if not policy.may_fuse(library.ms, self.position):
            return []
        from torch._inductor import config

        choices = [m for c, m in measured.items() if m.ok and c not in self.candidates]
        most = max(1, int(getattr(config, "max_epilogue_benchmarked_choices", 1)))  # that Inductor tries
        return [m.candidate for m in sorted(choices, key=lambda m: m.ms)[:most]]
