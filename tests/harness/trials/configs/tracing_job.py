"""A job that takes as long as it is told, for tests of lanes."""

from __future__ import annotations

import time
from typing import Any

from forecast_harness.sandbox.jobs import CellAnswer


def main(work: Any) -> CellAnswer:
    """Wait, and give back the number."""
    time.sleep(work.payload["seconds"])
    return CellAnswer(work.payload["n"])
