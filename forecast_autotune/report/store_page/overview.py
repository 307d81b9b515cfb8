"""What the page shows of a store, as plain data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forecast_autotune.records import Decision, Measurement, Problem
from forecast_autotune.records.table import latest_labels

MOST_PROBLEMS = 5000
"""Problems on one page, the latest first; those left out are counted."""
MOST_REASONS = 8
"""Sentences shown of one decision: the first ones, and the last."""
UNDECIDED = "undecided"


@dataclass(frozen=True)
class ProblemRow:
    """One problem: times in milliseconds, costs in seconds, `at` in ISO 8601 or whatever the store holds there."""

    kernel: str
    key: str
    device: str
    evidence: str
    """As in `Decision`, or `UNDECIDED`."""
    chosen: str
    median_ms: float | None
    risk: float | None
    """P(the regret exceeds `tolerance`) as it was stated; None where nothing was."""
    tolerance: float
    candidates: int
    measured: int
    """Candidates with an outcome in the store."""
    failed: int
    spent_s: float
    saved_s: float
    at: str
    reasons: tuple[str, ...]

    @classmethod
    def of(cls, problem: Problem, rows: Sequence[Measurement], decision: Decision | None) -> ProblemRow:
        """A problem with its measurements and its decision, if it has one."""
        labels = latest_labels(rows).values()
        ran = [m for m in labels if m.ok]
        best = min(ran, key=lambda m: m.ms, default=None)
        common: dict[str, Any] = {
            "kernel": problem.kernel.name,
            "key": " ".join(problem.key),
            "device": problem.device.name,
            "measured": len(labels),
            "failed": len(labels) - len(ran),
        }
        if decision is None:
            return cls(
                **common,
                evidence=UNDECIDED,
                chosen="" if best is None else str(best.candidate),
                median_ms=None if best is None else best.ms,
                risk=None,
                tolerance=0.0,
                candidates=len(labels),
                spent_s=0.0,
                saved_s=0.0,
                at=max((m.at for m in rows), default=""),
                reasons=(),
            )
        reasons = tuple(dict.fromkeys((*decision.rounds, decision.reason)))
        if len(reasons) > MOST_REASONS:
            left = len(reasons) - MOST_REASONS
            reasons = (*reasons[: MOST_REASONS - 1], f"({left} more)", reasons[-1])
        return cls(
            **common,
            evidence=str(decision.evidence),
            chosen=str(decision.chosen),
            median_ms=decision.median_ms,
            risk=decision.stated_risk,
            tolerance=decision.tolerance,
            candidates=decision.candidates,
            spent_s=decision.cost.wall_s,
            saved_s=decision.saved_s,
            at=decision.at,
            reasons=reasons,
        )


@dataclass(frozen=True)
class StoreOverview:
    """Everything that the page shows."""

    place: str
    rows: Sequence[ProblemRow]
    """The latest first, at most `MOST_PROBLEMS`."""
    problems: int
    decided: int
    measured: int
    spent_s: float
    saved_s: float
    reliability: Sequence[dict[str, Any]]
    """Bins of stated risk as `show --calibration --json` has them."""
    intervals: dict[str, Any]
    """Coverage of the 90 % intervals, likewise."""
    files: int
    disk_bytes: int
    misses: int
    remarks: Sequence[str] = field(default=())
    """What was wrong with the store's files."""

    @classmethod
    def of(cls, place: str, rows: Iterable[ProblemRow], **more: Any) -> StoreOverview:
        """The sums over all rows, and the latest of them."""
        every = sorted(rows, key=lambda row: (row.at, row.kernel, row.key), reverse=True)
        return cls(
            place=place,
            rows=every[:MOST_PROBLEMS],
            problems=len(every),
            decided=sum(row.evidence != UNDECIDED for row in every),
            measured=sum(row.measured for row in every),
            spent_s=sum(row.spent_s for row in every),
            saved_s=sum(row.saved_s for row in every),
            **more,
        )


def disk_use(root: Path | None) -> tuple[int, int]:
    """Number and bytes of the regular files below a folder; what cannot be read counts for nothing."""
    files = total = 0
    folders = [] if root is None else [os.fspath(root)]
    while folders:
        try:
            with os.scandir(folders.pop()) as found:
                for entry in found:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        files, total = files + 1, total + entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
    return files, total
