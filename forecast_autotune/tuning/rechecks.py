"""Re-checks of stored decisions that nobody has timed: is the choice still within its tolerance of the best?

A process draws some of those that it meets (`Settings.recheck_s`), times each beside the best forecasts, and bets
against the choice. The stakes are kept with the decision: every process goes on where the last one ended.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from forecast_autotune.records import Candidate, Decision, Measurement, RiskVerdict
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.tuning.measurer import Measurer

LEVEL = 0.05
"""Most of the choices within their tolerance that are ever replaced, however often one looks."""
_STAKE = 0.8
"""Share of what is left that is bet on each comparison."""
MOST_RIVALS, ROUNDS = 3, 8
"""Forecasts besides the choice that are timed in a re-check, and comparisons with the fastest of them."""


def bet(count: int, doubt: float, slower: bool) -> tuple[int, float]:
    """The stakes after one more comparison in turns: whether the choice was slower by more than its tolerance.

    A choice within it is so at most as often as not, so no bet gains on average. A bet begins before each
    comparison, the k-th with 1 / k (k + 1) of one unit, so that a drift which begins late is seen, too. The sum with
    what is not yet bet is a supermartingale: it ever reaches 1 / `LEVEL` with probability `LEVEL` at most (Ville 1939).
    """
    begun = 1.0 / ((count + 1) * (count + 2))
    return count + 1, (doubt + begun) * (1.0 + _STAKE if slower else 1.0 - _STAKE)


def is_refuted(count: int, doubt: float) -> bool:
    """Whether these stakes end a decision."""
    return doubt + 1.0 / (count + 1) >= 1.0 / LEVEL


class Rechecks:
    """The re-checks of this process."""

    spent_s = 0.0

    @classmethod
    def draw(cls, stored: Decision | None, settings: Settings) -> bool:
        """Whether a stored decision is to be re-checked now; one that often was is drawn less often."""
        if stored is None or not stored.is_untimed or settings.mode is not Mode.TUNE:
            return False
        left = cls.spent_s < settings.recheck_s
        return left and random.random() * (1 + stored.rechecks / ROUNDS) < 1.0

    @classmethod
    def judge(
        cls,
        decision: Decision,
        rivals: Sequence[Candidate],
        measurer: Measurer,
        keep: Callable[[Measurement], object],
        within_s: float,
    ) -> tuple[Decision, bool]:
        """The decision with what a re-check of about these seconds has shown, and whether it is refuted."""
        begin = time.perf_counter()
        ran: dict[Candidate, float] = {}
        fails = False
        for m in measurer.measure([decision.chosen, *rivals]):
            keep(m)
            if m.ok:
                ran[m.candidate] = m.ms
            # A broken harness says nothing of the choice.
            fails = fails or (m.candidate == decision.chosen and m.outcome.is_label and not m.ok)
        known = ran.pop(decision.chosen, None) is not None
        state = decision.rechecks, decision.doubt
        for _ in range(ROUNDS if ran and known else 0):
            pair = measurer.compare([decision.chosen, min(ran, key=ran.__getitem__)])
            if len(pair) < 2:
                break
            state = bet(*state, pair[0].ms > (1.0 + decision.tolerance) * pair[1].ms)
            if is_refuted(*state) or time.perf_counter() - begin > within_s:
                break
        cls.spent_s += time.perf_counter() - begin
        refuted, verdicts, shipped = fails or is_refuted(*state), decision.verdicts, decision.shipped_risk
        if shipped is not None and (refuted or state[0] > decision.rechecks == 0):
            share = 1.0 if refuted else len(ran) / max(1, decision.candidates - 1)
            verdicts += (RiskVerdict(decision.surrogate, shipped, decision.stated_risk, refuted, share),)
        count, doubt = state
        checked = replace(decision, rechecks=count, doubt=doubt, verdicts=verdicts)
        # Its verdict is passed: what decides anew has no claim of it to check.
        return replace(checked, shipped_risk=None) if refuted else checked, refuted
