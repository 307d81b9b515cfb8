"""Every implementation that ships obeys the contract that plug-ins are held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forecast_autotune.policy import (
    Exhaustive,
    Fixed,
    IncludingRefused,
    Policy,
    RiskBounded,
    TuningState,
    WallTime,
)
from forecast_autotune.records import Candidate
from forecast_autotune.records.table import Table
from forecast_autotune.store import Store
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_autotune.testing import (
    MeasurerContract,
    PolicyContract,
    StoreContract,
    SurrogateContract,
    TableMeasurer,
    example_table,
)
from forecast_autotune.tuning.measurer import Measurer


class TestAnalytic(SurrogateContract):
    def make(self) -> Surrogate:
        return AnalyticSurrogate()


class TestPolicies(PolicyContract):
    @pytest.fixture(
        autouse=True,
        params=[
            RiskBounded,
            pytest.param(WallTime, id="WallTime in rounds"),
            pytest.param(lambda: IncludingRefused(RiskBounded()), id="IncludingRefused"),
            Exhaustive,
            pytest.param(lambda: Fixed(4), id="first"),
            pytest.param(lambda: Fixed(4, random=True), id="random"),
        ],
    )
    def factory(self, request: pytest.FixtureRequest) -> None:
        self.make = request.param

    def make(self) -> Policy:
        raise NotImplementedError


class TestWallTime(PolicyContract):
    """With the seconds of compilations, as beside a measurer that times while it compiles."""

    def make(self) -> Policy:
        return WallTime()

    def state(self, table: Table, known: int, **changes: Any) -> TuningState:
        plain = super().state(table, known, **changes)
        return replace(plain, compile_s=np.linspace(2.0, 0.1, len(plain.forecasts)))


class TestTableMeasurer(MeasurerContract):
    def make(self) -> tuple[Measurer, Sequence[Candidate]]:
        table = example_table()
        return TableMeasurer(table, workers=2), [m.candidate for m in table.measurements[:4]]


class TestMemoryStore(StoreContract):
    def make(self) -> Store:
        return Store(None)


class TestDirectoryStore(StoreContract):
    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def make(self) -> Store:
        return Store(self.root)
