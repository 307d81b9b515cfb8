"""Jobs of lanes and compile workers that compile nothing."""

from __future__ import annotations

import time
from typing import Any

from forecast_harness.sandbox.jobs import CellAnswer


def wait(work: Any) -> CellAnswer:
    """Wait, and give back the number."""
    time.sleep(work.payload["seconds"])
    return CellAnswer(work.payload["n"])
