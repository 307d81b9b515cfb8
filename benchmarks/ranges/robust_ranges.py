"""Claim: one config for a kernel's shapes, from a few candidates at a few of them, is nearly the best single config.

    python -m benchmarks.ranges.robust_ranges --out benchmarks/results/robust_ranges.json --models FOLDER

Replays the recorded H200 tables of every kernel with at least `--shapes` shapes of the same dtypes on the CPU. The
shapes of a kernel stand for a range, each as often as another. `tune_range` decides one config for all of them: its
candidates are measured at `--measured` of the shapes (and, a second time, at all), the others are forecast, by the
surrogate that ships, fitted to the other half of the families of kernels. Its slow-down against the best config of
each shape (geometric mean over the shapes) stands beside that of the best single config in hindsight, of the best
configs of the first and of the middle shape used everywhere, and of the config that an ordinary decision at the middle
shape takes. No more than seven shapes of a kernel are recorded, and they differ in several sizes at once: a range in
the use of `Robust` differs in one.
"""

from __future__ import annotations

import math
import statistics
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from benchmarks.lib.surrogates_without import table_paths
from forecast_autotune.ranges.points import RangePoint
from forecast_autotune.ranges.tuning import RangePlan, tune_range
from forecast_autotune.records import Candidate
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.store.similarity import feature_distance, similarity_features
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.learned import LearnedModel, LearnedSurrogate
from forecast_autotune.surrogates.protocol import Array, Surrogate
from forecast_autotune.tuning.loop import tune
from forecast_autotune.tuning.replays.replay import load, task_of
from forecast_autotune.tuning.replays.table_measurer import TableMeasurer
from forecast_train.evaluation.splits import make_folds
from forecast_train.surrogate.fit import fit_model

NEAR_BEST = 0.05


@dataclass(frozen=True)
class KernelShapes:
    """The recorded shapes of one kernel, and how far apart they are."""

    family: str
    tables: Sequence[Table]
    candidates: Sequence[Candidate]
    """Those that are recorded at every shape."""
    distances: Array
    """Sum of |log2 of sizes| apart: [shapes, shapes]."""

    @property
    def middle(self) -> int:
        """The shape that is nearest to all others."""
        return int(self.distances.sum(axis=1).argmin())

    def slowdowns(self) -> Array:
        """log2 of every candidate's time over the best one's, per shape: [shapes, candidates]; inf where it fails."""
        rows = [t.by_candidate() for t in self.tables]
        logs = np.array(
            [[math.log2(r[c].ms) if r[c].ok else math.inf for c in self.candidates] for r in rows]
        )
        return np.asarray(logs - logs.min(axis=1, keepdims=True))

    def spread(self, count: int) -> list[int]:
        """So many shapes, far apart: the middle one, then always the one farthest from those taken."""
        taken = [self.middle]
        while len(taken) < min(count, len(self.tables)):
            taken.append(int(self.distances[:, taken].min(axis=1).argmax()))
        return sorted(taken)


def kernels_with_shapes(tables: Sequence[Table], least: int) -> list[KernelShapes]:
    """Kernels with at least so many shapes of the same dtypes on the same device."""
    families = {t.problem.id: fold.name for fold in make_folds(tables, "family") for t in fold.test}
    groups: dict[tuple[object, ...], list[Table]] = defaultdict(list)
    for table in tables:
        p = table.problem
        dtypes = tuple((a.name, a.dtype) for a in p.arguments if a.kind == "tensor")
        if p.id in families:
            groups[(families[p.id], p.kernel.name, p.kernel.source_sha256, p.device.slug, dtypes)].append(
                table
            )
    found = []
    for (family, *_), shapes in sorted(groups.items(), key=lambda item: str(item[0])):
        rows = [t.by_candidate() for t in shapes]
        common = [c for c in rows[0] if all(c in r for r in rows)]
        if len(shapes) >= least and any(all(r[c].ok for r in rows) for c in common):
            features = [similarity_features(t.problem) for t in shapes]
            apart = np.array([[feature_distance(a, b) for b in features] for a in features])
            found.append(KernelShapes(str(family), shapes, common, apart))
    return found


def decide(kernel: KernelShapes, measured: Sequence[int], surrogate: Surrogate) -> dict[str, Any]:
    """One decision for all shapes of a kernel, measured at some of them."""
    points = [
        RangePoint(
            replace(t.problem, ttir={}),
            str(t.problem.extra.get("label")),
            {m.candidate: m.grid for m in t.measurements if m.grid is not None},
        )
        for t in kernel.tables
    ]
    count = len(points)
    nearness = 1.0 / np.maximum(kernel.distances[:, measured], 1e-9) ** 2
    shares = nearness / nearness.sum(axis=1, keepdims=True)
    plan = RangePlan(points, list(measured), np.full(count, 1 / count), shares)
    task = task_of(kernel.tables[measured[-1]])
    task = replace(
        task, candidates=kernel.candidates, problem=replace(task.problem, id=f"range-{task.problem.id}")
    )
    store = Store(None)
    decision = tune_range(
        task,
        plan,
        lambda: [TableMeasurer(kernel.tables[i]) for i in measured],
        store=store,
        surrogate=surrogate,
        settings=Settings(),
    )
    slow = kernel.slowdowns()[:, list(kernel.candidates).index(decision.chosen)]
    return {
        "slowdown": _mean(slow),
        "worst": _share(float(slow.max())),
        "candidates_measured": decision.measured,
        "measurements": sum(len(store.measurements(p.problem)) for p in points),
    }


def decide_at(kernel: KernelShapes, shape: int, surrogate: Surrogate) -> dict[str, Any]:
    """An ordinary decision at one shape, whose config serves all of them."""
    task = replace(task_of(kernel.tables[shape]), candidates=kernel.candidates)
    decision = tune(
        task,
        lambda: TableMeasurer(kernel.tables[shape]),
        store=Store(None),
        surrogate=surrogate,
        settings=Settings(),
    )
    slow = kernel.slowdowns()[:, list(kernel.candidates).index(decision.chosen)]
    return {"slowdown": _mean(slow), "measurements": decision.measured}


def replay_kernel(kernel: KernelShapes, surrogate: Surrogate, measured: int) -> dict[str, Any]:
    """Everything of one kernel."""
    slow = kernel.slowdowns()
    best = slow.mean(axis=0).min()
    alone = [_mean(slow[:, int(row.argmin())]) for row in slow]
    return {
        "kernel": kernel.tables[0].problem.kernel.name,
        "family": kernel.family,
        "shapes": len(kernel.tables),
        "candidates": len(kernel.candidates),
        "best_single": _share(float(best)),
        "best_at_first": alone[0],
        "best_at_middle": alone[kernel.middle],
        "tuned_at_middle": decide_at(kernel, kernel.middle, surrogate),
        "robust": decide(kernel, kernel.spread(measured), surrogate),
        "robust_all": decide(kernel, range(len(kernel.tables)), surrogate),
    }


def _share(log2_ratio: float) -> float | None:
    """A slow-down as a share; None where the config fails at a shape."""
    return 2.0**log2_ratio - 1.0 if math.isfinite(log2_ratio) else None


def _mean(slow: Array) -> float | None:
    return _share(float(slow.mean()))


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Geometric means over the kernels, in which every config that is compared runs at all shapes."""

    def of(row: Mapping[str, Any], name: str) -> float | None:
        value = row[name]
        found = value["slowdown"] if isinstance(value, Mapping) else value
        return None if found is None else float(found)

    names = ("best_single", "robust", "robust_all", "tuned_at_middle", "best_at_middle", "best_at_first")
    sound = [r for r in rows if all(of(r, n) is not None for n in names)]

    def mean(chosen: Sequence[Mapping[str, Any]], name: str) -> float:
        return round(math.exp(statistics.mean(math.log1p(of(r, name) or 0.0) for r in chosen)) - 1.0, 5)

    near = [r for r in sound if (of(r, "best_single") or 0.0) <= NEAR_BEST]
    return {
        "kernels": len(sound),
        "left_out": len(rows) - len(sound),
        "shapes": [min(r["shapes"] for r in sound), max(r["shapes"] for r in sound)],
        "slowdown": {n: mean(sound, n) for n in names},
        "where_best_single_within_5_percent": {"kernels": len(near), **{n: mean(near, n) for n in names}},
        "share_of_candidates_measured": round(
            statistics.median(r["robust"]["candidates_measured"] / r["candidates"] for r in sound), 4
        ),
        "measurements": {
            n: statistics.median(r[n]["measurements"] for r in sound)
            for n in ("robust", "robust_all", "tuned_at_middle")
        },
        "median_all": statistics.median(r["candidates"] * r["shapes"] for r in sound),
    }


def surrogates_of_other_half(tables: Sequence[Table], folder: Path) -> dict[str, Surrogate]:
    """By family: a surrogate fitted to every second family but not to this one; kept in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    folds = sorted(make_folds(tables, "family"), key=lambda fold: fold.name)
    found: dict[str, Surrogate] = {}
    for half in (0, 1):
        path = folder / f"half_{half}.npz"
        tested = folds[half::2]
        own = {t.problem.id for fold in tested for t in fold.test}
        if not path.is_file():
            # What shares a kernel with a tested family is in no fold's train side of that family.
            apart = set.intersection(*({t.problem.id for t in fold.train} for fold in tested))
            train = [t for t in tables if t.problem.id in apart - own]
            fit_model(train).save(path)
            say(f"fitted to {len(train)} tables")
        surrogate = DefaultSurrogate(LearnedSurrogate(LearnedModel.load(path)))
        found |= {fold.name: surrogate for fold in tested}
    return found


def run(a: Namespace) -> None:
    report = ResultFile(a, "robust_ranges", 0)
    recorded = load(table_paths())
    surrogates = surrogates_of_other_half(recorded, a.models)
    kernels = kernels_with_shapes(load(a.tables) if a.tables else recorded, a.shapes)
    rows = []
    for kernel in kernels if a.tables else kernels[a.first :: a.every]:
        row = replay_kernel(kernel, surrogates[kernel.family], a.measured)
        rows.append(row)
        report.add("kernels", row)
        say(f"{row['kernel']}: {row['robust']['slowdown']} (best single {row['best_single']})")
    report.finish(summarise(rows))


def main() -> int:
    made = parser(__doc__)
    made.add_argument(
        "--models",
        type=Path,
        required=True,
        help="a folder of models, each fitted to half of the families; made where missing",
    )
    made.add_argument("--shapes", type=int, default=6, help="the fewest shapes of a kernel")
    made.add_argument("--measured", type=int, default=4, help="how many of them are measured")
    made.add_argument("--tables", type=Path, nargs="*", help="replay these instead of the recorded ones")
    made.add_argument("--every", type=int, default=3, help="take every so many-th kernel")
    made.add_argument(
        "--first", type=int, default=1, help="from this one; the policy was chosen on 0, 6, 12, ..."
    )
    run(parse_arguments(made, on_host=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
