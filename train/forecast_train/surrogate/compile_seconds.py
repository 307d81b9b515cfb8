"""Fitting the formula of compile seconds (`features.compile_seconds`) to recorded compilations.

Ridge regression of log2(seconds) on facts of the IR. How far it is off is estimated on kernels that were left out:
as a whole, and from one candidate of a kernel's to the next.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.linear_model import Ridge

from forecast_autotune.errors import RecordError
from forecast_autotune.features.compile_seconds import FEATURES, CompileSeconds, compile_features
from forecast_autotune.features.traced_texts import cached_facts, facts_by_unit
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.protocol import Array
from forecast_autotune.tuning.replays.table_measurer import LEAST_COMPILE_S
from forecast_train.splits import family_of

_PENALTY = 10.0
"""Penalty on squared weights: small beside thousands of compilations."""
_FOLDS = 8
_LEAST_ALIKE = 5
"""Candidates of one source that say something of the spread between them."""


@dataclass(frozen=True)
class RecordedCompilation:
    """One compilation that ended well."""

    kernel: str
    family: str
    """The family of the kernel."""
    source: str
    """The same for compilations of one source, which may be a variant."""
    features: tuple[float, ...]
    """In the order of `FEATURES`."""
    seconds: float


def recorded_compilations(tables: Iterable[Table]) -> list[RecordedCompilation]:
    """Compilations whose IR is recorded, the first of each kind, however many problems of a kernel have it."""
    results: dict[tuple[str, tuple[float, ...]], RecordedCompilation] = {}
    for table in tables:
        problem = table.problem
        facts = {assignment: unit_facts for (assignment, _), unit_facts in facts_by_unit(problem).items()}
        for m in table.measurements:
            if m.compile_s is None or not m.ok or m.compile_s < LEAST_COMPILE_S:
                continue
            assignment = assignment_of(m.candidate)
            unit_facts = facts.get(assignment)
            if unit_facts is None and (text := (problem.ttir or {}).get(assignment)):
                unit_facts = cached_facts(text, problem.arguments, problem.grid)
            if unit_facts is None:
                continue
            config, name = m.candidate.config, problem.kernel.name
            features = tuple(compile_features(unit_facts, config.num_warps, config.num_stages))
            source = f"{name}|{m.candidate.variant}"
            row = RecordedCompilation(name, family_of(problem), source, features, m.compile_s)
            results.setdefault((source, features), row)
    return list(results.values())


def fit_compile_seconds(
    rows: Sequence[RecordedCompilation],
) -> tuple[CompileSeconds, Array]:
    """The formula, and log2(seconds) [n] as it forecasts them without each row's family.

    Raises `RecordError` for fewer than two families, and where no source has several candidates.
    """
    names = [r.family for r in rows]
    distinct = sorted(set(names))
    if len(distinct) < 2:
        raise RecordError(f"a fit of compile seconds needs two families, got {len(distinct)}: record another")
    features = np.array([r.features for r in rows])
    seconds = np.log2([r.seconds for r in rows])
    fold = np.array([distinct.index(name) % _FOLDS for name in names])
    unseen = np.zeros(len(rows))
    for n in sorted(set(fold.tolist())):
        weights, intercept = _ridge(features[fold != n], seconds[fold != n])
        unseen[fold == n] = features[fold == n] @ weights + intercept
    by_source: dict[str, list[float]] = defaultdict(list)
    for row, error in zip(rows, seconds - unseen, strict=True):
        by_source[row.source].append(float(error))
    several = [errors for errors in by_source.values() if len(errors) >= _LEAST_ALIKE]
    if not several:
        raise RecordError(
            f"a fit of compile seconds needs {_LEAST_ALIKE} candidates of some source, "
            f"got {max(map(len, by_source.values()))}: record more configs"
        )
    weights, intercept = _ridge(features, seconds)
    formula = CompileSeconds(
        tuple(round(float(w), 5) for w in weights),
        round(intercept, 5),
        round(float(np.std([np.mean(errors) for errors in several])), 3),
        round(math.sqrt(float(np.mean([np.var(errors) for errors in several]))), 3),
    )
    return formula, unseen


def compile_seconds_text(formula: CompileSeconds, rows: Sequence[RecordedCompilation]) -> str:
    """The formula as `features.compile_seconds.parse_compile_seconds` reads it."""
    return json.dumps(
        {
            "schema": 1,
            "weights": dict(zip(FEATURES, formula.weights, strict=True)),
            "intercept": formula.intercept,
            "kernel_sd": formula.kernel_sd,
            "config_sd": formula.config_sd,
            "about": {"rows": len(rows), "kernels": len({r.kernel for r in rows})},
        },
        indent=1,
    )


def _ridge(features: Array, seconds: Array) -> tuple[Array, float]:
    fit = Ridge(alpha=_PENALTY).fit(features, seconds)
    return fit.coef_, float(fit.intercept_)
