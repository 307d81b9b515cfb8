"""A search with threads and lanes, as a test wants it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.search_table import (
    CONTEXT,
    SEEDS,
    TARGET,
    Ledger,
    TableForecaster,
    TableJudge,
    TableProposer,
)
from forecast_harness.search.interfaces import Judge
from forecast_harness.search.lanes import LocalLanes
from forecast_harness.search.records import Settings
from forecast_harness.search.run import search
from forecast_harness.search.state import State


def go(
    folder: Path,
    chosen: Settings,
    *,
    make_judge: Callable[[int], Judge] | None = None,
    proposer: TableProposer | None = None,
    forecaster: TableForecaster | None = None,
    ledger: Ledger | None = None,
    watch: Callable[[State], None] | None = None,
    lanes: int = 2,
    forecasts: bool = True,
    **context: Any,
) -> State:
    made = LocalLanes(make_judge or (lambda _: TableJudge(ledger, 0.002)), lanes)
    try:
        return search(
            TARGET,
            SEEDS,
            settings=chosen,
            context=replace(CONTEXT, **context),
            proposers={"table": proposer or TableProposer(ledger, 0.002)},
            forecaster=(forecaster or TableForecaster(ledger)) if forecasts else None,
            lanes=made,
            folder=folder,
            watch=watch,
        )
    finally:
        made.close()
