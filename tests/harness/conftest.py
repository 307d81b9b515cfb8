"""One lane for all tests that judge solutions: opening it takes seconds, a verdict a third of one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import pytest

from forecast_harness.sandbox.api import SandboxLane


@pytest.fixture(scope="session")
def judging() -> Iterator[SandboxLane]:
    """A lane with torch warm, in which Triton kernels are interpreted."""
    if not sys.platform.startswith("linux") or importlib.util.find_spec("torch") is None:
        pytest.skip("needs Linux and torch")
    with SandboxLane(environment={"TRITON_INTERPRET": "1"}) as lane:
        yield lane
