"""What a later refit reads of the candidates that a decision has measured, filed beside their problem."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from forecast_autotune.features.stored_facts import collect_facts, merge_facts
from forecast_autotune.tuning.guarded_store import GuardedStore
from forecast_autotune.tuning.results import TaskResults
from forecast_autotune.tuning.task import FactStore

FACT_COLLECTION_S = 0.02
"""Seconds after a decision for reading TTIR that no surrogate has read, so that it can be learnt from."""


def store_facts(store: GuardedStore, results: TaskResults, texts: Mapping[str, str]) -> None:
    """Add the facts of what was measured to what the store keeps; `texts` is TTIR by assignment. Never raises.

    A harvest has its IR in the problem's record already.
    """
    problem = results.problem
    if problem.ttir or not results.tried or not store.keeps(FactStore):
        return
    # The decision stands: nothing that fails here may take it back.
    with contextlib.suppress(Exception):
        grids = {c: m.grid for c, m in results.labels.items() if m.grid is not None}
        found = collect_facts(problem, list(results.labels), grids, texts, within_s=FACT_COLLECTION_S)
        if found["units"]:
            store.put_facts(problem, merge_facts(store.facts(problem), found))
