"""Judgements of sources that were made before: a language model's answers, or an ensemble's, read from a file.

A judgement is of a text, wherever it turns up: log2(its best time / the first seed's), standard deviation, P(wrong).
It is blended with what another forecaster believes, by precision, and moved by what the judged sources that have
run were off by in common.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from forecast_autotune.variants.judgement import SourceJudgement, source_digest
from forecast_harness.records import Node, NodeForecast
from forecast_harness.search.history.events import Forecasted, NodeForecastRequest
from forecast_harness.search.interfaces import Forecaster

SHARED_ERROR_SD = 0.1
"""Spread (log2) of what judgements of one kernel's sources are off by in common."""
_LEAST_SD = 0.02
_MOST_ERRORS = 2.0
"""Standard deviations that one result moves the others by at most."""


class RecordedForecaster:
    """See the module. A pure function of the question and the file."""

    def __init__(self, judgements: Mapping[str, SourceJudgement], base: Forecaster) -> None:
        self._judgements, self._base = judgements, base
        figures = ("log2_ratio", "sd", "p_wrong")
        content = repr(
            sorted((key, {f: getattr(said, f) for f in figures}) for key, said in judgements.items())
        )
        self.name = f"recorded-1-{source_digest(content)[:8]}+{base.name}"

    def forecast(self, question: NodeForecastRequest) -> Forecasted:
        """The base's beliefs, and judgements where there are any."""
        before = self._base.forecast(question)
        scores = {n.id: s for n, j, s in question.judged if j.log2_ratio is not None}
        shift = self._shift(question)
        beliefs = dict(before.beliefs)
        for node in question.nodes:
            said = self._said(node)
            if said is not None:
                mean = said.log2_ratio + shift - scores.get(question.reference.id, 0.0)
                beliefs[node.id] = blend_judgement(beliefs[node.id], replace(said, log2_ratio=mean))
        return replace(before, beliefs=beliefs)

    def close(self) -> None:
        """Close the other forecaster."""
        self._base.close()

    def _said(self, node: Node) -> SourceJudgement | None:
        return self._judgements.get(source_digest(node.source))

    def _shift(self, question: NodeForecastRequest) -> float:
        """What judgements of sources that ran were off by in common, shrunk towards nothing."""
        moved = total = 0.0
        for node, result, score in question.judged:
            said = self._said(node) if result.log2_ratio is not None and node.parents else None
            if said is None:
                continue
            sd = max(_LEAST_SD, said.sd)
            off = max(-_MOST_ERRORS * sd, min(_MOST_ERRORS * sd, score - said.log2_ratio))
            moved, total = moved + off / sd**2, total + 1.0 / sd**2
        return moved / (total + SHARED_ERROR_SD**-2)


def blend_judgement(before: NodeForecast, said: SourceJudgement) -> NodeForecast:
    """A belief and a judgement, relative to the same node, by their precisions; alone where the belief abstains."""
    sd = max(_LEAST_SD, said.sd)
    precision = 1.0 / sd**2 + (0.0 if before.abstains else 1.0 / before.sd**2)
    mean = (said.log2_ratio / sd**2 + (0.0 if before.abstains else before.mean / before.sd**2)) / precision
    spread = math.sqrt(1.0 / precision)
    p_fail = 1.0 - (1.0 - before.p_fail) * (1.0 - said.p_wrong)
    better = (1.0 - p_fail) * 0.5 * math.erfc(mean / (spread * math.sqrt(2.0)))
    mean, spread, p_fail, better = (round(v, 6) for v in (mean, spread, p_fail, better))
    note = f"{before.note}; judged {said.log2_ratio:+.2f}"
    return NodeForecast(mean, spread, p_fail, better, False, note)
