"""Stores as the page shows them, without any store."""

from __future__ import annotations

from typing import Any

from forecast_autotune.report.store_page import ProblemRow, StoreOverview

HOSTILE = "</script></style><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> \u202e \x1b[2J"


def problem_row(number: int = 0, **changes: Any) -> ProblemRow:
    fields: dict[str, Any] = {
        "kernel": f"kernel_{number % 37}",
        "key": f"{64 * number} float16",
        "device": "NVIDIA H200",
        "evidence": "measured",
        "chosen": f"BLOCK={16 << number % 4} warps=4 stages=3",
        "median_ms": 0.01 + (number * 7919 % 1000) / 100,
        "risk": (number % 10) / 100,
        "tolerance": 0.02,
        "candidates": 72,
        "measured": 9,
        "failed": number % 2,
        "spent_s": 3.5,
        "saved_s": 40.0,
        "at": f"2026-11-{1 + number % 20:02}T10:00:00+00:00",
        "points": ((1.0, 1.1, 0.9, 1.3), (2.0, 1.0, 0.8, 1.2)),
        "reasons": ("9 of 72: the best by expected gain", f"risk {number % 10} % is accepted"),
    }
    return ProblemRow(**{**fields, **changes})


def overview(*rows: ProblemRow, **changes: Any) -> StoreOverview:
    bins = [{"low": 0.0, "high": 0.05, "n": 12, "seen": 6.5, "refuted": 1, "stated": 0.03, "observed": 0.15}]
    fields: dict[str, Any] = {
        "reliability": bins,
        "intervals": {"nominal": 0.9, "n": 120, "covered": 0.88},
        "files": 42,
        "disk_bytes": 3_200_000,
        "misses": 3,
    }
    return StoreOverview.of("/a/store", rows, **{**fields, **changes})
