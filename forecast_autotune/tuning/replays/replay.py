"""Run the tuner against recorded tables instead of a GPU, and score what it decides."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from forecast_autotune.errors import RecordError
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.policy import Policy
from forecast_autotune.printable import count_text
from forecast_autotune.records import Candidate, LLMConsultation, Measurement, Problem
from forecast_autotune.records.table import Table, read_tables, table_of_problem
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.store.advice import advice_in
from forecast_autotune.store.files import ADVICE, StoreNotes
from forecast_autotune.surrogates.protocol import Relative, Surrogate
from forecast_autotune.tuning.loop import TuningTask, tune
from forecast_autotune.tuning.replays.table_measurer import TableMeasurer, exhaustive_seconds


@dataclass(frozen=True)
class ReplayRow:
    """One problem, replayed."""

    id: str
    kernel: str
    label: str
    candidates: int
    measured: int
    regret: float
    """time(chosen) / time(oracle) - 1 by the table's own times."""
    stated_risk: float
    evidence: str
    chosen: str
    best_ms: float
    chosen_ms: float
    tune_s: float
    """Simulated wall seconds (compiling in parallel, timing) plus the real seconds of forecasting."""
    exhaustive_s: float
    forecast_s: float
    rounds: int
    path: tuple[float, ...] = ()
    """Regret of the incumbent after each measurement."""
    llm: LLMConsultation | None = None
    """The language model's part, where one was named."""
    advice: str = ""
    """The effect of advice on the kernel; empty where there was none to follow."""


@dataclass
class ReplayReport:
    """All rows of a replay and their summary."""

    policy: str
    surrogate: str
    tolerance: float
    risk: float
    rows: list[ReplayRow] = field(default_factory=list)
    without: ReplayReport | None = None
    """A replay of the same problems without `left_out`."""
    left_out: str = "llm"
    """`llm` for the language model of the settings, or `advice`."""

    def summary(self) -> dict[str, Any]:
        """Figures over all problems; regrets are shares (0.02 is 2 %)."""
        if not self.rows:
            return {"problems": 0}
        regrets = np.array([r.regret for r in self.rows])
        shares = np.array([r.measured / r.candidates for r in self.rows])
        beyond = regrets > self.tolerance + 1e-9
        return {
            "problems": len(self.rows),
            "kernels": len({r.kernel for r in self.rows}),
            "geomean_regret": float(np.exp(np.log1p(regrets).mean()) - 1),
            "p95_regret": float(np.quantile(regrets, 0.95)),
            "max_regret": float(regrets.max()),
            "median_measured_share": float(np.median(shares)),
            "median_measured": float(np.median([r.measured for r in self.rows])),
            "beyond_tolerance_share": float(beyond.mean()),
            "mean_stated_risk": float(np.mean([r.stated_risk for r in self.rows])),
            "tune_s": float(sum(r.tune_s for r in self.rows)),
            "exhaustive_s": float(sum(r.exhaustive_s for r in self.rows)),
            "speedup": float(
                sum(r.exhaustive_s for r in self.rows) / max(1e-9, sum(r.tune_s for r in self.rows))
            ),
            "policy": self.policy,
            "surrogate": self.surrogate,
            "tolerance": self.tolerance,
            "risk": self.risk,
        }

    def to_json(self) -> dict[str, Any]:
        """`{"problems": [...], "summary": {...}}`; the keys are stable."""
        report: dict[str, Any] = {"problems": [_row_json(r) for r in self.rows], "summary": self.summary()}
        if self.without is not None:
            report[f"without_{self.left_out}"] = self.without.to_json()
        return report


def _row_json(row: ReplayRow) -> dict[str, Any]:
    return {name: v for name, v in asdict(row).items() if v or name not in ("llm", "advice")}


def shipped_tables() -> list[Path]:
    """The recorded tables inside the package."""
    folder = Path(str(files("forecast_autotune") / "assets" / "tables"))
    return sorted(folder.glob("*.jsonl.gz"))


def load(paths: Iterable[Path]) -> list[Table]:
    """Tables of all files, those of one problem joined as if they stood in one file.

    Raises `RecordError` when none holds a problem with something to decide.
    """
    paths = list(paths)
    tables: dict[str, Table] = {}
    for path in paths:
        for table in read_tables(path):
            try:
                table_of_problem(tables, table.problem).measurements.extend(table.measurements)
            except RecordError as error:
                raise RecordError(f"{path}: {error}") from error
    usable = [
        t
        for t in tables.values()
        if len(t.by_candidate()) > 1 and any(m.ok for m in t.by_candidate().values())
    ]
    if not usable:
        suffix = f" and {count_text(len(paths) - 1, 'other file')}" if len(paths) > 1 else ""
        prefix = f"{paths[0]}{suffix}: " if paths else ""
        raise RecordError(
            f"{prefix}no problem with at least two candidates of which one ran: nothing to decide"
        )
    return usable


class ReplayStore(Store):
    """An empty memory store whose relatives are chosen by the caller."""

    def __init__(self, relatives: Sequence[Relative]) -> None:
        super().__init__(None)
        self._relatives = list(relatives)

    def relatives(self, problem: Any, limit: int = 8) -> list[Relative]:
        """The caller's relatives, whatever the store holds by now."""
        return self._relatives[:limit]


def _of_kernel(problem: Problem, tables: Iterable[Table]) -> list[Table]:
    return [t for t in tables if t.problem.kernel.name == problem.kernel.name and t.problem.id != problem.id]


def tables_of_other_shapes(problem: Problem, tables: Iterable[Table]) -> list[Table]:
    """The tables of the same kernel function on the same device, nearest first; ties keep their order."""
    from forecast_autotune.surrogates.relatives import problem_distance

    same = [t for t in _of_kernel(problem, tables) if t.problem.device.slug == problem.device.slug]
    return sorted(same, key=lambda t: problem_distance(problem, t.problem))


def tables_elsewhere(table: Table, tables: Sequence[Table]) -> list[Relative]:
    """The rows of the same kernel and sizes on other devices, which a replay may treat as known."""
    from forecast_autotune.surrogates.default import same_sizes

    own = table.problem
    away = [t for t in _of_kernel(own, tables) if t.problem.device.slug != own.device.slug]
    return [Relative(t.problem, tuple(t.measurements)) for t in away if same_sizes(own, t.problem)]


def task_of(table: Table) -> TuningTask:
    """Return the task of a table: its candidates, without their IR, which is traced as it would be live."""
    texts = table.problem.ttir
    return TuningTask(
        replace(table.problem, ttir={}),
        list(table.by_candidate()),
        {m.candidate: m.grid for m in table.measurements if m.grid is not None},
        trace=partial(_recorded_ttir, texts) if texts else None,
    )


def replay_one(
    table: Table,
    *,
    surrogate: Surrogate,
    policy: Policy | None,
    settings: Settings,
    relatives: Sequence[Relative] = (),
    workers: int = 16,
    store: ReplayStore | None = None,
) -> tuple[ReplayRow, list[Measurement]]:
    """Replay one problem; the surrogate sees nothing of its table but what the policy measures.

    `store` may be that of an earlier replay of the same problem, with fewer candidates perhaps, whose measurements are
    then known. Returns the score and all measurements in the store.
    """
    rows = table.by_candidate()
    best = min(m.ms for m in rows.values() if m.ok)
    measurer = TableMeasurer(table, workers=workers)
    store = ReplayStore(relatives) if store is None else store
    task = task_of(table)
    if settings.advice != "off" and table.problem.extra.get(ADVICE) is not None:
        task.advice = advice_in(table.problem, StoreNotes())
    begin = time.perf_counter()
    decision = tune(
        task, lambda: measurer, store=store, surrogate=surrogate, settings=settings, policy=policy
    )
    real = time.perf_counter() - begin
    measurements = store.measurements(task.problem)
    path, incumbent = [], math.inf
    for m in measurements:
        incumbent = min(incumbent, m.ms if m.ok else math.inf)
        path.append(incumbent / best - 1 if math.isfinite(incumbent) else math.inf)
    choice = rows[decision.chosen]
    chosen_ms = choice.ms if choice.ok else math.inf
    row = ReplayRow(
        id=table.problem.id,
        kernel=table.problem.kernel.name,
        label=str(table.problem.extra.get("label") or " ".join(table.problem.key)),
        candidates=len(rows),
        measured=decision.measured,
        # A forecast-only choice that cannot run costs the user a full re-tune: charge a tenfold time.
        regret=chosen_ms / best - 1 if math.isfinite(chosen_ms) else 9.0,
        stated_risk=decision.stated_risk,
        evidence=str(decision.evidence),
        chosen=str(decision.chosen),
        best_ms=best,
        chosen_ms=chosen_ms if math.isfinite(chosen_ms) else 10 * best,
        tune_s=measurer.spent().wall_s + min(real, decision.cost.forecast_s),
        exhaustive_s=exhaustive_seconds(table),
        forecast_s=decision.cost.forecast_s,
        rounds=len(decision.rounds),
        path=tuple(x if math.isfinite(x) else 9.0 for x in path),
        llm=decision.llm,
        advice=decision.advice,
    )
    return row, measurements


def _recorded_ttir(texts: Mapping[str, str], candidates: Sequence[Candidate]) -> dict[str, str]:
    """The recorded IR of these candidates, as a live tracer would answer."""
    return {key: texts[key] for key in map(assignment_of, candidates) if key in texts}


def replay(
    tables: Sequence[Table],
    *,
    surrogate: Surrogate,
    policy: Callable[[Table], Policy | None],
    settings: Settings,
    workers: int = 16,
    progress: Callable[[ReplayRow], None] | None = None,
) -> ReplayReport:
    """Replay every table; the tuner knows nothing of a table but its own measurements."""
    report = ReplayReport(
        "default", f"{surrogate.name}/{surrogate.version}", settings.tolerance, settings.risk
    )
    for table in tables:
        rule = policy(table)
        report.policy = "default" if rule is None else rule.name
        row, _ = replay_one(table, surrogate=surrogate, policy=rule, settings=settings, workers=workers)
        report.rows.append(row)
        if progress is not None:
            progress(row)
    return report
