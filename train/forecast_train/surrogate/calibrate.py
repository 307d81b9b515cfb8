"""Fit the curves of `forecast_autotune.surrogates.calibration`, for any surrogate.

Every table is replayed by a surrogate fitted without the table's family: as recorded, with a few of its
candidates, and with its IR taken away. `curves` fits the corrections; the reliability that is reported leaves
each family out of them as well.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from forecast_autotune.numerics import INTERVAL_LEVELS
from forecast_autotune.policy import RiskBounded
from forecast_autotune.records import Device, Measurement, Problem, digest
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.calibration import (
    GROUPS,
    OWN_MEASUREMENT_BOUNDS,
    UNKNOWN,
    CalibrationGroup,
    calibration_group,
    interval_class,
    measurement_class,
)
from forecast_autotune.surrogates.protocol import Array, Relative, Surrogate
from forecast_autotune.surrogates.relatives import kinship
from forecast_train.evaluation import metrics
from forecast_train.evaluation.splits import Fold, make_folds, nearest_relatives
from forecast_train.surrogate.calibration_curves import ReplayRecord, fit_curves
from forecast_train.surrogate.replay_files import read_replays, write_replays
from forecast_train.surrogate.replay_observation import ReplayStep, observe_replay

FitSurrogate = Callable[[Sequence[Table]], Surrogate]
"""Fits a surrogate to tables; a function of a module when several processes share the work."""

_UNKNOWN_DEVICE = "a device that no table knows"
_TUNED_MEASUREMENTS = 8
"""Measurements that are known of a problem tuned before: half of all decisions make more."""
_SHORT_LENGTHS = (10, 20)
"""Lengths of the lists that a few of a table's candidates make."""


def collect_replays(
    tables: Sequence[Table], make: FitSurrogate, seeds: Sequence[int], *, jobs: int = 1, unseen: bool = False
) -> tuple[str, list[ReplayRecord]]:
    """(surrogate's `name/version`, all replays), each family forecast by a surrogate that never saw it.

    `unseen`: only as recorded, of a kernel that nothing else is known of. Raises `SplitError` when there is
    but one family.
    """
    split = make_folds(tables, "family")
    if jobs <= 1:
        made = [make(fold.train) for fold in split]
        done = [_replay_share(work) for work in _replay_shares(split, made, seeds, unseen)]
    else:
        # Spawned: numerical libraries have threads, and a fork copies their locks.
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            made = list(pool.map(make, [fold.train for fold in split]))
            done = list(pool.map(_replay_share, _replay_shares(split, made, seeds, unseen)))
    return f"{made[0].name}/{made[0].version}", [seen for found in done for seen in found]


@dataclass(frozen=True)
class _ReplayShare:
    """Work for one process: a seed's replays of a kernel, by the surrogate that never saw its family."""

    fold: Fold
    """Its test side holds this kernel's tables alone, and nothing is left to learn from."""
    surrogate: Surrogate
    seed: int
    unseen: bool


def _replay_shares(
    split: Sequence[Fold], made: Sequence[Surrogate], seeds: Sequence[int], unseen: bool
) -> Iterator[_ReplayShare]:
    """Replays of a kernel know of no other kernel's: a family of forty kernels may be shared out."""
    for fold, surrogate in zip(split, made, strict=True):
        kernels: dict[str, list[Table]] = {}
        for table in fold.test:
            kernels.setdefault(table.problem.kernel.name, []).append(table)
        for seed in seeds:
            for some in kernels.values():
                yield _ReplayShare(replace(fold, test=tuple(some), train=()), surrogate, seed, unseen)


def _replay_share(share: _ReplayShare) -> list[ReplayRecord]:
    return list(_replay_passes(share.fold, share.surrogate, share.seed, share.unseen))


def _replay_passes(fold: Fold, surrogate: Surrogate, seed: int, unseen: bool) -> Iterator[ReplayRecord]:
    """The kernel unseen, then tuned at others of its shapes, short lists, no IR, then on a renamed device."""
    tuned: dict[str, Sequence[Measurement]] = {}

    def play(table: Table, relatives: Sequence[Relative] = ()) -> ReplayRecord:
        steps, seen = observe_replay(table, surrogate, seed=seed, relatives=relatives)
        problem = table.problem
        tuned.setdefault(problem.id, seen[:_TUNED_MEASUREMENTS])
        count = len(table.by_candidate())
        group = calibration_group(problem.device, bool(problem.ttir), count, kinship(problem, relatives))
        # How strange a kernel is, the surrogate knows alone.
        return ReplayRecord(fold.name, problem.id, steps[-1].group or group, count, tuple(steps))

    for table in fold.test:
        yield play(table)
    if unseen:
        return
    for table in fold.test:
        if others := _tuned_before(table.problem, fold.test, seed):
            yield play(table, [Relative(problem, tuned[problem.id]) for problem in others])
    for table in fold.test:
        for length in _SHORT_LENGTHS:
            if (few := shorten_table(table, length, seed)) is not None:
                yield play(few)
    for table in fold.test:
        if table.problem.ttir:
            yield play(Table(replace(table.problem, ttir={}), table.measurements))
        if calibration_group(table.problem.device, True) != UNKNOWN:
            strange = Device(_UNKNOWN_DEVICE, table.problem.device.backend)
            yield play(Table(replace(table.problem, device=strange), table.measurements))


def _tuned_before(problem: Problem, tables: Sequence[Table], seed: int) -> list[Problem]:
    """What came before this problem, were its kernel's problems to come in an order drawn at random.

    Nearest first, and at least one if there is another.
    """
    others = [r.problem for r in nearest_relatives(problem, tables)]
    generator = np.random.default_rng([seed, int(digest(problem.id)[:12], 16)])
    order = generator.permutation(len(others))
    count = 1 + int(generator.integers(max(1, len(others))))
    return [others[i] for i in sorted(order[:count])]


def shorten_table(table: Table, length: int, seed: int) -> Table | None:
    """A table of so many of its candidates, drawn at random; None if it has no more, or none of them runs."""
    rows = list(table.by_candidate().values())
    if len(rows) <= length:
        return None
    generator = np.random.default_rng([seed, length, int(digest(table.problem.id)[:12], 16)])
    kept = [rows[i] for i in sorted(generator.permutation(len(rows))[:length])]
    return Table(table.problem, kept) if any(m.ok for m in kept) else None


def calibrate_surrogate(
    tables: Sequence[Table],
    make: FitSurrogate,
    seeds: Sequence[int] = (0, 1, 2),
    *,
    jobs: int = 1,
    replays: Path | None = None,
    unseen: bool = False,
) -> dict[str, Any]:
    """`{"surrogate", "problems", "families", "calibration", "reliability"}`, JSON-able.

    `calibration` is what `Calibration.from_json` reads; `reliability` is `reliability_report`'s. `replays` are kept in
    that file, or read from it if it is there; `unseen` as in `collect_replays`. Raises `SplitError` when there is but
    one family.
    """
    if replays is not None and replays.exists():
        surrogate, seen = read_replays(replays)
    else:
        surrogate, seen = collect_replays(tables, make, seeds, jobs=jobs, unseen=unseen)
        if replays is not None:
            write_replays(replays, surrogate, seen)
    return {
        "surrogate": surrogate,
        "problems": len({s.problem for s in seen}),
        "families": len({s.family for s in seen}),
        "seeds": len(seeds),
        "calibration": fit_curves(seen).to_json(),
        "reliability": reliability_report(seen),
    }


def reliability_report(seen: Sequence[ReplayRecord], *, accepted: float = 0.1) -> dict[str, Any]:
    """Stated against observed by group, each family judged by curves that were fitted without it.

    `steps`: the risk at every step; `decisions`: only where the default policy would have stopped, at an
    accepted risk of `accepted`, with the ECE that honesty itself would show; `within`: P(within 5 %) of
    every untried candidate, at first and later; `raw_...`: the same without curves; `coverage`: share
    inside the central intervals, by nominal level.
    """
    curves = {name: fit_curves([s for s in seen if s.family != name]) for name in {s.family for s in seen}}
    made: dict[str, Any] = {}
    for group in GROUPS:
        rows = [s for s in seen if s.group == group]
        if rows:
            made[group] = _reliability(rows, [curves[s.family].group(group) for s in rows], accepted)
    return made


def _reliability(
    rows: Sequence[ReplayRecord], groups: Sequence[CalibrationGroup], accepted: float
) -> dict[str, Any]:
    pairs = list(zip(rows, groups, strict=True))
    steps = [
        (step.risk, stated(g, step), bool(step.beaten)) for s, g in pairs for step in _steps_with_truth(s)
    ]
    stops = [
        (stated(g, step), bool(step.beaten)) for s, g in pairs for step in _stopping_step(s, g, accepted)
    ]
    raw, said, true = zip(*steps, strict=True)
    ended, failed = zip(*stops, strict=True)
    found: dict[str, Any] = {
        "raw_steps": table(raw, true),
        "steps": table(said, true),
        "decisions": {
            **table(ended, failed),
            "ece_if_honest": ece_by_chance(
                ended, [s.problem for s, g in pairs for _ in _stopping_step(s, g, 0.0)]
            ),
            "measured_share": _measured_share(pairs, accepted),
        },
    }
    for name, wanted in (("first", (0,)), ("later", tuple(range(1, len(OWN_MEASUREMENT_BOUNDS))))):
        held = [(step, g) for s, g in pairs for step in s.steps if measurement_class(step.each) in wanted]
        near = np.concatenate([np.zeros(0), *(step.within for step, _ in held)])
        p = np.concatenate([np.zeros(0), *(step.p_within for step, _ in held)])
        honest = [g.within[measurement_class(step.each)].array(step.p_within) for step, g in held]
        found[f"raw_within_{name}"] = table(p, near)
        found[f"within_{name}"] = table(np.concatenate([np.zeros(0), *honest]), near)
        wide = [
            (step, g) for s, g in pairs for step in s.steps if interval_class(step.own, step.each) in wanted
        ]
        found[f"coverage_{name}"] = _coverage(wide)
    return found


def _steps_with_truth(seen: ReplayRecord) -> list[ReplayStep]:
    return [step for step in seen.steps if step.beaten is not None]


def stated(group: CalibrationGroup, step: ReplayStep) -> float:
    """The calibrated risk of a step."""
    return group.risk[measurement_class(step.each)](step.risk)


def _stopping_step(seen: ReplayRecord, group: CalibrationGroup, accepted: float) -> list[ReplayStep]:
    """The step at which the default policy would have stopped; empty if nothing ran."""
    policy, told = RiskBounded(), _steps_with_truth(seen)
    cap = max(policy.floor, policy.of(policy.share, seen.candidates))
    for step in told:
        if step.new >= cap or (step.own >= policy.least and stated(group, step) <= accepted):
            return [step]
    return told[-1:]


def ece_by_chance(
    stated: Sequence[float], problems: Sequence[str], *, draws: int = 200, seed: int = 0
) -> float:
    """The mean ECE that perfectly honest statements would show, with so few problems.

    Replays of one problem come true together, so each problem has one lot per draw; an observed ECE near
    this figure says nothing against the surrogate.
    """
    names, place = np.unique(np.array(problems), return_inverse=True)
    p, generator = np.asarray(stated, float), np.random.default_rng(seed)
    lots = generator.random((draws, len(names)))[:, place.reshape(-1)]
    return float(np.mean([table(p, lot < p)["ece"] for lot in lots]))


def _measured_share(pairs: Sequence[tuple[ReplayRecord, CalibrationGroup]], accepted: float) -> float:
    """Median share of the candidates measured until then."""
    return float(
        np.median([step.new / s.candidates for s, g in pairs for step in _stopping_step(s, g, accepted)])
    )


def _coverage(held: Sequence[tuple[ReplayStep, CalibrationGroup]]) -> dict[str, float]:
    """By nominal level, every replay's step with the same weight."""
    inside: dict[str, float] = {}
    for i, level in enumerate(INTERVAL_LEVELS):
        width = NormalDist().inv_cdf(0.5 + level / 2)
        shares = [
            float((np.abs(step.z) <= width * g.intervals[interval_class(step.own, step.each)][i]).mean())
            for step, g in held
            if len(step.z)
        ]
        inside[str(level)] = float(np.mean(shares)) if shares else math.nan
    return inside


def table(stated: Sequence[float] | Array, true: Sequence[bool] | Array) -> dict[str, Any]:
    """Reliability in bins of equal width: n, ECE, Brier score, that of the base rate, and the bins."""
    p, happened = np.asarray(stated, float), np.asarray(true, bool)
    sums = metrics.bin_sums(p, happened, metrics.width_bins(p), metrics.RELIABILITY_BINS)
    rate = float(happened.mean())
    return {
        "n": len(p),
        "ece": metrics.ece_of(sums),
        "brier": metrics.brier(p, happened),
        "brier_of_base_rate": rate * (1.0 - rate),
        "bins": [asdict(b) for b in metrics.reliability_of(sums)],
    }
