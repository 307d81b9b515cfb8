"""A driver without a device, built once, and a runner that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lib.machine_code.fake_code import build_driver, has_compiler
from forecast_harness.machine_code.runner.client import RunnerClient


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not has_compiler():
        pytest.skip("needs g++ to build the fake driver")
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def runner(fake_driver: Path) -> Iterator[RunnerClient]:
    with RunnerClient(str(fake_driver), launch_s=60.0, flush_bytes=1 << 20) as found:
        yield found
