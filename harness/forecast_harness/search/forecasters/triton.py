"""Triton sources: what the shipped surrogate reads in their IR, corrected by results.

How much faster a child is than its parent is first forecast as the difference of their best configs; what the
search then finds out about such differences is learnt by `lineage` on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from forecast_harness.records import Node, SearchTarget, TargetKind
from forecast_harness.search.forecasters.lineage import (
    UNINFORMED_SD,
    LineageForecaster,
    failure_probabilities,
    relative_forecasts,
)
from forecast_harness.search.history.events import Forecasted, NodeForecastRequest
from forecast_harness.trials.configs.pack_tracing import PackTracer
from forecast_harness.trials.configs.variant_tracing import VariantTracer

UNTESTED_DIFFERENCE_SD = 0.5
"""Spread (log2) of a forecast difference between two sources, before the search has tried any."""
_DIFFERENCE_SHARE = 0.5
"""Share of a forecast difference that is believed before results say more."""


class SourceTracer(Protocol):
    """Forecasts a source from its IR."""

    version: str

    def best_forecast(self, node: Node) -> tuple[float, float] | None:
        """(log2 ms, P(fails)) of a source's most promising config; None where it cannot be traced."""
        ...

    def prepare(self, nodes: Sequence[Node]) -> None:
        """Told of all nodes that it will be asked for one after the other."""
        ...

    def close(self) -> None:
        """End the sandbox."""
        ...


class TritonForecaster:
    """See the module. A pure function of the question: IR depends on the text alone."""

    def __init__(self, target: SearchTarget, reader: SourceTracer | None = None) -> None:
        """`reader` forecasts single sources; by default a sandbox traces them for the shipped surrogate."""
        traced = VariantTracer if target.kind is TargetKind.KERNEL else PackTracer
        self._tracer: SourceTracer = traced(target) if reader is None else reader
        self._lineage = LineageForecaster()
        self.name = f"traced-1-{self._tracer.version}+{self._lineage.name}"

    def forecast(self, question: NodeForecastRequest) -> Forecasted:
        """Beliefs about every node; one that cannot be traced is left to its lineage."""
        known = {n.id: n for n, _, _ in question.judged} | {n.id: n for n in question.nodes}
        known |= {question.reference.id: question.reference}
        self._tracer.prepare(list(known.values()))
        seen = {node.id: self._tracer.best_forecast(node) for node in known.values()}
        offsets = {}
        for node in known.values():
            above = seen.get(node.parents[0]) if node.parents else None
            mine = seen[node.id]
            if above is not None and mine is not None:
                offsets[node.id] = _DIFFERENCE_SHARE * (mine[0] - above[0])
        found = self._lineage.posterior(question, offsets)
        if found.reason and question.nodes:
            # Before the search has results of its own, IR says something where there is any.
            told = np.array([n.id in offsets for n in question.nodes])
            found = replace(
                found,
                sd=np.where(told, UNTESTED_DIFFERENCE_SD, UNINFORMED_SD),
                nearest_correlation=told.astype(float),
                reason="",
            )
        fails = failure_probabilities(question)
        for i, node in enumerate(question.nodes):
            mine = seen[node.id]
            if mine is not None:
                fails[i] = 1.0 - (1.0 - fails[i]) * (1.0 - mine[1])
        return relative_forecasts(question, found, fails, self.name)

    def close(self) -> None:
        """End the sandbox that traces."""
        self._tracer.close()
