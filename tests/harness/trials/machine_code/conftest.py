"""Judges of machine code over a driver without a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forecast_harness.clocks.runner.client import RunnerClient
from tests.harness.trials.machine_code.judged_sums import Judged


@pytest.fixture
def judged(runner: RunnerClient, tmp_path: Path) -> Iterator[Judged]:
    result = Judged(runner, tmp_path)
    yield result
    result.close()


@pytest.fixture
def tuned(runner: RunnerClient, tmp_path: Path) -> Iterator[Judged]:
    result = Judged(runner, tmp_path, (4, 8, 2, 16))
    yield result
    result.close()
