"""Every implementation that ships obeys the contract that plug-ins are held to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from forecast_autotune.policy import Exhaustive, Fixed, Policy, RiskBounded
from forecast_autotune.policy.including_refused import IncludingRefused
from forecast_autotune.records import Candidate
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


class TestRiskBounded(PolicyContract):
    def make(self) -> Policy:
        return RiskBounded()


class TestIncludingRefused(PolicyContract):
    def make(self) -> Policy:
        return IncludingRefused(RiskBounded())


class TestExhaustive(PolicyContract):
    def make(self) -> Policy:
        return Exhaustive()


class TestFirst(PolicyContract):
    def make(self) -> Policy:
        return Fixed(4)


class TestRandom(PolicyContract):
    def make(self) -> Policy:
        return Fixed(4, random=True)


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
