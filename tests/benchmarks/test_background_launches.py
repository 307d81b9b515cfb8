"""The script on launches while a kernel is tuned, run where launches do nothing: it tells that it works."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.launches import background_launches

if TYPE_CHECKING:
    import pytest


def test_a_dry_run_ends_with_a_final_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "store"))
    options = (
        "--null --launches 200 --rounds 3 --seconds 300 --stalls 1000 --configs 3 --cases softmax/4096x1000"
    )
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["background_launches", *options.split(), "--out", str(out)])
    assert background_launches.main() == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    (run,) = result["raw"]["runs"]
    assert run["settled"]
    assert run["evidence"] == "measured"
    assert run["launches_before"] + run["launches_after"] >= 200
    assert len(run["served"]) <= 2
    assert run["before"]["p50"] <= run["before"]["p999"] <= run["before"]["max"]
    assert result["summary"]["wrong"] == 0
