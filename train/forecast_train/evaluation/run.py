"""All folds, methods and seeds: in processes, and taken up again where a run was ended."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from forecast_autotune.errors import ForecastAutotuneError, RecordError
from forecast_autotune.file_access import open_named_output
from forecast_autotune.numerics import single_threaded_blas
from forecast_autotune.records import digest
from forecast_autotune.records.table import Table, table_lines
from forecast_autotune.settings import Mode, Settings
from forecast_train.evaluation.judging import EvaluationRow, judge_problem
from forecast_train.evaluation.methods import FitSurrogate, RandomOrder, methods_by_name
from forecast_train.splits import Fold, LeaveOut, make_folds

_ROW_VERSION = 3
"""Counts up when rows change their meaning: older results are then not taken up."""


class MixedResults(ForecastAutotuneError):
    """Results taken up from disk were made by another version of a method."""


@dataclass
class Evaluation:
    """Every row of a run, and what it was made of."""

    leave_out: LeaveOut
    digest: str
    """Digest of tables, split and settings: results with the same one can be joined."""
    seeds: list[int]
    methods: list[str]
    folds: dict[str, dict[str, int]]
    """Problems tested, learnt from, and dropped, by fold."""
    tolerance: float
    risk: float
    rows: list[EvaluationRow] = field(default_factory=list)
    reused: int = 0
    """Rows that were taken up from disk."""


@dataclass(frozen=True)
class _WorkUnit:
    """The work of one process at a time: fit once, then judge with every seed that is missing."""

    fold: Fold
    method: str
    fit: FitSurrogate
    seeds: tuple[int, ...]
    settings: Settings

    def run(self) -> list[EvaluationRow]:
        """The unit's rows. The matrices are small: threads that wait for each other take longer than one alone."""
        rows = []
        with single_threaded_blas():
            surrogate = self.fit(self.fold.train)
            for seed in self.seeds:
                drawn = RandomOrder(seed) if isinstance(surrogate, RandomOrder) else surrogate
                rows += [
                    judge_problem(table, self.fold, self.method, drawn, seed, self.settings)
                    for table in self.fold.test
                ]
        return rows


def evaluate(
    tables: Sequence[Table],
    *,
    leave_out: LeaveOut = "kernel",
    methods: Sequence[str] | Mapping[str, FitSurrogate] = ("random", "formula", "analytic"),
    seeds: int = 3,
    jobs: int = 1,
    out: Path | None = None,
    settings: Settings | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Evaluation:
    """Judge every method on every fold and seed.

    `methods` are names of the registry, or fits by name (functions of a module when `jobs` > 1, as they
    travel to other processes). With `out`, rows are written per fold, method and seed as they come, and
    those of an earlier run on the same tables, split and settings are taken up. `progress` gets (done,
    total, what) in units of a fold and method. Rows come in the order of folds, methods, seeds, problems.

    Raises `SplitError`, `LeakageError`, `MixedResults`, and `ValueError` for an unknown method, no seeds or no
    jobs.
    """
    if seeds < 1 or jobs < 1:
        raise ValueError(f"seeds and jobs must be at least 1, got {seeds} and {jobs}")
    fits = dict(methods) if isinstance(methods, Mapping) else methods_by_name(methods)
    # Only tolerance and risk: limits from the environment of whoever runs this would change the scores.
    base = settings or Settings()
    plain = Settings(mode=Mode.TUNE, tolerance=base.tolerance, risk=base.risk)
    folds = make_folds(tables, leave_out)
    mark = _evaluation_digest(tables, leave_out, plain)
    sizes = {f.name: {"test": len(f.test), "train": len(f.train), "dropped": f.dropped} for f in folds}
    result = Evaluation(leave_out, mark, list(range(seeds)), list(fits), sizes, plain.tolerance, plain.risk)
    store = None if out is None else _RowStore(out / "rows" / mark)
    stored_names = {method: _kept_name(method, fit) for method, fit in fits.items()}
    results: dict[tuple[str, str], list[EvaluationRow]] = {}
    units = []
    for fold in folds:
        for method, fit in fits.items():
            missing_seeds = []
            for seed in result.seeds:
                rows = None if store is None else store.read(fold, stored_names[method], seed)
                results.setdefault((fold.name, method), []).extend(rows or [])
                result.reused += len(rows or [])
                missing_seeds += [seed] if rows is None else []
            if missing_seeds:
                units.append(_WorkUnit(fold, method, fit, tuple(missing_seeds), plain))
    for count, (unit, rows) in enumerate(_run_units(units, jobs), 1):
        results[unit.fold.name, unit.method] += rows
        if store is not None:
            for seed in unit.seeds:
                store.write(unit.fold, stored_names[unit.method], seed, [r for r in rows if r.seed == seed])
        if progress is not None:
            progress(count, len(units), f"{unit.fold.name}: {unit.method}")
    for rows in results.values():
        result.rows += sorted(rows, key=lambda r: (r.seed, r.label, r.problem))
    _check_one_version(result.rows, out)
    return result


def _evaluation_digest(tables: Sequence[Table], leave_out: LeaveOut, settings: Settings) -> str:
    """A name for tables (every line of them), split, settings and the meaning of rows; 16 hex digits."""
    running = hashlib.sha256(
        json.dumps([_ROW_VERSION, leave_out, settings.tolerance, settings.risk]).encode()
    )
    for line in table_lines(tables):
        running.update(line.encode())
    return running.hexdigest()[:16]


def _kept_name(method: str, fit: FitSurrogate) -> str:
    """The name that rows are kept by: a language model's go with its answers, which are other weights' next time."""
    answers = getattr(fit, "keywords", {}).get("answers")
    return method if answers is None else f"{method} {digest([a.to_json() for a in answers])}"


def _check_one_version(rows: Sequence[EvaluationRow], out: Path | None) -> None:
    versions: dict[str, set[str]] = {}
    for row in rows:
        versions.setdefault(row.method, set()).add(row.surrogate)
    for method, surrogates in versions.items():
        if len(surrogates) > 1:
            raise MixedResults(
                f"method {method} has rows of {', '.join(sorted(surrogates))}: its version changed since {out} was "
                "written. Give another --out, or delete that folder's rows"
            )


class _RowStore:
    """Rows on disk, one file per fold, method and seed; each is complete or not there."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def _path(self, fold: Fold, method: str, seed: int) -> Path:
        # Names of groups come from tables: only what is safe in a file's name, and a digest of the rest.
        safe = re.sub(r"[^A-Za-z0-9-]+", "-", f"{fold.name}-{method}")[:80]
        exact = hashlib.sha256(json.dumps([fold.name, method]).encode()).hexdigest()[:8]
        return self._folder / f"{safe}-{exact}-seed{seed}.json"

    def read(self, fold: Fold, method: str, seed: int) -> list[EvaluationRow] | None:
        """The rows written before; None if there are none. Raises `RecordError` for a damaged file."""
        path = self._path(fold, method, seed)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RecordError(f"{path}: not JSON ({error}): delete the file, it is made again") from error
        return [EvaluationRow.from_json(row) for row in data]

    def write(self, fold: Fold, method: str, seed: int, rows: Sequence[EvaluationRow]) -> None:
        """Put rows there, in one step."""
        with open_named_output(self._path(fold, method, seed)) as stream:
            stream.write(json.dumps([r.to_json() for r in rows], allow_nan=False).encode())


def _run_units(units: Sequence[_WorkUnit], jobs: int) -> Iterator[tuple[_WorkUnit, list[EvaluationRow]]]:
    """Results as they come: in this process for one job, else in processes of their own."""
    if min(jobs, len(units)) <= 1:
        for unit in units:
            yield unit, unit.run()
        return
    # Spawned, not forked: this process has threads (progress), and numerical libraries have theirs.
    with ProcessPoolExecutor(min(jobs, len(units)), multiprocessing.get_context("spawn")) as pool:
        try:
            units_by_future = {pool.submit(unit.run): unit for unit in units}
            for future in as_completed(units_by_future):
                yield units_by_future[future], future.result()
        finally:
            # After an error or an interruption, what has not begun must not hold up the end.
            pool.shutdown(wait=True, cancel_futures=True)
