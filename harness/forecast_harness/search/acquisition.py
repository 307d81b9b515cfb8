"""The choice of a batch's candidates to measure, from beliefs alone. Pure; the only chance is a seeded draw.

For a belief (mean m, sd s of log2(time / time of the reference), probability of failure f):

    EI = (1 - f) * s * (z * Phi(z) + phi(z)),  z = -m / s          expected improvement, in log2
       = (1 - f) * max(0, -m) where s = 0

(Jones, Schonlau, Welch 1998, for a minimum.) With K slots and an audit share a, A = a * K are audits: their
number n is floor(A) or floor(A) + 1, drawn so that its mean is A. The other K - n slots go down one list, in
which every fourth place is for the most uncertain candidate (abstaining first, then those with P(better)
nearest to 1/2, within 0.2 to 0.8) and the others for the highest EI. The audits are drawn uniformly from the
candidates below. Hence a candidate at place i (from 0) of the list is measured with probability

    1                                     if i < K - floor(A) - 1, or A is whole and i < K - A
    (1 - p) + p * n1 / (N - K + n1)       if i = K - floor(A) - 1,   p = A - floor(A), n1 = floor(A) + 1
    (1 - p) * n0 / (N - K + n0) + p * n1 / (N - K + n1)     if below, n0 = floor(A)

and that is the propensity which is written down. Estimates over everything forecast weigh by its inverse.
Candidates whose EI is negligible are not worth a slot: the list ends before them (`worth`); audits still
reach them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from forecast_autotune.records import digest
from forecast_harness.records import NodeForecast
from forecast_harness.search.events import Chosen

PRIOR_GAIN = 0.05
"""Gain that a proposal of an arm without results may have, in log2: 3.5 %."""
UNCERTAIN_EVERY = 4
"""Each so many-th place of the list is for an uncertain candidate."""
UNCERTAIN_RANGE = (0.2, 0.8)
"""P(better) between these is uncertain."""


def expected_improvement(belief: NodeForecast) -> float:
    """EI of the module's text, in log2; 0 for one that abstains, which is handled as uncertain."""
    if belief.abstains:
        return 0.0
    if belief.sd <= 0.0:
        return (1.0 - belief.p_fail) * max(0.0, -belief.mean)
    z = -belief.mean / belief.sd
    cdf = 0.5 * math.erfc(-z / math.sqrt(2.0))
    density = math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return (1.0 - belief.p_fail) * max(0.0, belief.sd * (z * cdf + density))


def choose_by_forecast(
    batch: int,
    nodes: Sequence[str],
    beliefs: Mapping[str, NodeForecast],
    *,
    slots: int,
    audit: float,
    seed: object,
    worth: float = 0.0,
) -> Chosen:
    """Choose up to `slots` of `nodes` (all different; those without a belief count as abstaining).

    `audit` is the share of slots for audits, 0 to 1; `worth` the least EI that deserves a slot.
    """
    slots = min(slots, len(nodes))
    ranking = _ranking(nodes, beliefs, worth)
    share = audit * slots
    least, extra = math.floor(share), share - math.floor(share)
    chance = random.Random(digest("audit", seed, batch))
    audit_count = least + (chance.random() < extra)
    top = [n for n, _ in ranking[: slots - audit_count]]
    rest = [n for n in nodes if n not in set(top)]
    audits = chance.sample(rest, min(audit_count, len(rest)))
    reasons = dict(ranking)
    place = {n: i for i, (n, _) in enumerate(ranking)}
    odds = {n: _propensity(place.get(n), len(nodes), len(ranking), slots, share) for n in (*top, *audits)}
    return Chosen(
        batch,
        (*top, *audits),
        (*(reasons[n] for n in top), *("audit" for _ in audits)),
        tuple(odds.values()),
    )


def choose_first(batch: int, groups: Sequence[Sequence[str]], *, k: int, slots: int) -> Chosen:
    """Without forecasts: the first `k` of each group, `slots` in all, as a search without a filter measures."""
    nodes = [n for group in groups for n in group[:k]][: max(0, slots)]
    return Chosen(batch, tuple(nodes), ("unforecast",) * len(nodes), (1.0,) * len(nodes))


def _ranking(
    nodes: Sequence[str], beliefs: Mapping[str, NodeForecast], worth: float
) -> list[tuple[str, str]]:
    """The list of the module's text: node and reason. Equal candidates keep their order."""
    gain = {n: expected_improvement(b) for n, b in beliefs.items()}
    top = [n for n in nodes if n in gain and not beliefs[n].abstains and gain[n] > worth]
    top.sort(key=lambda n: -gain[n])
    unsure = [n for n in nodes if _distance_from_even(beliefs.get(n)) <= 0.5 - UNCERTAIN_RANGE[0]]
    unsure.sort(key=lambda n: _distance_from_even(beliefs.get(n)))
    ranking: dict[str, str] = {}
    while top or unsure:
        uncertain = unsure and (not top or len(ranking) % UNCERTAIN_EVERY == UNCERTAIN_EVERY - 1)
        queue, reason = (unsure, "uncertain") if uncertain else (top, "top")
        ranking.setdefault(queue.pop(0), reason)
    return list(ranking.items())


def _distance_from_even(belief: NodeForecast | None) -> float:
    """0 for one that abstains, else how far P(better) is from even."""
    return 0.0 if belief is None or belief.abstains else abs(belief.p_better - 0.5)


def _propensity(place: int | None, nodes: int, length: int, slots: int, share: float) -> float:
    """The probability that the candidate at this place of the list (None: not on it) is measured."""
    least, extra = math.floor(share), share - math.floor(share)
    propensity = 0.0
    for audit_count, weight in ((least, 1.0 - extra), (least + 1, extra)):
        top_count = min(slots - audit_count, length)
        rest = nodes - top_count
        if place is not None and place < top_count:
            propensity += weight
        elif rest and weight:
            propensity += weight * min(audit_count, rest) / rest
    return min(1.0, propensity)
