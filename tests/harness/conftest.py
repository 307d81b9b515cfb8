"""What many tests of the harness share, since opening it takes seconds: a lane, and a driver without a device."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forecast_harness.sandbox.api import SandboxLane
from tests.harness.lanes import lane

if TYPE_CHECKING:
    from forecast_harness.clocks.runner.client import RunnerClient


@pytest.fixture(scope="session")
def judging() -> Iterator[SandboxLane]:
    """A lane with torch warm, in which Triton kernels are interpreted."""
    if not sys.platform.startswith("linux") or importlib.util.find_spec("torch") is None:
        pytest.skip("needs Linux and torch")
    with SandboxLane(environment={"TRITON_INTERPRET": "1"}) as one:
        yield one


@pytest.fixture(scope="module")
def compiling() -> Iterator[SandboxLane]:
    """A lane with torch and Triton warm, whose trusted entries may lie in this folder; kernels are compiled."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the sandbox needs Linux")
    with lane(warm=("torch", "triton")) as one:
        yield one


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver whose device runs the operations of `fake_driver.cpp`, and does nothing for other code."""
    from benchmarks.lib.machine_code.fake_code import build_driver, has_compiler

    if not has_compiler():
        pytest.skip("needs g++ to build the fake driver")
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def runner(fake_driver: Path) -> Iterator[RunnerClient]:
    from forecast_harness.clocks.runner.client import RunnerClient

    with RunnerClient(str(fake_driver), launch_s=60.0, flush_bytes=1 << 20) as found:
        yield found
