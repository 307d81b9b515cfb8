"""Claim: on a GPU never seen, what other GPUs measured shortens tuning, and the stated risk stays honest.

    python -m benchmarks.forecasting.unseen_gpus --out benchmarks/results/cross_device.json [--tables FILE ...] \
        [--seeds 3] [--only TEXT] [--arms analytic ...]

Leave-one-GPU-out replay of brute-forced spaces (`benchmarks/data/README.md`): the target is a kernel on
one GPU; known beforehand is nothing (`cold`), or the same kernel's tables on the other GPUs (`others`).
The default policy runs at a tolerance of 5 %; its decision is taken where it stops by itself. The run
goes on, for the figures after it: up to the default cap for the reliability of the stated risk, and
to 600 measurements where it is not within 5 % of the oracle earlier. `shipped` is the surrogate of the
release. Its risks are calibrated by the runs of this script on kernels of other families: convolution,
dedispersion and GEMM in turn, never by the curves of the package, which have seen these spaces. Baselines:
random order (expected over 400 shuffles), the mean log-slowdown of a config on the other GPUs without any
model, and extra-trees fitted within the run (20 random configs, batches of 10 by mean - sd / 2). Everything
is replayed on the CPU: no figure depends on this machine's speed. The sizes in `surrogates.pooled` were
chosen among about twenty settings on these same spaces, so its figures are not those of an untouched test.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib.environment import environment
from forecast_autotune.numerics import single_threaded_blas
from forecast_autotune.policy import RiskBounded, TuningState
from forecast_autotune.records import Candidate, Measurement
from forecast_autotune.records.table import Table, read_tables
from forecast_autotune.settings import Budget
from forecast_autotune.surrogates.calibration import INFORMED, measurement_class
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.protocol import Forecasts, Query, Relative, Surrogate
from forecast_train.evaluation.metrics import bin_sums, brier, ece_of, reliability_of, width_bins
from forecast_train.evaluation.splits import family_of
from forecast_train.surrogate.calibration_curves import ReplayRecord, risk_curves
from forecast_train.surrogate.replay_observation import ReplayStep

TABLES = Path(__file__).resolve().parents[1] / "data" / "benchmark_hub.jsonl.gz"
TOLERANCE, RISK, CAP = 0.05, 0.10, 600
NOTED_POINTS = (1, 3, 5, 10, 20, 40)
"""Measurements after which the regret is noted."""
FAILED = 6.0
"""log2 slowdown that the model-free prior charges for a config that failed elsewhere."""
NOTHING_RAN = 9.0
"""Regret while nothing has run."""

SOURCE = "https://github.com/AutoTuningAssociation/benchmark_hub, commit 8eeb99e7179e of 2025-05-24 (MIT)"
Floats = npt.NDArray[np.float64]


@dataclass
class ArmRun:
    """One arm on one target with one seed."""

    arm: str
    kernel: str
    device: str
    seed: int
    regret: dict[int, float]
    """After so many measurements."""
    to_within: int
    """Measurements to within 5 % of the oracle; CAP + 1 where it took more."""
    family: str = ""
    cap: int = 0
    """Most measurements of one decision."""
    decided_after: int | None = None
    decided_regret: float | None = None
    stated_risk: float | None = None
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    """(measured, stated risk, regret of the incumbent) of rounds up to the default cap."""


@dataclass(frozen=True)
class TargetProblem:
    """One problem as arrays: candidates, log2 slowdown over the oracle (inf: failed)."""

    table: Table
    others: tuple[Table, ...]
    names: tuple[Candidate, ...]
    found: dict[Candidate, Measurement]
    slowdown: Floats

    @classmethod
    def of(cls, table: Table, others: Iterable[Table]) -> TargetProblem:
        found = table.by_candidate()
        times = np.array([math.log2(m.ms) if m.ok else math.inf for m in found.values()])
        return cls(table, tuple(others), tuple(found), found, times - times.min())

    @property
    def label(self) -> str:
        """Kernel and device, for people."""
        return f"{self.table.problem.kernel.name} {self.table.problem.device.name}"


def targets(tables: Sequence[Table]) -> list[TargetProblem]:
    """Every table as a target, with the same kernel's tables on other devices; needs at least one."""
    by_kernel: dict[str, list[Table]] = {}
    for table in tables:
        by_kernel.setdefault(table.problem.kernel.name, []).append(table)
    return [
        TargetProblem.of(table, [t for t in same if t.problem.device != table.problem.device])
        for same in by_kernel.values()
        for table in same
        if len({t.problem.device for t in same}) > 1
    ]


def run_from_order(arm: str, target: TargetProblem, seed: int, order: Sequence[int]) -> ArmRun:
    """The figures of candidates measured in this order."""
    best = np.minimum.accumulate(target.slowdown[np.asarray(order, dtype=np.intp)])
    regret = np.where(np.isfinite(best), np.exp2(np.where(np.isfinite(best), best, 0.0)) - 1, NOTHING_RAN)
    hits = np.flatnonzero(regret <= TOLERANCE + 1e-9)
    problem = target.table.problem
    return ArmRun(
        arm,
        problem.kernel.name,
        problem.device.name,
        seed,
        {k: float(regret[min(k, len(regret)) - 1]) for k in NOTED_POINTS},
        min(int(hits[0]) + 1 if len(hits) else CAP + 1, CAP + 1),
        family_of(problem),
    )


def run_tuner(
    arm: str,
    target: TargetProblem,
    seed: int,
    surrogate: Surrogate,
    relatives: Sequence[Relative] = (),
    policy: RiskBounded = RiskBounded(),  # noqa: B008  (frozen)
) -> ArmRun:
    """A policy with a surrogate; goes on after its decision (see the module)."""
    place = {c: i for i, c in enumerate(target.names)}
    order, measured = list[int](), dict[Candidate, Measurement]()
    steps: list[tuple[int, float, float]] = []
    horizon = cap = 0
    while True:
        query = Query(target.table.problem, target.names, {}, list(measured.values()), relatives)
        with single_threaded_blas():
            forecasts = surrogate.forecast(query)
        state = TuningState(
            forecasts,
            measured,
            new=len(order),
            round=len(steps),
            tolerance=TOLERANCE,
            risk=RISK,
            seed=seed,
            problem=target.table.problem.id,
        )
        cap = cap or policy.cap(state)
        horizon = max(max(NOTED_POINTS), cap)
        if order and len(order) <= horizon:
            steps.append((len(order), policy.plan(state).risk, best_regret(target, order)))
        limit = horizon if best_regret(target, order) <= TOLERANCE else CAP
        if len(order) >= min(limit, len(target.names)):
            break
        # The default policy's own batches, also where it would have stopped.
        on = replace(state, risk=-1.0, budget=Budget(measurements=limit))
        plan = policy.plan(on)
        if not plan.measure:
            break
        for candidate in plan.measure:
            order.append(place[candidate])
            measured[candidate] = target.found[candidate]
    return with_decision(replace(run_from_order(arm, target, seed, order), steps=steps, cap=cap))


def with_decision(run: ArmRun) -> ArmRun:
    """The run with its decision: the first step at which the risk is accepted, or the cap reached."""
    for step in run.steps:
        run.decided_after, run.stated_risk, run.decided_regret = step
        if step[1] <= RISK or step[0] >= run.cap:
            break
    return run


def recalibrated_runs(runs: Sequence[ArmRun]) -> list[ArmRun]:
    """The runs of one arm with their risks corrected by what became of those on other families' kernels."""
    curves = {f: risk_curves([seen(r) for r in runs if r.family != f]) for f in {r.family for r in runs}}

    def corrected(run: ArmRun) -> list[tuple[int, float, float]]:
        return [(n, curves[run.family][measurement_class(n)](risk), regret) for n, risk, regret in run.steps]

    return [with_decision(replace(run, steps=corrected(run))) for run in runs]


def seen(run: ArmRun) -> ReplayRecord:
    """A run as evidence for a curve."""
    none = np.zeros(0)
    steps = tuple(
        ReplayStep(n, n, n, risk, exceeds_tolerance(regret), none, none, none)
        for n, risk, regret in run.steps
    )
    return ReplayRecord(run.family, f"{run.kernel} {run.device}", INFORMED, 0, steps)


def best_regret(target: TargetProblem, order: Sequence[int]) -> float:
    """Regret of the fastest among these rows."""
    best = min((float(target.slowdown[i]) for i in order), default=math.inf)
    return 2.0**best - 1 if math.isfinite(best) else NOTHING_RAN


def exceeds_tolerance(regret: float) -> bool:
    """Whether a regret exceeds the tolerance."""
    return regret > TOLERANCE + 1e-9


def random_order_run(target: TargetProblem, seed: int) -> ArmRun:
    """Expected figures of random order: means of regrets over shuffles, the median of the counts."""
    generator = np.random.default_rng(seed)
    n = len(target.names)
    runs = [run_from_order("random", target, seed, generator.permutation(n).tolist()) for _ in range(400)]
    mean = {k: float(np.mean([r.regret[k] for r in runs])) for k in NOTED_POINTS}
    return replace(runs[0], regret=mean, to_within=int(np.median([r.to_within for r in runs])))


def mean_prior_run(target: TargetProblem, seed: int) -> ArmRun:
    """The model-free prior: mean log2 slowdown of the config on the other GPUs, failures charged."""
    columns = []
    for other in target.others:
        rows = other.by_candidate()
        fastest = min(m.ms for m in rows.values() if m.ok)
        known = [rows.get(c) for c in target.names]
        columns.append([math.log2(m.ms / fastest) if m is not None and m.ok else FAILED for m in known])
    order = np.argsort(np.mean(columns, axis=0), kind="stable")
    return run_from_order("mean of others", target, seed, [int(i) for i in order])


def forest_run(target: TargetProblem, seed: int) -> ArmRun:
    """A cold surrogate of the usual kind, refitted after every batch; failures take the slowest time."""
    from sklearn.ensemble import ExtraTreesRegressor

    from forecast_autotune.features.config_encoder import ConfigEncoder

    points = ConfigEncoder.of(target.names)(target.names)
    order = [int(i) for i in np.random.default_rng(seed).permutation(len(points))[:20]]
    while (best_regret(target, order) > TOLERANCE and len(order) < CAP) or len(order) < max(NOTED_POINTS):
        seen = target.slowdown[order]
        worst = seen[np.isfinite(seen)].max(initial=FAILED)
        forest = ExtraTreesRegressor(100, random_state=seed, n_jobs=1)
        forest.fit(points[order], np.where(np.isfinite(seen), seen, worst))
        each = np.stack([tree.predict(points) for tree in forest.estimators_])
        score = each.mean(axis=0) - 0.5 * each.std(axis=0)
        score[order] = math.inf
        order += [int(i) for i in np.argsort(score, kind="stable")[:10]]
    return run_from_order("extra trees, cold", target, seed, order)


def related_tables(target: TargetProblem) -> list[Relative]:
    """The other GPUs' whole tables."""
    return [Relative(t.problem, tuple(t.measurements)) for t in target.others]


def tuning_arm(
    name: str, make: Callable[[], Surrogate], others: bool, policy: RiskBounded
) -> Callable[[TargetProblem, int], ArmRun]:
    """An arm that tunes: a fresh surrogate per run, with the other GPUs' tables or without."""
    return lambda target, seed: run_tuner(
        name, target, seed, make(), related_tables(target) if others else (), policy
    )


class Uncalibrated(DefaultSurrogate):
    """The surrogate that ships without its calibration, which was fitted to these very spaces."""

    def forecast(self, query: Query) -> Forecasts:
        return super().forecast(query).uncalibrated()


HELD_OUT = "shipped, others"
"""The arm that is calibrated here, with the family left out."""
TUNING_ARMS: dict[str, tuple[Callable[[], Surrogate], bool, RiskBounded]] = {
    "shipped, cold": (DefaultSurrogate, False, RiskBounded()),
    "analytic, others": (AnalyticSurrogate, True, RiskBounded()),
    HELD_OUT: (Uncalibrated, True, RiskBounded()),
}
ARMS: dict[str, Callable[[TargetProblem, int], ArmRun]] = {
    "random": random_order_run,
    "mean of others": mean_prior_run,
    "extra trees, cold": forest_run,
    **{name: tuning_arm(name, *rest) for name, rest in TUNING_ARMS.items()},
}


def summary(runs: Sequence[ArmRun]) -> dict[str, Any]:
    """What one arm's runs add up to; medians over targets of the median over seeds."""
    spaces: dict[tuple[str, str], list[ArmRun]] = {}
    for run in runs:
        spaces.setdefault((run.kernel, run.device), []).append(run)
    counts = [float(np.median([r.to_within for r in same])) for same in spaces.values()]
    found: dict[str, Any] = {
        "targets": len(spaces),
        "to_within_median": float(np.median(counts)),
        "to_within_p90": float(np.quantile(counts, 0.9)),
        "beyond_cap": sum(c > CAP for c in counts),
        "to_within": {f"{k} {d}": c for (k, d), c in zip(spaces, counts, strict=True)},
        "geomean_regret": {
            k: float(np.exp(np.mean([np.log1p(r.regret[k]) for r in runs])) - 1) for k in NOTED_POINTS
        },
    }
    if not runs[0].steps:
        return found
    stated = np.array([s for r in runs for _, s, _ in r.steps])
    true = np.array([exceeds_tolerance(g) for r in runs for _, _, g in r.steps])
    place = width_bins(stated)
    sums = bin_sums(stated, true, place, int(place.max()) + 1)
    ends = [(r.stated_risk or 0.0, r.decided_regret or 0.0, r.decided_after or 0) for r in runs]
    sure = [regret for risk, regret, _ in ends if risk <= RISK]
    wrong = sum(map(exceeds_tolerance, sure))
    return found | {
        "ece": ece_of(sums),
        "reliability": [asdict(row) for row in reliability_of(sums)],
        "brier": brier(stated, true),
        "steps": len(stated),
        "confident_share": len(sure) / len(runs),
        "confidently_wrong_share": wrong / len(runs),
        "wrong_among_confident": wrong / max(1, len(sure)),
        "decision": {
            "median_measured": float(np.median([n for _, _, n in ends])),
            "geomean_regret": float(np.exp(np.mean([np.log1p(g) for _, g, _ in ends])) - 1),
            "beyond_tolerance_share": float(np.mean([exceeds_tolerance(g) for _, g, _ in ends])),
            "mean_stated_risk": float(np.mean([s for s, _, _ in ends])),
        },
    }


def all_arms(target: TargetProblem, arms: Sequence[str], seeds: int) -> list[ArmRun]:
    """Every arm on one target; the baselines, and those that know nothing and take long, get one seed."""
    return [ARMS[arm](target, seed) for arm in arms for seed in range(seeds if arm == HELD_OUT else 1)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tables", type=Path, nargs="+", default=[TABLES])
    parser.add_argument("--seeds", type=int, default=5, help=f"of '{HELD_OUT}'; others have one")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="targets whose 'kernel device' holds this text")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    arguments = parser.parse_args()
    chosen = [
        t
        for t in targets([t for path in arguments.tables for t in read_tables(path)])
        if arguments.only in t.label
    ]
    runs: list[ArmRun] = []
    with ProcessPoolExecutor(arguments.workers) as workers:
        work = partial(all_arms, arms=arguments.arms, seeds=arguments.seeds)
        for target, same in zip(chosen, workers.map(work, chosen), strict=True):
            runs += same
            shown = "; ".join(f"{r.arm} {r.to_within}" for r in same)
            print(f"{target.label}: {shown}", flush=True)
    if HELD_OUT in arguments.arms:
        mine = [r for r in runs if r.arm == HELD_OUT]
        raw = [replace(r, arm=f"{HELD_OUT}, not calibrated") for r in mine]
        runs = [r for r in runs if r.arm != HELD_OUT] + raw
        if len({r.family for r in mine}) > 1:
            runs += recalibrated_runs(mine)
    arms = list(dict.fromkeys(r.arm for r in runs))
    report = {
        "environment": {**environment(), "seeds": arguments.seeds},
        "data": [path.name for path in arguments.tables],
        "source": SOURCE if arguments.tables == [TABLES] else "as given",
        "tolerance": TOLERANCE,
        "risk": RISK,
        "cap": CAP,
        "summary": {arm: summary([r for r in runs if r.arm == arm]) for arm in arms},
        "runs": [asdict(r) for r in runs],
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["summary"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
