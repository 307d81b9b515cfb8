"""A runner on a driver without a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forecast_harness.machine_code.runner.client import RunnerClient


@pytest.fixture(scope="module")
def runner(fake_driver: Path) -> Iterator[RunnerClient]:
    with RunnerClient(str(fake_driver), launch_s=60.0, flush_bytes=1 << 20) as found:
        yield found
