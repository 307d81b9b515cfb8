"""Fit the surrogate of Inductor's templates, and check it on models that it has not seen.

    python -m benchmarks.inductor.fit_template_surrogate FITTED.jsonl.gz... --out FILE.npz [--also CORPUS.jsonl.gz...]
        [--copies 3] [--held-out TABLE...]

The fitted tables are like `benchmarks/data/inductor_fit_h200.jsonl.gz`: templates of GEMMs with their times.
The model learns the errors of the templates' closed form; kernels of the corpus (`--also`), whose IR was read,
teach the same trees. A problem of Inductor's counts `--copies` times as much as one of the corpus,
which has fifty times as many. `--held-out` prints the regret on other tables after 1 to 8 compiled choices, by our
forecasts at once and in rounds; a compiled choice that fails counts as compiled. Vendor kernels are not compiled:
`with vendor` has them in everybody's hands, `templates` in nobody's.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.lib.inductor.inductor_problems import HELD_OUT
from benchmarks.lib.result_files import say
from forecast_autotune.errors import RecordError
from forecast_autotune.policy import RiskBounded, TuningState
from forecast_autotune.records import Candidate, Measurement, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.prior import Prior, formula_prior
from forecast_autotune.surrogates.protocol import Query, Surrogate
from forecast_autotune.tuning.replays.replay import load
from forecast_integrations.inductor.choices.geometry import MatmulGeometry, OperandLayout, operation_geometry
from forecast_integrations.inductor.choices.records import is_library_kernel
from forecast_integrations.inductor.choices.surrogate import (
    LearnedTemplateSurrogate,
    TemplateSurrogate,
    default,
    with_shared_level,
)
from forecast_integrations.inductor.choices.templates import TEMPLATE, has_closed_form
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


# --- regret against the number of compiled choices ---

CHOICES = (1, 3, 5, 8)
Order = Callable[[Table, Sequence[Candidate], int], list[Candidate]]
"""(table, its templates in Inductor's order, how many) -> what to compile, best first."""
_ALL_FAILED_REGRET = 10.0
"""Regret of somebody all of whose choices failed, and who has no vendor kernel to fall back on."""


@dataclass(frozen=True)
class ChoicesOfTable:
    """A table's rows, by what they cost."""

    templates: dict[Candidate, Measurement]
    """Choices that are compiled, in Inductor's order."""
    vendor: float
    """Milliseconds of the fastest library kernel; infinite without one."""

    @classmethod
    def of(cls, table: Table) -> ChoicesOfTable:
        rows = table.by_candidate()
        templates = {c: m for c, m in rows.items() if c.variant.startswith(TEMPLATE)}
        library = [m.ms for c, m in rows.items() if is_library_kernel(c) and m.ok]
        return cls(templates, min(library, default=math.inf))

    def regret(self, compiled: Iterable[Candidate], *, with_vendor: bool) -> float:
        """time(best of the compiled) / time(best of all) - 1."""
        floor = self.vendor if with_vendor else math.inf
        got = min([floor, *(self.templates[c].ms for c in compiled if self.templates[c].ok)])
        best = min([floor, *(m.ms for m in self.templates.values() if m.ok)])
        return got / best - 1.0 if math.isfinite(got) else _ALL_FAILED_REGRET


def random_regret(split: ChoicesOfTable, count: int, *, with_vendor: bool, draws: int = 200) -> float:
    """Expected regret of `count` templates at random."""
    names = list(split.templates)
    generator = np.random.default_rng(0)
    results = []
    for _ in range(draws):
        chosen = generator.permutation(len(names))[:count]
        results.append(split.regret([names[int(i)] for i in chosen], with_vendor=with_vendor))
    return float(np.mean(results))


def forecast(surrogate: Surrogate) -> Order:
    """Our forecasts before anything was measured."""

    def order(table: Table, templates: Sequence[Candidate], count: int) -> list[Candidate]:
        names = list(table.by_candidate())
        result = surrogate.forecast(Query(table.problem, names))
        wanted = set(templates)
        ranked = [names[int(i)] for i in result.order() if names[int(i)] in wanted]
        return ranked[:count]

    return order


def sequential_forecast(surrogate: Surrogate) -> Order:
    """One choice at a time, each by what the earlier ones have taught; the library's kernels come first."""

    def order(table: Table, templates: Sequence[Candidate], count: int) -> list[Candidate]:
        rows = table.by_candidate()
        names, wanted = list(rows), set(templates)
        measured = {c: m for c, m in rows.items() if c not in wanted}
        chosen: list[Candidate] = []
        while len(chosen) < min(count, len(templates)):
            result = surrogate.forecast(Query(table.problem, names, measured=list(measured.values())))
            state = TuningState(
                result, measured, new=len(chosen), tolerance=0.0, risk=0.0, problem=table.problem.id
            )
            plan = RiskBounded(least=1, first=1e-9, share=1.0, floor=count + len(names)).plan(state)
            ranked = (result.candidates[int(i)] for i in result.order())
            following = next(
                (c for c in itertools.chain(plan.measure, ranked) if c in wanted and c not in measured), None
            )
            if following is None:
                break
            chosen.append(following)
            measured[following] = rows[following]
        return chosen

    return order


def is_gemm_table(table: Table) -> bool:
    """Whether a table is of a GEMM and has templates to choose from."""
    split = ChoicesOfTable.of(table)
    ran = sum(m.ok for m in split.templates.values())
    shape = operation_geometry(table.problem)
    return isinstance(shape, MatmulGeometry) and isinstance(shape.left, OperandLayout) and ran > 1


def compare(
    tables: Sequence[Table], orders: dict[str, Order], choices: Sequence[int] = CHOICES
) -> dict[str, dict[str, dict[str, float]]]:
    """Geometric-mean regret by side (`with vendor`, `templates`), name and number of choices."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for side in ("with vendor", "templates"):
        named: dict[str, dict[str, float]] = {}
        for name, count in itertools.product([*orders, "random"], choices):
            each = [
                _regret_of_order(table, orders.get(name), count, side == "with vendor") for table in tables
            ]
            named.setdefault(name, {})[str(count)] = float(np.expm1(np.mean(np.log1p(each))))
        result[side] = named
    return result


def _regret_of_order(table: Table, order: Order | None, count: int, with_vendor: bool) -> float:
    split = ChoicesOfTable.of(table)
    if order is None:
        return random_regret(split, count, with_vendor=with_vendor)
    return split.regret(order(table, list(split.templates), count), with_vendor=with_vendor)


def main() -> int:
    """Fit, write, and compare."""
    command_line = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command_line.add_argument("tables", type=Path, nargs="+")
    command_line.add_argument("--out", type=Path, required=True)
    command_line.add_argument("--also", type=Path, nargs="*", default=[])
    command_line.add_argument("--copies", type=int, default=3)
    command_line.add_argument("--held-out", type=Path, nargs="*", default=[])
    command_line.add_argument("--seed", type=int, default=0)
    given = command_line.parse_args()
    mine = [templates_of(t) for t in load(given.tables)]
    mine = [t for t in mine if sum(m.ok for m in t.measurements) >= 2]
    if leaked := [t.problem.extra["label"] for t in mine if t.problem.extra.get("split") == HELD_OUT]:
        command_line.error(f"these problems are held out: {', '.join(leaked)}")
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
            for side, result in compare(apart, orders).items():
                say(f"{name}, {side}: {result}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
