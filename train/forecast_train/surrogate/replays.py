"""Replays of recorded tables: what a surrogate said at every step, and what was true. The evidence of a calibration.

Every table is replayed by a surrogate fitted without the table's family: as recorded, with a few of its
candidates, and with its IR taken away. Tables of other devices are replayed each from the rest.
"""

from __future__ import annotations

import math
import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from forecast_autotune.policy import RiskBounded, TuningState
from forecast_autotune.records import Candidate, Device, Measurement, Plan, Problem, digest
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.calibration import UNKNOWN, calibration_group, measurements_per_source
from forecast_autotune.surrogates.pooled import PooledSurrogate, pool_group
from forecast_autotune.surrogates.protocol import Array, Relative, Surrogate
from forecast_autotune.surrogates.relatives import kinship
from forecast_autotune.tuning.replays.replay import replay_one, tables_elsewhere
from forecast_train.splits import Fold, SplitError, family_of, make_folds, nearest_relatives

FitSurrogate = Callable[[Sequence[Table]], Surrogate]
"""Fits a surrogate to tables; a function of a module when several processes share the work."""

_WITHIN_TOLERANCE = 0.05
"""The tolerance that P(within) is checked at."""
DEVICE_TOLERANCES = (0.02, 0.05)
"""At which tables of other devices are replayed: the default, and the one that relatives are checked at."""
_MOST_CANDIDATES = 1000
"""Candidates of larger spaces on which statements are checked, evenly spread."""
_REPLAYED_SHARE = 0.3
"""Replays go on to this share of the candidates, past where the default policy stops."""
_UNKNOWN_DEVICE = "a device that no table knows"
_TUNED_MEASUREMENTS = 8
"""Measurements that are known of a problem tuned before: half of all decisions make more."""
_SHORT_LENGTHS = (10, 20)
"""Lengths of the lists that a few of a table's candidates make."""

_DeviceReplay = tuple[Table, Sequence[Relative]]
Work = TypeVar("Work")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ReplayStep:
    """One moment of one replay: uncalibrated statements, and the truth about each."""

    own: int
    """Measurements of this problem that ran."""
    each: int
    """Measurements that ran of each of its sources; see `calibration.measurements_per_source`."""
    new: int
    """Measurements of this problem, failures included."""
    risk: float
    """Share of joint draws in which an untried candidate beats the incumbent by the tolerance."""
    beaten: bool | None
    """Whether one does; None while nothing has run."""
    p_within: Array
    """P(within the tolerance) of each candidate not measured yet, [n]; of at most `_MOST_CANDIDATES` of them."""
    within: Array
    """1.0 where it is within `_WITHIN_TOLERANCE` of the best of all, else 0.0, [n]."""
    z: Array
    """(observed - mean) / sd of those of them that run, [m]."""
    group: str = ""
    """The group whose calibration the surrogate would go by; "" if it has none."""


@dataclass(frozen=True)
class ReplayRecord:
    """One replay of one table."""

    family: str
    problem: str
    group: str
    candidates: int
    steps: tuple[ReplayStep, ...]


class ObservedPolicy(RiskBounded):
    """The default policy, noting what is stated and what is true at every step. Goes on past its limits."""

    @classmethod
    def for_table(cls, table: Table) -> ObservedPolicy:
        """A policy that knows the truth, for one replay; `steps` fills as it goes."""
        policy = cls(share=_REPLAYED_SHARE)
        rows = table.by_candidate()
        truth = {c: math.log2(m.ms) for c, m in rows.items() if m.ok}
        object.__setattr__(policy, "_truth", truth)
        object.__setattr__(policy, "steps", {})
        return policy

    steps: dict[int, ReplayStep]
    """By number of measurements: of several plans at one moment the last was made on all the IR."""
    _truth: dict[Candidate, float]

    def plan(self, state: TuningState) -> Plan:
        """The plan of the default policy with a risk that is hardly ever accepted."""
        raw = replace(state, forecasts=state.forecasts.uncalibrated(), risk=0.005)
        plan = super().plan(raw)
        self.steps[state.new] = self._step(raw, plan)
        return plan

    def _step(self, state: TuningState, plan: Plan) -> ReplayStep:
        best = min(self._truth.values())
        forecasts, names = state.forecasts, state.forecasts.candidates
        rows = np.array([i for i, c in enumerate(names) if c not in state.measured], dtype=np.intp)
        rows = rows[:: math.ceil(len(rows) / _MOST_CANDIDATES) or 1]
        times = np.array([self._truth.get(names[int(i)], math.inf) for i in rows])
        is_ok = np.isfinite(times)
        near = math.log2(1 + state.tolerance) + 1e-9
        own = sum(m.ok for m in state.measured.values())
        return ReplayStep(
            own=own,
            each=measurements_per_source(own, names),
            new=state.new,
            risk=plan.risk,
            beaten=state.best() - best > near if math.isfinite(state.best()) else None,
            p_within=forecasts.p_within(_WITHIN_TOLERANCE, seed=state.seed)[rows],
            within=(times <= best + math.log2(1 + _WITHIN_TOLERANCE)).astype(float),
            z=(times[is_ok] - forecasts.mean[rows][is_ok]) / forecasts.sd[rows][is_ok],
            group=forecasts.group,
        )


def observe_replay(
    table: Table,
    surrogate: Surrogate,
    *,
    seed: int = 0,
    relatives: Sequence[Relative] = (),
    settings: Settings | None = None,
) -> tuple[list[ReplayStep], list[Measurement]]:
    """The steps of one replay of a table, and what was measured. The surrogate sees nothing else of it.

    `settings` are the default ones unless given; `seed` takes the place of theirs.
    """
    policy = ObservedPolicy.for_table(table)
    settings = (settings or Settings()).with_(seed=seed)
    with warnings.catch_warnings():
        # The tuner would go on without forecasts, and there would be nothing to calibrate.
        warnings.filterwarnings("error", "(surrogate .* failed|joint samples failed)")
        _, measurements = replay_one(
            table, surrogate=surrogate, policy=policy, settings=settings, relatives=relatives
        )
    return list(policy.steps.values()), measurements


def collect_replays(
    tables: Sequence[Table], make: FitSurrogate, seeds: Sequence[int], *, jobs: int = 1, unseen: bool = False
) -> tuple[str, list[ReplayRecord]]:
    """(surrogate's `name/version`, all replays), each family forecast by a surrogate that never saw it.

    `unseen`: only as recorded, of a kernel that nothing else is known of. Raises `SplitError` when there is
    but one family.
    """
    split = make_folds(tables, "family")
    surrogates = list(_run_jobs(make, [fold.train for fold in split], jobs))
    records = _run_jobs(_replay_share, list(_replay_shares(split, surrogates, seeds, unseen)), jobs)
    name = f"{surrogates[0].name}/{surrogates[0].version}"
    return name, [record for some in records for record in some]


def _run_jobs(function: Callable[[Work], Result], work: Iterable[Work], jobs: int) -> Iterable[Result]:
    if jobs <= 1:
        return map(function, work)
    # Spawned: numerical libraries have threads, and a fork copies their locks.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, work))


@dataclass(frozen=True)
class _ReplayShare:
    """Work for one process: a seed's replays of a kernel, by the surrogate that never saw its family."""

    fold: Fold
    """Its test side holds this kernel's tables alone, and nothing is left to learn from."""
    surrogate: Surrogate
    seed: int
    unseen: bool


def _replay_shares(
    split: Sequence[Fold], surrogates: Sequence[Surrogate], seeds: Sequence[int], unseen: bool
) -> Iterator[_ReplayShare]:
    """Replays of a kernel know of no other kernel's: a family of forty kernels may be shared out."""
    for fold, surrogate in zip(split, surrogates, strict=True):
        kernels: dict[str, list[Table]] = {}
        for table in fold.test:
            kernels.setdefault(table.problem.kernel.name, []).append(table)
        for seed in seeds:
            for test in kernels.values():
                yield _ReplayShare(replace(fold, test=tuple(test), train=()), surrogate, seed, unseen)


def _replay_share(share: _ReplayShare) -> list[ReplayRecord]:
    return list(_replay_passes(share.fold, share.surrogate, share.seed, share.unseen))


def _replay_passes(fold: Fold, surrogate: Surrogate, seed: int, unseen: bool) -> Iterator[ReplayRecord]:
    """The kernel unseen, then tuned at others of its shapes, short lists, no IR, then on a renamed device."""
    measurements: dict[str, Sequence[Measurement]] = {}

    def play(table: Table, relatives: Sequence[Relative] = ()) -> ReplayRecord:
        steps, rows = observe_replay(table, surrogate, seed=seed, relatives=relatives)
        problem = table.problem
        measurements.setdefault(problem.id, rows[:_TUNED_MEASUREMENTS])
        count = len(table.by_candidate())
        group = calibration_group(problem.device, bool(problem.ttir), count, kinship(problem, relatives))
        # How strange a kernel is, the surrogate knows alone.
        return ReplayRecord(fold.name, problem.id, steps[-1].group or group, count, tuple(steps))

    for table in fold.test:
        yield play(table)
    if unseen:
        return
    for table in fold.test:
        if problems := _earlier_problems(table.problem, fold.test, seed):
            yield play(table, [Relative(problem, measurements[problem.id]) for problem in problems])
    for table in fold.test:
        for length in _SHORT_LENGTHS:
            if (short_table := shorten_table(table, length, seed)) is not None:
                yield play(short_table)
    for table in fold.test:
        if table.problem.ttir:
            yield play(Table(replace(table.problem, ttir={}), table.measurements))
        if calibration_group(table.problem.device, True) != UNKNOWN:
            strange = Device(_UNKNOWN_DEVICE, table.problem.device.backend)
            yield play(Table(replace(table.problem, device=strange), table.measurements))


def _earlier_problems(problem: Problem, tables: Sequence[Table], seed: int) -> list[Problem]:
    """The problems before this one, were its kernel's problems to come in an order drawn at random.

    Nearest first, and at least one if there is another.
    """
    problems = [r.problem for r in nearest_relatives(problem, tables)]
    generator = np.random.default_rng([seed, int(digest(problem.id)[:12], 16)])
    order = generator.permutation(len(problems))
    count = 1 + int(generator.integers(max(1, len(problems))))
    return [problems[i] for i in sorted(order[:count])]


def shorten_table(table: Table, length: int, seed: int) -> Table | None:
    """A table of so many of its candidates, drawn at random; None if it has no more, or none of them runs."""
    rows = list(table.by_candidate().values())
    if len(rows) <= length:
        return None
    generator = np.random.default_rng([seed, length, int(digest(table.problem.id)[:12], 16)])
    sample = [rows[i] for i in sorted(generator.permutation(len(rows))[:length])]
    return Table(table.problem, sample) if any(m.ok for m in sample) else None


def device_replays(tables: Sequence[Table], seed: int) -> list[_DeviceReplay]:
    """Every table with all others of its kernel and sizes on other devices, and with one drawn of them.

    Raises `SplitError` when there is no such table, or only one family of kernels.
    """
    replays: list[_DeviceReplay] = []
    for table in tables:
        relatives = tables_elsewhere(table, tables)
        if len(relatives) > 1:
            replays.append((table, relatives))
        if relatives:
            choice = np.random.default_rng([seed, int(digest(table.problem.id), 16)]).integers(len(relatives))
            replays.append((table, [relatives[int(choice)]]))
    families = {family_of(table.problem) for table, _ in replays}
    if len(families) < 2:
        raise SplitError(
            "calibrating what other devices say needs two or more kernel families that were measured on "
            f"several devices at the same sizes, got {', '.join(sorted(families)) or 'none'}: add tables"
        )
    return replays


def run_device_replay(job: _DeviceReplay, *, seed: int) -> list[ReplayRecord]:
    """One table's replays, at every tolerance of `DEVICE_TOLERANCES`."""
    table, relatives = job
    records = []
    for tolerance in DEVICE_TOLERANCES:
        settings = Settings().with_(tolerance=tolerance)
        steps, _ = observe_replay(table, PooledSurrogate(), seed=seed, relatives=relatives, settings=settings)
        family, group = family_of(table.problem), pool_group(len(relatives))
        records.append(ReplayRecord(family, table.problem.id, group, len(table.by_candidate()), tuple(steps)))
    return records


def collect_device_replays(
    tables: Sequence[Table], seeds: Sequence[int], *, jobs: int = 1
) -> list[ReplayRecord]:
    """Replays of `PooledSurrogate`, which has nothing to be fitted to. Raises `SplitError` as `device_replays` does."""
    records = []
    for seed in seeds:
        work = partial(run_device_replay, seed=seed)
        records += [r for some in _run_jobs(work, device_replays(tables, seed), jobs) for r in some]
    return records
