"""The library's kernels of an operation: they need no compilation, and say what is to be beaten."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from forecast_autotune.features.devices import is_measured_device
from forecast_autotune.policy import Policy
from forecast_autotune.records import Candidate, Decision, Device, Measurement, Plan
from forecast_autotune.settings import Settings
from forecast_integrations.inductor.choices.graph_position import GraphPosition
from forecast_integrations.inductor.inductor_seconds import OperationSeconds
from forecast_integrations.inductor.session import LIBRARY_BEST_RISK, FewRoundsPolicy

TRUSTED = "no other choice is likely to be faster than the library's kernel"
SMALL = "the operation is too small a part of its graph for a compilation"
NOT_WORTH_WAITING = "the operation is too small a part of its graph for another round"
"""Reasons that hold at one place of a graph."""
_MOST_TIMING_S = 0.05
"""Seconds to time one choice."""


class LibraryBaseline:
    """The library's kernels of one operation, in the order given, and what they decide."""

    def __init__(
        self, candidates: Sequence[Candidate], device: Device, policy: Policy, settings: Settings
    ) -> None:
        self.candidates = list(candidates)
        self.time: Callable[[], Sequence[Measurement]] | None = None
        """Times them before anything else is chosen, where that can be done."""
        self.ahead: dict[Candidate, Measurement] = {}
        """What it said. They are timed again beside other choices."""
        self.position = GraphPosition()
        self.taken = self.overruled = False
        """Whether one was taken and nothing else tried; whether a stored decision does not hold at this place."""
        self._device, self._risk = device, settings.risk
        self._policy = policy if isinstance(policy, FewRoundsPolicy) else None
        """None: the user's own decides alone."""

    def time_ahead(self, seconds: OperationSeconds) -> None:
        """Time them, where that can be done, and count what it takes."""
        if self.time is None:
            return
        begin = time.perf_counter()
        self.ahead = {m.candidate: m for m in self.time() if m.ok}
        # What a library loads at its first call is no part of the time of a choice.
        passed = min(time.perf_counter() - begin, _MOST_TIMING_S * len(self.ahead))
        seconds.add_benchmark(passed, len(self.ahead))

    def sufficient(
        self, first: Plan, measured: Mapping[Candidate, Measurement]
    ) -> tuple[Candidate, Plan] | None:
        """The fastest, and the plan with the reason, where it is taken before anything else is timed.

        `first` is the plan that knows their times.
        """
        known = {c: m for c, m in {**self.ahead, **measured}.items() if m.ok}
        policy = self._policy
        if not known or policy is None or not known.keys() <= set(self.candidates):
            return None
        best = min((c for c in self.candidates if c in known), key=lambda c: known[c].ms)
        stated = LIBRARY_BEST_RISK if is_measured_device(self._device) else first.risk
        if policy.trusts_library(first, stated, self._risk, known[best].ms, self.position):
            return best, replace(first, reason=TRUSTED, risk=stated)
        if policy.is_small(self._risk, known[best].ms, self.position):
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
        policy, decided = self._policy, measured.get(chosen)
        if policy is None or decided is None or chosen not in self.candidates:
            return []
        if not policy.may_fuse(decided.ms, self.position):
            return []
        from torch._inductor import config

        others = [m for c, m in measured.items() if m.ok and c not in self.candidates]
        most = max(1, int(getattr(config, "max_epilogue_benchmarked_choices", 1)))  # that Inductor tries
        return [m.candidate for m in sorted(others, key=lambda m: m.ms)[:most]]
