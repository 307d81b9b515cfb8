"""Claim: which sources of a kernel are fast is forecast best by a learned surrogate and a language model together.

    python -m benchmarks.forecasting.source_ranking --models FOLDER --out benchmarks/results/source_ranking.json
        [--cache FILE]
    python -m benchmarks.forecasting.source_ranking --pack-answers FOLDER --out benchmarks/data/source_answers.jsonl.gz

No GPU: forecasts against `data/sources_h200.jsonl.gz`, in which sources of many kernels were timed. What is
forecast of a source is log2(its best time / the base's best time), as a mean over shapes. Arms:

    learned, as it is   the surrogate fitted without the kernel's family: its best forecast config's time over
                        that of the base
    learned             the same, calibrated on other families' sources
    model               blind answers of a language model (`data/source_answers.jsonl.gz`), calibrated likewise
    ensemble            both
    trees               trees on what distinguishes the source from its base (facts of IR, size of the edit) and
                        on the learned forecast; trees + model: and on the answer
    all                 the ensemble with the trees' forecast as one more feature
    random

All of an arm that is fitted is fitted without the kernel's whole family, and so is what it is fitted to. An arm
says a mean, a distribution, and an order of measuring (`source_orders`; more likely wrong than right: last). First
before any measurement of the kernel, then after 5 sources of each arm's own order (figures of the choice) or by
lot, the same for all arms (figures of the numbers). Intervals are 95 % over kernels; differences are paired.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib import result_files
from benchmarks.lib.environment import ROOT
from benchmarks.lib.result_files import say
from benchmarks.lib.surrogates_without import surrogates_by_family
from benchmarks.lib.variants import source_answers, source_comparisons
from benchmarks.lib.variants.source_answers import SourceAnswer
from benchmarks.lib.variants.source_models import (
    StudentForecasts,
    common_shift,
    forecasts_without_family,
    logistic_without_family,
    trees_without_family,
)
from benchmarks.lib.variants.source_orders import scores_without_family, weight_choices
from benchmarks.lib.variants.source_outcomes import (
    AUTHORS,
    RecordedSource,
    first_author_kernels,
    model_marks,
    read_sources,
)
from benchmarks.lib.variants.source_scores import (
    KernelForecasts,
    Sums,
    by_figure,
    chosen_scores,
    differences,
    figures,
    kernel_scores,
    random_scores,
)
from benchmarks.lib.variants.variant_forecasts import file_digest
from forecast_autotune.records.table import read_tables

FloatArray = npt.NDArray[np.float64]

TABLE = ROOT / "benchmarks" / "data" / "sources_h200.jsonl.gz"
BEFORE = 5
"""Sources of a kernel that are measured before the second set of figures."""
PRIOR_SD = 0.1
"""Spread (log2) of what forecasts of one kernel's sources have in common, before any was measured."""
CLAIMED = "ensemble"
COMPARED = ("learned", "learned, as it is", "model")
ABOUT = {
    "model": "Claude (Anthropic), a reasoning model; exact version not known to itself",
    "how": "blind: base source, sizes, and the other sources as diffs in random order; no times, nothing run",
    "date": "2026-11-22",
}


@dataclass(frozen=True)
class SourceArm:
    """Forecasts of all sources by one arm."""

    mean: FloatArray
    """Forecast of log2(its best time / the base's)."""
    score: FloatArray
    """Sources are measured in its order, the least first."""
    said: StudentForecasts
    p_wrong: FloatArray
    weights: list[list[float]] = field(default_factory=list)
    """Of what the score is made, for each family that was left out."""

    def as_text(self, row: int) -> str:
        """Of one source: mean, score, scales of the faster and the slower side, and P(wrong)."""
        said = self.said
        values = (self.mean[row], self.score[row], said.faster[row], said.slower[row], self.p_wrong[row])
        return " ".join(f"{round(float(value), 4):g}" for value in values)

    def of_kernel(self, rows: npt.NDArray[np.intp], truth: FloatArray, shift: float = 0.0) -> KernelForecasts:
        """What it says of the sources of a kernel, moved by what others of them have shown."""
        said = self.said.rows(rows).shifted(shift)
        worth = -self.score[rows] - 9.0 * (self.p_wrong[rows] > 0.5)
        return KernelForecasts(
            truth, self.mean[rows] + shift, worth, said.log_density(truth), said.crps(truth)
        )


def make_arms(sources: Sequence[RecordedSource], answers: Sequence[SourceAnswer]) -> dict[str, SourceArm]:
    """Every arm but the random one."""
    families = [s.family for s in sources]
    truth = np.array([math.nan if s.log2_ratio is None else s.log2_ratio for s in sources])
    wrong = np.array([s.wrong for s in sources])
    learned = np.array([s.learned for s in sources])
    learned_sd = np.log(np.array([max(0.01, s.learned_sd) for s in sources]))
    learned_fail = np.array([s.learned_p_fail for s in sources])
    model = np.array([a.log2_ratio for a in answers])
    model_sd = np.log(np.array([max(0.01, a.sd) for a in answers]))
    model_wrong = np.array([min(0.99, max(0.01, a.p_wrong)) for a in answers])
    edit = np.array([s.features[-3] for s in sources])
    facts = np.array([[*s.features, s.learned, s.learned_sd] for s in sources])
    answered = np.column_stack([facts, model, model_sd])

    def bend(x: FloatArray) -> FloatArray:
        """A forecast, how far it is below and above: what is said of slow ones may be worth another share."""
        return np.column_stack([np.clip(x, -0.5, 0.0), np.clip(x, 0.0, 1.0)])

    names = np.array([s.kernel for s in sources], dtype=object)
    kernels = [np.flatnonzero(names == kernel) for kernel in sorted(set(names))]

    def arm(
        centre: FloatArray | list[FloatArray],
        scale: list[FloatArray],
        p_wrong: FloatArray,
        ranked: list[FloatArray] | list[list[FloatArray]],
        spread: FloatArray | None = None,
    ) -> SourceArm:
        mean, said = forecasts_without_family(centre, np.column_stack(scale), truth, families)
        last = [] if spread is None else [spread]
        columns: FloatArray | list[FloatArray]
        if isinstance(centre, list):
            columns = [np.column_stack([*one, *last]) for one in ranked]
            count = len(ranked[0])
        else:
            columns, count = np.column_stack([*ranked, *last]), len(ranked)
        choices = weight_choices(count, spread is not None)
        score, weights = scores_without_family(columns, choices, truth, kernels, families)
        return SourceArm(mean, score, said, p_wrong, weights)

    def chance(*columns: FloatArray) -> FloatArray:
        odds = np.column_stack(
            [np.log(np.clip(c, 0.002, 0.998) / (1 - np.clip(c, 0.002, 0.998))) for c in columns]
        )
        return logistic_without_family(odds, wrong, families)

    of_learned = [learned_sd, np.abs(learned), edit]
    of_model = [model_sd, np.abs(model), edit]
    both_scales = [learned_sd, np.abs(learned), model_sd, np.abs(model), edit]
    both = np.column_stack([bend(learned), bend(model)])
    p_learned, p_model, p_both = chance(learned_fail), chance(model_wrong), chance(learned_fail, model_wrong)
    say("trees are fitted")
    trees = trees_without_family(facts, truth, families)
    more = trees_without_family(answered, truth, families)
    say("arms are fitted")
    low, spread = np.clip(learned, -0.5, 1.0), np.exp(model_sd)
    only = arm(bend(learned), of_learned, p_learned, [low], np.minimum(1.0, np.exp(learned_sd)))
    return {
        "learned, as it is": replace(only, mean=learned, score=learned, weights=[]),
        "learned": only,
        "model": arm(bend(model), of_model, p_model, [model], spread),
        "ensemble": arm(both, both_scales, p_both, [low, model], spread),
        "trees": arm([bend(t) for t in trees], of_learned, p_learned, [[t] for t in trees]),
        "trees + model": arm([bend(t) for t in more], both_scales, p_both, [[t] for t in more]),
        "all": arm(
            [np.column_stack([both, bend(t)]) for t in trees],
            both_scales,
            p_both,
            [[low, model, t] for t in trees],
            spread,
        ),
    }


class KernelComparison:
    """All arms on all kernels."""

    def __init__(self, sources: Sequence[RecordedSource], answers: Sequence[SourceAnswer], seed: int) -> None:
        self.sources, self.answers, self.seed = sources, answers, seed
        self.truth = np.array([math.nan if s.log2_ratio is None else s.log2_ratio for s in sources])
        names = np.array([s.kernel for s in sources], dtype=object)
        self.kernels = sorted(set(names))
        self.rows = [np.flatnonzero(names == k) for k in self.kernels]
        self.arms = make_arms(sources, answers)

    def before(
        self, keep: Callable[[RecordedSource], bool] = lambda _: True, least: int = 2
    ) -> dict[str, Sums]:
        """Figures before any measurement, of sources that are kept, in kernels that have enough of them."""
        found: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in (*self.arms, "random")}
        for number, every in enumerate(self.rows):
            rows = np.array([i for i in every if keep(self.sources[i])], dtype=np.intp)
            truth = self.truth[rows]
            if np.isfinite(truth).sum() < least:
                continue
            for name, arm in self.arms.items():
                found[name].append(kernel_scores(arm.of_kernel(rows, truth)))
            found["random"].append(random_scores(truth, self.seed + number))
        return {name: by_figure(rows_) for name, rows_ in found.items()}

    def after(self) -> dict[str, Sums]:
        """The same after `BEFORE` sources; see the module."""
        found: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in (*self.arms, "random")}
        for number, rows in enumerate(self.rows):
            truth = self.truth[rows]
            lot = np.random.default_rng(self.seed + number).permutation(len(rows))[:BEFORE]
            left = np.setdiff1d(np.arange(len(rows)), lot)
            for name, arm in self.arms.items():
                own = self._own_order(arm, rows, truth)
                choice = chosen_scores(truth, [own], BEFORE)
                moved = arm.of_kernel(rows, truth, self._shift(arm, rows, truth, lot))
                numbers: dict[str, tuple[float, float]] = {}
                if np.isfinite(truth[left]).sum() >= 2:
                    numbers = kernel_scores(_some(moved, left))
                keys = ("spearman", "pairs", "squared_error", "log_score", "crps")
                found[name].append({**choice, **{k: numbers.get(k, (math.nan, 0.0)) for k in keys}})
            found["random"].append(random_scores(truth, self.seed + number, BEFORE))
        return {name: by_figure(rows_) for name, rows_ in found.items()}

    def _own_order(
        self, arm: SourceArm, rows: npt.NDArray[np.intp], truth: FloatArray
    ) -> npt.NDArray[np.intp]:
        """The first sources as forecast before, the others as forecast after those."""
        plain = arm.of_kernel(rows, truth)
        first = np.argsort(-plain.worth, kind="stable")[:BEFORE]
        later = arm.of_kernel(rows, truth, self._shift(arm, rows, truth, first))
        rest = [i for i in np.argsort(-later.worth, kind="stable") if i not in set(first)]
        return np.array([*first, *rest], dtype=np.intp)

    def _shift(
        self, arm: SourceArm, rows: npt.NDArray[np.intp], truth: FloatArray, at: npt.NDArray[np.intp]
    ) -> float:
        measured = np.zeros(len(rows), dtype=bool)
        measured[at] = True
        return common_shift(arm.said.rows(rows), measured, truth, PRIOR_SD)


def _some(one: KernelForecasts, at: npt.NDArray[np.intp]) -> KernelForecasts:
    return KernelForecasts(one.truth[at], one.centre[at], one.worth[at], one.log_density[at], one.crps[at])


def compared(by_arm: dict[str, Sums]) -> dict[str, Any]:
    """Figures of every arm, and of the differences that are claimed."""
    found: dict[str, Any] = {name: figures(sums) for name, sums in by_arm.items()}
    found["differences"] = {
        f"{one} - {other}": differences(by_arm[one], by_arm[other])
        for one in (CLAIMED, "all")
        for other in COMPARED
    }
    return found


def rank_sources(a: Namespace, report: result_files.ResultFile) -> dict[str, Any]:
    """Everything; the summary."""
    tables = read_tables(a.table)
    families = sorted({t.problem.extra["family"] for t in tables})
    marks = [file_digest(a.table), *model_marks(a.models, families)]
    surrogates = surrogates_by_family(families, a.models)
    every = read_sources(tables, surrogates, first_author_kernels(), marks, a.cache)
    about, answers = source_answers.read_answers(a.answers)
    sources = [s for s in every if s.name in answers]
    say(f"{len(sources)} sources of {len({s.kernel for s in sources})} kernels")
    told = [answers[s.name] for s in sources]
    compares = KernelComparison(sources, told, a.seed)
    rows: list[dict[str, Any]] = []
    for i, one in enumerate(sources):
        row: dict[str, Any] = {
            "name": one.name,
            "family": one.family,
            "author": one.author,
            "sha256": one.mark,
        }
        row |= {"outcome": one.outcome, "log2_ratio": _round(one.log2_ratio), "learned": _round(one.learned)}
        row["arms"] = {name: arm.as_text(i) for name, arm in compares.arms.items()}
        rows.append(row)
    report.data["raw"]["sources"] = rows
    authors = {
        author: compared(compares.before(lambda s, author=author: s.author == author, 3))
        for author in AUTHORS
    }
    wrong, model = np.array([s.wrong for s in sources]), compares.arms["model"]
    return {
        "table": file_digest(a.table),
        "answers": {**about, "sha256": file_digest(a.answers)},
        "device": tables[0].problem.device.name,
        "kernels": len(compares.kernels),
        "sources": len(sources),
        "left_out": {
            "too few sources that ran": len({t.problem.extra["label"].partition("/")[0] for t in tables})
            - len({s.kernel for s in every}),
            "no answer": len({s.kernel for s in every}) - len(compares.kernels),
        },
        "by_author": dict(Counter(s.author for s in sources)),
        "before": compared(compares.before()),
        "after_5": compared(compares.after()),
        "before_by_author": authors,
        "p_wrong_auroc": {
            name: source_comparisons.auroc_interval(arm.p_wrong, wrong, [s.kernel for s in sources])
            for name, arm in compares.arms.items()
            if name in ("learned", "model", "ensemble")
        },
        "wrong": int(wrong.sum()),
        "model_as_it_is": source_comparisons.raw_scores(sources, told),
        "bins": source_comparisons.bin_figures(sources, told, model.said, model.p_wrong),
        "authors_forecasts": source_comparisons.author_figures(sources, told),
        "weights": {name: arm.weights for name, arm in compares.arms.items() if arm.weights},
        "freedom": {name: round(arm.said.freedom, 3) for name, arm in compares.arms.items()},
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--pack-answers", type=Path, metavar="FOLDER", help="q/, answers/ and index.json")
    parser.add_argument("--models", type=Path, help="folder of surrogates, fitted without a family each")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--answers", type=Path, default=source_answers.ANSWERS)
    parser.add_argument("--cache", type=Path, help="keep the learned forecasts here")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(stub_only=True)
    a = result_files.parse_arguments(parser)
    if a.pack_answers is not None:
        index = json.loads((a.pack_answers / "index.json").read_text(encoding="utf-8"))
        say(f"{source_answers.pack_answers(a.pack_answers, index, ABOUT, a.out)} answers in {a.out.name}")
        return 0
    if a.models is None:
        parser.error("say --pack-answers FOLDER, or --models FOLDER")
    report = result_files.ResultFile(a, "source_ranking", a.seed)
    report.finish(rank_sources(a, report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
