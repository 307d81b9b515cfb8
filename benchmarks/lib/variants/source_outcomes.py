"""Recorded sources by kernel: what became of each, what a learned surrogate says, what distinguishes it.

The figure of a source is log2(its best time / the base's best time), each over its own recorded configs, as a
mean over the shapes at which both ran. What is forecast comes from the tables' facts alone.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.lib.search.source_pool import BASE
from benchmarks.lib.variants import variant_corpus
from benchmarks.lib.variants.corpus_packing import source_texts
from benchmarks.lib.variants.variant_forecasts import file_digest
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.cost import NUMERIC_FACTS
from forecast_autotune.features.stored_facts import facts_by_unit
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.features.ttir.facts import TtirFacts
from forecast_autotune.records import Candidate, Outcome, digest
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.protocol import Query, Surrogate

FloatArray = npt.NDArray[np.float64]

DRAWS = 256
LEAST_SOURCES = 5
"""Sources of a kernel that ran, beside the base; kernels with fewer are left out."""
AUTHORS = ("first model", "later model", "mechanical")
_NUMBERED = re.compile(r"\d\d_[a-z0-9_]+")


@dataclass(frozen=True)
class RecordedSource:
    """One source: what became of it, and what was known before."""

    kernel: str
    family: str
    name: str
    author: str
    """One of `AUTHORS`."""
    mark: str
    """sha256 of its text."""
    outcome: str
    log2_ratio: float | None
    """None where it is wrong, or ran at no shape at which the base did."""
    first_shape: float | None
    """The same at the kernel's first shape alone, which authors were told of."""
    learned: float
    """The learned surrogate's forecast of `log2_ratio`."""
    learned_sd: float
    learned_p_fail: float
    features: tuple[float, ...]
    """See `FEATURES`."""

    @property
    def wrong(self) -> bool:
        """Whether it is wrong, or never ran."""
        return self.outcome != Outcome.OK


FEATURES = (
    *(f"{name} against the base" for name in NUMERIC_FACTS),
    "programs against the base",
    "formula against the base",
    "log2 ms of the base",
    "share of lines changed",
    "log2 lines of the base",
    "configs of its own",
)


def author_of(name: str, first: frozenset[str]) -> str:
    """Which group a source belongs to; `first` are the kernels that the first model wrote for."""
    kernel, _, short = name.partition("/")
    if _NUMBERED.fullmatch(short) is None:
        return AUTHORS[2]
    return AUTHORS[0] if kernel in first else AUTHORS[1]


def first_author_kernels() -> frozenset[str]:
    """Kernels of the first table of variants."""
    return frozenset(one.kernel for one in variant_corpus.variant_sources(None, [variant_corpus.TABLE]))


def change_share(base: str, text: str) -> float:
    """Share of lines that differ between two texts."""
    matcher = difflib.SequenceMatcher(None, base.splitlines(), text.splitlines(), autojunk=False)
    return 1.0 - matcher.ratio()


@dataclass(frozen=True)
class _ShapeView:
    """One kernel at one shape: by variant, what was measured and what is forecast."""

    measured: Mapping[str, float]
    """log2 milliseconds of the best config, of those that ran."""
    mean: Mapping[str, float]
    sd: Mapping[str, float]
    """Of log2(best / the base's best), from joint draws."""
    p_fail: Mapping[str, float]
    facts: Mapping[str, FloatArray]
    """Of the config that is forecast to be the best."""


def _view(table: Table, surrogate: Surrogate) -> _ShapeView:
    rows = table.by_candidate()
    candidates = CandidateList.of(sorted(rows, key=lambda c: digest("row", str(c))))
    problem = table.problem
    said = surrogate.forecast(Query(problem, candidates, table.grids()))
    by_variant: dict[str, list[int]] = {}
    measured: dict[str, float] = {}
    for i, candidate in enumerate(candidates):
        by_variant.setdefault(candidate.variant, []).append(i)
        if rows[candidate].ok:
            log2_ms = math.log2(rows[candidate].ms)
            measured[candidate.variant] = min(log2_ms, measured.get(candidate.variant, math.inf))
    if BASE not in by_variant:
        return _ShapeView({}, {}, {}, {}, {})
    drawn = said.samples(np.arange(len(candidates)), DRAWS, 0)
    base = drawn[:, by_variant[BASE]].min(axis=1)
    level = float(said.mean[by_variant[BASE]].min())
    stored = facts_by_unit(problem)
    mean, sd, p_fail, facts = {}, {}, {}, {}
    for variant, own in by_variant.items():
        at = np.array(own)
        best = int(at[np.argmin(said.mean[at])])
        mean[variant] = float(said.mean[best]) - level
        sd[variant] = float((drawn[:, at].min(axis=1) - base).std())
        p_fail[variant] = float(said.p_fail[at].min())
        found = _facts_of(candidates[best], table.grids(), problem.grid, stored)
        if found is not None:
            facts[variant] = np.append(found, float(said.mean[best]))
    return _ShapeView(measured, mean, sd, p_fail, facts)


def _facts_of(
    candidate: Candidate,
    grids: Mapping[Candidate, tuple[int, ...]],
    usual: tuple[int, ...] | None,
    stored: Mapping[tuple[str, tuple[int, ...] | None], TtirFacts],
) -> FloatArray | None:
    """log2(1 + fact) of a candidate, then of its programs; None where its IR is not known."""
    grid = grids.get(candidate, usual)
    read = stored.get((assignment_of(candidate), grid))
    if read is None:
        return None
    values = [float(getattr(read, name)) for name in NUMERIC_FACTS]
    programs = float(math.prod(grid)) if grid else math.nan
    return np.asarray(np.log2(1.0 + np.maximum(0.0, np.array([*values, programs]))))


def sources_of_kernel(
    tables: Sequence[Table], surrogate: Surrogate, first: frozenset[str]
) -> list[RecordedSource]:
    """The sources of one kernel but the base; empty where the base or too few of them ran."""
    texts = next(iter(source_texts(tables).values()))
    views = [_view(t, surrogate) for t in tables]
    label, family = tables[0].problem.extra["label"], tables[0].problem.extra["family"]
    found = []
    for variant, told in tables[0].problem.extra["sources"].items():
        if variant == BASE:
            continue
        ratios = [
            v.measured[variant] - v.measured[BASE] if {variant, BASE} <= set(v.measured) else math.nan
            for v in views
        ]
        here = [v for v in views if variant in v.mean]
        outcome = told.get("outcome", "")
        ran = outcome == Outcome.OK and bool(np.isfinite(ratios).any())
        found.append(
            RecordedSource(
                label.partition("/")[0],
                family,
                told["name"],
                author_of(told["name"], first),
                hashlib.sha256(texts[variant].encode()).hexdigest(),
                outcome,
                float(np.nanmean(ratios)) if ran else None,
                float(ratios[0]) if ran and math.isfinite(ratios[0]) else None,
                float(np.mean([v.mean[variant] for v in here])) if here else 0.0,
                float(np.mean([v.sd[variant] for v in here])) if here else 0.5,
                float(np.mean([v.p_fail[variant] for v in here])) if here else 0.5,
                _features(views, variant, texts),
            )
        )
    enough = sum(one.log2_ratio is not None for one in found) >= LEAST_SOURCES
    return found if enough else []


def _features(views: Sequence[_ShapeView], variant: str, texts: Mapping[str, str]) -> tuple[float, ...]:
    both = [v.facts[variant] - v.facts[BASE] for v in views if {variant, BASE} <= set(v.facts)]
    base = [v.facts[BASE][-1] for v in views if BASE in v.facts]
    told = np.mean(both, axis=0) if both else np.full(len(NUMERIC_FACTS) + 2, math.nan)
    lines = math.log2(1 + len(texts[BASE].splitlines()))
    level = float(np.mean(base)) if base else math.nan
    own = float("CONFIGS" in texts[variant])
    return (*map(float, told), level, change_share(texts[BASE], texts[variant]), lines, own)


def read_sources(
    tables: Sequence[Table],
    surrogates: Mapping[str, Surrogate],
    first: frozenset[str],
    marks: Sequence[str],
    cache: Path | None,
) -> list[RecordedSource]:
    """All sources of kernels with enough of them; what was read before with these `marks` is not read again."""
    key = digest(*marks, list(FEATURES), DRAWS)
    if cache is not None and cache.is_file():
        held = json.loads(cache.read_text(encoding="utf-8"))
        if held["key"] == key:
            return [replace(RecordedSource(**row), features=tuple(row["features"])) for row in held["rows"]]
    by_kernel: dict[str, list[Table]] = {}
    for table in tables:
        by_kernel.setdefault(table.problem.extra["label"].partition("/")[0], []).append(table)
    found: list[RecordedSource] = []
    for mine in by_kernel.values():
        found += sources_of_kernel(mine, surrogates[mine[0].problem.extra["family"]], first)
    if cache is not None:
        cache.write_text(json.dumps({"key": key, "rows": [asdict(one) for one in found]}), encoding="utf-8")
    return found


def model_marks(folder: Path, families: Sequence[str]) -> list[str]:
    """Digests of the models that forecast."""
    return [file_digest(folder / f"{family}.npz") for family in families]
