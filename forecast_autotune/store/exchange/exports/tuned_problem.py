"""One problem with all that other tools want to know of it, and what became of an export."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forecast_autotune.file_access import open_named_output
from forecast_autotune.records import Candidate, Config, Decision, Measurement, Problem
from forecast_autotune.records.table import Table


@dataclass(frozen=True)
class TunedProblem:
    """A problem, its latest measurements, and its decision where there is one."""

    problem: Problem
    rows: dict[Candidate, Measurement]
    decision: Decision | None = None

    @property
    def chosen(self) -> Candidate | None:
        """What was decided, else the fastest that ran; None where nothing did, or another source than the kernel's."""
        if self.decision is not None:
            found: Candidate | None = self.decision.chosen
        else:
            ran = [m for m in self.rows.values() if m.ok and m.candidate.is_base_variant]
            found = min(ran, key=lambda m: m.ms).candidate if ran else None
        return found if found is not None and found.is_base_variant else None


@dataclass
class ExportReport:
    """What an export wrote, and what it could not."""

    files: list[Path] = field(default_factory=list)
    problems: int = 0
    measurements: int = 0
    left_out: list[str] = field(default_factory=list)
    """A sentence for each problem that the format has no place for."""

    def write(self, path: Path, data: Any, indent: int | None = 4) -> None:
        """Write one JSON file, whole or not at all. Raises `OSError`."""
        self.write_text(path, json.dumps(data, indent=indent) + "\n")

    def write_text(self, path: Path, text: str) -> None:
        """Write one file, whole or not at all. Raises `OSError`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_named_output(path) as stream:
            stream.write(text.encode())
        self.files.append(path)


def tuned_problems(
    tables: Iterable[Table], decisions: Iterable[tuple[Problem, Decision]]
) -> list[TunedProblem]:
    """Every table with its decision, in order."""
    of = {problem.id: decision for problem, decision in decisions}
    return [TunedProblem(t.problem, t.by_candidate(), of.get(t.problem.id)) for t in tables]


def file_stem(problem: Problem) -> str:
    """A name for a problem's file: its kernel, device and id, in letters that every file system takes."""
    shown = f"{problem.kernel.name}-{problem.device.slug}-{problem.id[:12]}"
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in shown)


def triton_text(config: Config) -> str:
    """A config as `str(triton.Config)` shows it, which other caches read back."""
    launch = {"num_warps": config.num_warps, "num_ctas": config.num_ctas, "num_stages": config.num_stages}
    shown = {**dict(config.kwargs), **launch, "maxnreg": config.maxnreg}
    return ", ".join(f"{name}: {value}" for name, value in shown.items())
