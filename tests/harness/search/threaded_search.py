"""A search with threads and lanes, as a test wants it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.search.synthetic_landscape import (
    CONTEXT,
    SEEDS,
    TARGET,
    CallLedger,
    LandscapeAuthor,
    LandscapeForecaster,
    LandscapeJudge,
)
from forecast_harness.records import SearchSettings
from forecast_harness.search.run import search
from forecast_harness.search.state import SearchState
from forecast_harness.trials.judge_pool import LocalJudgePool
from forecast_harness.trials.protocol import NodeJudge


def run_search(
    folder: Path,
    chosen: SearchSettings,
    *,
    make_judge: Callable[[int], NodeJudge] | None = None,
    proposer: LandscapeAuthor | None = None,
    forecaster: LandscapeForecaster | None = None,
    ledger: CallLedger | None = None,
    watch: Callable[[SearchState], None] | None = None,
    lanes: int = 2,
    forecasts: bool = True,
    began: float | None = None,
    **context: Any,
) -> SearchState:
    made = LocalJudgePool(make_judge or (lambda _: LandscapeJudge(ledger, 0.002)), lanes)
    try:
        return search(
            TARGET,
            SEEDS,
            settings=chosen,
            context=replace(CONTEXT, **context),
            proposers={"table": proposer or LandscapeAuthor(ledger, 0.002)},
            forecaster=(forecaster or LandscapeForecaster(ledger)) if forecasts else None,
            lanes=made,
            folder=folder,
            watch=watch,
            began=began,
        )
    finally:
        made.close()
