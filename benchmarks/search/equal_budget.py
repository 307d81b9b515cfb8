"""Claim: a search that forecasts its candidates finds a faster kernel than one that does not, on one budget.

    python -m benchmarks.search.equal_budget --record PACK... --device cpu|cuda --table TABLE.jsonl.gz \
        --out RECORDING.json [--seconds 540] [--nodes 120] [--lanes 2] [--also DIR]
    python -m benchmarks.search.equal_budget --replay TABLE.jsonl.gz --out RESULT.json \
        [--seeds 5] [--budgets 10,20,40] [--surrogate lineage]

`--record` judges each candidate once, as a search would: verified in the sandbox, then timed in pairs with
the first seed. Candidates are mechanical rewrites of the seeds, of the best, and of others (and the sources
in `--also DIR/PACK/`). What is judged is on disk at once; the same command goes on where it stopped, so a
long recording may be run in pieces. `--replay` needs no device: it runs the real search against the table,
several seeds for every problem, with and without forecasts, with a random choice and with an oracle.

On a machine with H200 GPUs there is a lane for each; judging is paired, so lanes may be different cards of
one model. Run the first command until `unfinished` is empty (a candidate takes seconds: 1,600 of them about
half an hour of four GPUs), then the second, on any machine:

    python -m benchmarks.search.equal_budget --device cuda --nodes 200 --first 64 --children 24 --trials 6 \
        --seconds 540 --table search_pool_h200.jsonl.gz --out search_pool_h200.json --record cross_entropy \
        layer_norm matmul softmax swiglu attention gdn_chunk_fwd_o rms_norm
    python -m benchmarks.search.equal_budget --budgets 20,40,80 --seeds 5 --surrogate auto \
        --replay search_pool_h200.jsonl.gz --out benchmarks/results/search_equal_budget.json

What the figures are. The score of a run is log2(time / time of the first seed) of the best node that it has
measured; `ratio` is the geometric mean over problems and seeds of the unfiltered search's time over the
other's, more than 1 where the other is faster. `wilcoxon_p` pairs problem x seed; since seeds of a problem
share its table, `clustered_p` flips the signs of whole problems (exact), and the interval draws problems
(10,000 bootstraps). `measurements_saved` is how many times fewer measurements an arm's mean curve needs to be
as good as the unfiltered one's at the full budget; a curve that never gets there is `null`. A run is one search at the
largest budget, read at the smaller ones. How much there is to gain is what the oracle gains: where pools are
not several times the budget, no forecast can gain much. Recorded scores carry the noise of one judgement
each, alike for all arms: a winner's recorded score flatters it.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
import tempfile
import warnings
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from benchmarks.lib import result_files
from benchmarks.lib.result_files import say
from benchmarks.lib.search.candidate_pool import (
    PoolProblem,
    PoolTable,
    PoolWriter,
    RecordingPlan,
    RecordingSettings,
    read_pool,
    record_pool_nodes,
)
from benchmarks.lib.search.pool_replay import ARMS, ForecastRecord, ReplayedSearch, replay_search
from forecast_harness.search.forecasters import open_forecaster
from forecast_harness.search.history.batches import MIN_PROGRESS
from forecast_harness.search.judging.devices import device_slug
from forecast_harness.search.records import SearchSettings
from forecast_harness.timing.device import device_count
from forecast_harness.verify.run import harness_hash

RATIO, FEWER, ALPHA = 1.05, 3.0, 0.05
"""What is claimed: so much faster at one budget with so small a p, or so many times fewer measurements."""
BOOTSTRAPS = 10_000
EXACT = 16
"""Problems up to which all flips of signs are tried."""


# --- recording ---


def record_pool(a: Namespace, report: result_files.ResultFile) -> dict[str, Any]:
    """Add to the table what is missing of it."""
    about = {"device": a.device, "slug": device_slug(a.device), "harness": harness_hash()}
    writer = PoolWriter(a.table, {**about, "toolchain": toolchain(a.device)})
    lanes = a.lanes or (device_count() if a.device == "cuda" else 2)
    plan = RecordingPlan(a.nodes, a.first, a.parents, a.children)
    before = {n: len(p.nodes) for n, p in writer.table.problems.items()}
    with tempfile.TemporaryDirectory(prefix="search-pool-") as folder:
        how = RecordingSettings(a.device, plan, lanes, a.seconds, Path(folder), a.trials, a.also)
        done = record_pool_nodes(a.record, writer, how)
    table = read_pool(a.table)
    report.add("table", table_summary(table))
    sizes = {n: len(p.nodes) for n, p in table.problems.items()}
    new = {n: size - before.get(n, 0) for n, size in sizes.items()}
    return {"device": a.device, "lanes": lanes, "nodes": sizes, "new": new, **done}


def toolchain(device: str) -> dict[str, str]:
    """Versions of what compiles a source and of what it calls."""
    import torch
    import triton

    cuda = {"triton": triton.__version__, "cuda": str(torch.version.cuda)} if device == "cuda" else {}
    return {"torch": torch.__version__, **cuda}


def table_summary(table: PoolTable) -> dict[str, Any]:
    """What a table holds, by problem."""
    found = {}
    for name, problem in table.problems.items():
        scores = problem.scores
        errors = [problem.judged[n].sd for n in scores if n != problem.seeds[0].id]
        outcomes = [str(j.outcome) for j in problem.judged.values()]
        found[name] = {
            "nodes": len(problem.nodes),
            "children_of_children": sum(number > 1 for number in problem.rounds.values()),
            "outcomes": {o: outcomes.count(o) for o in sorted(set(outcomes))},
            "best": round(min(scores.values(), default=0.0), 4),
            "quartiles": [round(q, 4) for q in _quartiles(list(scores.values()))],
            "standard_error": round(statistics.median(errors), 4) if errors else None,
            "wall_seconds_each": round(statistics.median(j.wall_seconds for j in problem.judged.values()), 2),
        }
    return found


def _quartiles(values: Sequence[float]) -> Sequence[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else values


# --- replaying ---


def replay_all(
    table: PoolTable,
    report: result_files.ResultFile,
    *,
    seeds: int,
    budgets: Sequence[int],
    surrogate: str,
    settings: SearchSettings,
) -> dict[str, Any]:
    """Every arm on every problem with every seed; the summary."""
    runs: list[ReplayedSearch] = []
    for name, problem in table.problems.items():
        forecaster = open_forecaster(surrogate, problem.target)
        for seed, arm in itertools.product(range(seeds), ARMS):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = replay_search(
                    problem, arm, budget=max(budgets), seed=seed, forecaster=forecaster, settings=settings
                )
            runs.append(run)
            row = {"problem": name, "seed": seed, "arm": arm, "ended": run.ended}
            report.add("runs", {**row, "best": [round(b, 4) for b in run.best]})
        if forecaster is not None:
            forecaster.close()
        at = {
            arm: round(_mean(r.at(max(budgets)) for r in runs if _matches(r, name, arm)), 4) for arm in ARMS
        }
        say(f"{name}: best of the pool {min(problem.scores.values()):+.4f}, mean of the runs {at}")
    return summary(table.problems, runs, budgets)


def summary(
    problems: Mapping[str, PoolProblem],
    runs: Sequence[ReplayedSearch],
    budgets: Sequence[int],
    claim: str = "filtered",
) -> dict[str, Any]:
    """The claim's figures, of each arm against `unfiltered`, and how honest the forecasts were.

    `claim` is the arm of which something is claimed.
    """
    most, arms = max(budgets), tuple(dict.fromkeys(r.arm for r in runs))
    found: dict[str, Any] = {
        "problems": len(problems),
        "runs_per_arm": len(runs) // len(arms),
        "pool": {n: len(p.nodes) for n, p in problems.items()},
        "measured": {arm: _mean(len(r.best) for r in runs if r.arm == arm) for arm in arms},
    }
    for arm in arms:
        if arm == "unfiltered":
            continue
        found[arm] = {str(b): speedup_at_budget(runs, arm, b) for b in budgets}
        found[arm]["fewer"] = measurements_saved(runs, arm, most)
    found["best_of_pool_found"] = {
        arm: {str(b): _mean(found_best(problems, r, b) for r in runs if r.arm == arm) for b in budgets}
        for arm in arms
    }
    found["forecasts"] = forecast_calibration([t for r in runs if r.arm == claim for t in r.told])
    last = found[claim][str(most)]
    enough = found[claim]["fewer"]["times"] or 0.0
    better = last["ratio"] >= RATIO and last["clustered_p"] < ALPHA
    found["holds"] = bool(better or enough >= FEWER)
    return found


def speedup_at_budget(runs: Sequence[ReplayedSearch], arm: str, budget: int) -> dict[str, Any]:
    """How much faster the arm's best is than the unfiltered search's at a budget."""
    gains = _paired(runs, arm, budget)
    means = [statistics.fmean(g) for g in gains.values()]
    pairs = [g for problem in gains.values() for g in problem]
    chance = random.Random(0)
    drawn = sorted(statistics.fmean(chance.choices(means, k=len(means))) for _ in range(BOOTSTRAPS))
    return {
        "ratio": round(2 ** statistics.fmean(means), 4),
        "interval_95": [round(2 ** drawn[int(q * (BOOTSTRAPS - 1))], 4) for q in (0.025, 0.975)],
        "wilcoxon_p": _wilcoxon(pairs),
        "clustered_p": sign_flip_p_value(means),
        "better_equal_worse": [sum(g > 0 for g in pairs), pairs.count(0.0), sum(g < 0 for g in pairs)],
        "by_problem": {n: round(2 ** statistics.fmean(g), 4) for n, g in gains.items()},
    }


def sign_flip_p_value(means: Sequence[float]) -> float:
    """Two-sided p of the mean under random signs of all of `means`: exact, or of 100,000 draws for many."""
    if not any(means):
        return 1.0
    signs: Iterable[Sequence[int]] = itertools.product((-1, 1), repeat=len(means))
    if len(means) > EXACT:
        chance = random.Random(0)
        signs = [[chance.choice((-1, 1)) for _ in means] for _ in range(100_000)]
    seen = abs(sum(means)) - 1e-12
    sums = [abs(sum(s * m for s, m in zip(sign, means, strict=True))) >= seen for sign in signs]
    return round(float(sum(sums) / len(sums)), 5)


def measurements_saved(runs: Sequence[ReplayedSearch], arm: str, budget: int) -> dict[str, Any]:
    """Measurements after which the arm's mean curve is as good as the unfiltered one's at the budget."""
    both = ("unfiltered", arm)
    curve = {a: [_mean(r.at(n) for r in runs if r.arm == a) for n in range(1, budget + 1)] for a in both}
    goal = curve["unfiltered"][-1] + 1e-9

    def needs(one: str) -> int | None:
        return next((n for n, best in enumerate(curve[one], 1) if best <= goal), None)

    theirs, mine = needs("unfiltered"), needs(arm)
    times = None if mine is None or theirs is None else round(theirs / mine, 2)
    return {"unfiltered_needs": theirs, "needs": mine, "times": times}


def found_best(problems: Mapping[str, PoolProblem], run: ReplayedSearch, budget: int) -> bool:
    """Whether the run's best is the pool's, or so near that a search would not call the rest progress."""
    return run.at(budget) <= min(problems[run.problem].scores.values()) + MIN_PROGRESS


def forecast_calibration(told: Sequence[ForecastRecord]) -> dict[str, Any]:
    """Forecasts of measured nodes against what came: all that did not abstain.

    Intervals are those of a measurement: the forecast's spread and the measurement's error together.
    """
    said = [t for t in told if not t.belief.abstains]
    ran = [(t.belief.mean, math.hypot(t.belief.sd, t.noise), t.came) for t in said if t.came is not None]
    found: dict[str, Any] = {"measured": len(told), "forecast": len(said)}
    if len(ran) < 2:
        return found
    z = [abs(came - mean) / sd for mean, sd, came in ran]
    correlation = stats.spearmanr([mean for mean, _, _ in ran], [came for _, _, came in ran])[0]
    return {
        **found,
        "failed": sum(t.came is None for t in said),
        "failures_expected": round(sum(t.belief.p_fail for t in said), 1),
        "rank_correlation": round(float(correlation), 3) if math.isfinite(correlation) else None,
        "rms_error": round(math.sqrt(_mean((came - mean) ** 2 for mean, _, came in ran)), 4),
        "rms_of_outcomes": round(math.sqrt(_mean(came**2 for _, _, came in ran)), 4),
        "within_68": round(_mean(v < 1.0 for v in z), 3),
        "within_90": round(_mean(v < 1.645 for v in z), 3),
        "p_better_said_and_seen": _reliability(
            [(t.belief.p_better, float(t.came is not None and t.came < 0.0)) for t in said]
        ),
    }


def _reliability(pairs: Sequence[tuple[float, float]]) -> list[dict[str, float]]:
    found = []
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        here = [p for p in pairs if low <= p[0] < low + 0.2 or (low == 0.8 and p[0] == 1.0)]
        if here:
            said, seen = _mean(p[0] for p in here), _mean(p[1] for p in here)
            found.append({"said": round(said, 3), "seen": round(seen, 3), "n": len(here)})
    return found


def _paired(runs: Sequence[ReplayedSearch], arm: str, budget: int) -> dict[str, list[float]]:
    """By problem, for every seed: log2 of the unfiltered search's best time over the arm's."""
    scores = {(r.problem, r.seed, r.arm): r.at(budget) for r in runs}
    found: dict[str, list[float]] = defaultdict(list)
    for (problem, seed, one), score in scores.items():
        if one == arm:
            found[problem].append(scores[problem, seed, "unfiltered"] - score)
    return found


def _wilcoxon(pairs: Sequence[float]) -> float:
    """Two-sided; pairs that are equal are split, as Pratt has it."""
    if not any(pairs):
        return 1.0
    return float(f"{stats.wilcoxon(pairs, zero_method='zsplit').pvalue:.3g}")


def _mean(values: Any) -> float:
    return round(float(statistics.fmean(float(v) for v in values)), 6)


def _matches(run: ReplayedSearch, problem: str, arm: str) -> bool:
    return run.problem == problem and run.arm == arm


# --- command line ---


def options() -> ArgumentParser:
    """Of both modes."""
    made = result_files.parser(__doc__)
    made.add_argument("--record", nargs="+", default=[], metavar="PACK", help="judge candidates of these")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--table", type=Path, help="the table that --record adds to")
    made.add_argument("--also", type=Path, help="a folder with sources in subfolders named like the packs")
    made.add_argument("--seconds", type=float, default=540.0, help="begin no candidate after so many")
    made.add_argument("--lanes", type=int, help="judges at once; by default 2, or one per device")
    made.add_argument("--nodes", type=int, default=60, help="candidates per pack")
    made.add_argument("--first", type=int, default=24, help="of these, children of the seeds")
    made.add_argument("--parents", type=int, default=2, help="nodes expanded in every further round")
    made.add_argument("--children", type=int, default=9, help="of each of these")
    made.add_argument("--trials", type=int, default=12, help="configs of one source that may be timed")
    made.add_argument("--replay", type=Path, metavar="TABLE", help="search this table")
    made.add_argument("--only", default="", help="replay these problems, separated by commas")
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--budgets", default="10,20,40", help="measurements")
    made.add_argument("--surrogate", default="lineage", help="as `forecast-autotune search --surrogate`")
    made.add_argument("--samples", type=int, default=16)
    made.add_argument("--k", type=int, default=4)
    made.set_defaults(stub_only=True)
    return made


def main() -> int:
    made = options()
    a = result_files.parse_arguments(made)
    if bool(a.record) == bool(a.replay) or (a.record and a.table is None):
        made.error("say --record PACK... --table FILE, or --replay FILE")
    report = result_files.ResultFile(a, "search_equal_budget")
    if a.record:
        report.finish(record_pool(a, report))
        return 0
    table = read_pool(a.replay)
    only = set(filter(None, a.only.split(",")))
    table.problems = {n: p for n, p in table.problems.items() if not only or n in only}
    budgets = sorted(int(b) for b in a.budgets.split(","))
    settings = SearchSettings(samples=a.samples, k=a.k)
    report.add("measured_on", dict(table.about))
    report.add("table", table_summary(table))
    done = replay_all(table, report, seeds=a.seeds, budgets=budgets, surrogate=a.surrogate, settings=settings)
    report.finish({"device": table.about["device"], **done})
    return 0 if done["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
