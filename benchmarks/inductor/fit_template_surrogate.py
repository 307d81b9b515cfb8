"""Fit the surrogate of Inductor's templates, and check it on models that it has not seen.

    python -m benchmarks.inductor.fit_template_surrogate FITTED.jsonl.gz... --out FILE.npz [--also CORPUS.jsonl.gz...]
        [--copies 3] [--held-out TABLE...]

The fitted tables are those of `harvest_choices.py --split fit`: templates of GEMMs with their times. What is
learned is what the closed form of the templates gets wrong; kernels of the corpus (`--also`), whose IR was
read, teach the same trees. A problem of Inductor's counts `--copies` times as much as one of the corpus,
which has fifty times as many. `--held-out` prints the regret on other tables after 1 to 8 compiled choices.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.inductor.choice_regret import compare, forecast, is_gemm_table, sequential_forecast
from benchmarks.lib.inductor.inductor_problems import HELD_OUT
from benchmarks.lib.result_files import say
from forecast_autotune.errors import RecordError
from forecast_autotune.records import Candidate, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.prior import Prior, formula_prior
from forecast_autotune.surrogates.protocol import Query, Surrogate
from forecast_autotune.tuning.replays.replay import load
from forecast_integrations.inductor.choices.geometry import operation_geometry
from forecast_integrations.inductor.choices.surrogate import (
    LearnedTemplateSurrogate,
    TemplateSurrogate,
    default,
    with_shared_level,
)
from forecast_integrations.inductor.choices.templates import has_closed_form
from forecast_train.surrogate.fit import FitSettings, fit_model


def templates_of(table: Table) -> Table:
    """A table without what is no template; vendor kernels have no parameters to learn from."""
    shape = operation_geometry(table.problem)
    kept = [m for m in table.measurements if shape is not None and has_closed_form(shape, m.candidate)]
    return Table(table.problem, kept)


def prior_mean(
    problem: Problem,
    candidates: Sequence[Candidate],
    grids: Mapping[Candidate, tuple[int, ...]],
    ttir: Mapping[str, str],
) -> Prior:
    """The closed form for Inductor's templates, the formula on IR for kernels that have some."""
    if operation_geometry(problem) is None:
        return formula_prior(problem, candidates, grids, ttir)
    return TemplateSurrogate().prior(Query(problem, candidates))


def main() -> int:
    """Fit, write, and compare."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("tables", type=Path, nargs="+")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--also", type=Path, nargs="*", default=[])
    made.add_argument("--copies", type=int, default=3)
    made.add_argument("--held-out", type=Path, nargs="*", default=[])
    made.add_argument("--seed", type=int, default=0)
    given = made.parse_args()
    mine = [templates_of(t) for t in load(given.tables)]
    mine = [t for t in mine if sum(m.ok for m in t.measurements) >= 2]
    if leaked := [t.problem.extra["label"] for t in mine if t.problem.extra.get("split") == HELD_OUT]:
        made.error(f"these problems are held out: {', '.join(leaked)}")
    corpus = load(given.also) if given.also else []
    rows = sum(len(t.measurements) for t in mine)
    say(f"{len(mine)} problems of Inductor's, {rows} rows; {len(corpus)} of the corpus")
    model = fit_model(
        [*mine * given.copies, *corpus], seed=given.seed, recipe=FitSettings(jobs=1), believe=prior_mean
    )
    model = replace(model, about={**(model.about or {}), "inductor_problems": len(mine)})
    model.save(given.out)
    say(f"{given.out}: {given.out.stat().st_size / 1e6:.1f} MB")
    apart = [t for path in given.held_out for t in load([path]) if is_gemm_table(t)]
    apart = [t for t in apart if t.problem.extra.get("split", HELD_OUT) == HELD_OUT]
    subjects: dict[str, Surrogate] = {
        "fitted": LearnedTemplateSurrogate(model, with_shared_level(model.hyper))
    }
    with contextlib.suppress(RecordError):  # the shipped one may know fewer features than this release has
        subjects["shipped"] = default()
    subjects["closed form"] = TemplateSurrogate(with_shared_level(model.hyper))
    for name, surrogate in subjects.items():
        if apart:
            orders = {"forecast": forecast(surrogate), "rounds": sequential_forecast(surrogate)}
            for side, found in compare(apart, orders).items():
                say(f"{name}, {side}: {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
