"""How far judgements of sources are followed: fitted to recorded sources, without a family of kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from benchmarks.lib.search.source_pool import BASE
from benchmarks.lib.variants.source_answers import SourceAnswer
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.records import Outcome
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.judged_sources import JudgementWeights
from forecast_autotune.surrogates.protocol import Query
from forecast_autotune.variants.judgement import SourceJudgement

FloatArray = npt.NDArray[np.float64]

SPREAD_SHARE = 0.3
"""Of the spread that sources' levels have around the fitted mean: of the rest the process has doubts of its own, by
config. Chosen on replays of all kernels, as wider offsets spend first measurements on what is merely unsure."""
FREEDOM = 3.0
"""Of the Student t that weights are fitted under: most rewrites change nothing, some double the time."""
LEAST_SD = 0.01


@dataclass(frozen=True)
class JudgedDifference:
    """One source at one shape, against the base, in log2."""

    family: str
    measured: float
    learned: float
    judged: float
    sd: float


def judged_part(
    table: Table, answers: Mapping[str, SourceAnswer]
) -> tuple[Table, dict[str, SourceJudgement]]:
    """The base and its right sources of which something was said, and what, by variant."""
    told = {
        variant: SourceJudgement(said.log2_ratio, max(LEAST_SD, said.sd), said.p_wrong)
        for variant, one in table.problem.extra["sources"].items()
        if one.get("outcome") == Outcome.OK and (said := answers.get(one["name"])) is not None
    }
    kept = {BASE, *told}
    return Table(table.problem, [m for m in table.measurements if m.candidate.variant in kept]), told


def base_ran(table: Table) -> bool:
    """Whether some config of the base ran."""
    return any(m.ok and m.candidate.variant == BASE for m in table.by_candidate().values())


def judged_differences(
    table: Table, told: Mapping[str, SourceJudgement], surrogate: AnalyticSurrogate
) -> list[JudgedDifference]:
    """Every judged source of a table that ran; the surrogate has not seen the family."""
    rows = table.by_candidate()
    candidates = CandidateList.of(rows)
    before = surrogate.prior(Query(table.problem, candidates, table.grids()))
    believed = surrogate.hyper.compress(before.mean, float(before.mean.min()))
    learned: dict[str, float] = {}
    measured: dict[str, float] = {}
    for candidate, level in zip(candidates, believed, strict=True):
        name = candidate.variant
        learned[name] = min(float(level), learned.get(name, math.inf))
        if rows[candidate].ok:
            measured[name] = min(math.log2(rows[candidate].ms), measured.get(name, math.inf))
    family = table.problem.extra["family"]
    return [
        JudgedDifference(
            family,
            measured[name] - measured[BASE],
            learned[name] - learned[BASE],
            one.log2_ratio,
            one.sd,
        )
        for name, one in told.items()
        if name in measured
    ]


def fit_weights(rows: Sequence[JudgedDifference]) -> JudgementWeights:
    """The weights under which the measured differences are likeliest, with `SPREAD_SHARE` of their spread."""
    most = JudgementWeights().most
    columns = np.array([[r.measured, r.learned, r.judged, r.sd] for r in rows])
    measured, learned, judged = np.clip(columns[:, :3], -most, most).T
    sd = columns[:, 3]

    def loss(x: FloatArray) -> float:
        spread = np.hypot(math.exp(x[2]) * sd, math.exp(x[3]) * (learned - judged))
        away = (measured - x[0] * learned - x[1] * judged) / spread
        return float((np.log(spread) - stats.t.logpdf(away, FREEDOM)).mean())

    start = np.array([0.3, 0.5, 0.0, -1.0])
    found = optimize.minimize(loss, start, method="Nelder-Mead", options={"maxiter": 2000}).x
    return JudgementWeights(
        learned=float(found[0]),
        judged=float(found[1]),
        stated=SPREAD_SHARE * math.exp(found[2]),
        disagreement=SPREAD_SHARE * math.exp(found[3]),
    )
