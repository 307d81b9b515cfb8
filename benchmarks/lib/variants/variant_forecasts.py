"""What a surrogate says of recorded variants against their base kernel: the query, and figures from draws."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import kernels
from benchmarks.lib.variants import variant_corpus
from benchmarks.lib.variants.rewrite_cases import load_variant
from forecast_autotune import autotune
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.llm.calibration import find_calibration
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.records import Device, Measurement
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.factory import calibration_paths, open_backend
from forecast_autotune.surrogates.language_model.surrogate import LLMSurrogate
from forecast_autotune.surrogates.learned import LearnedSurrogate
from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate
from forecast_autotune.variants import Variant
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.problem.lazy_candidates import LazySources, candidate_grids
from forecast_integrations.triton.trace import make_tracer
from forecast_integrations.triton.variants.loading import LoadedVariant, add_variants

Rows = npt.NDArray[np.intp]

DRAWS = 4096
TOP = 32
"""Candidates of each side that are drawn jointly: those that may be fastest."""
ORDERED_CONFIGS = 8
"""Configs of a variant whose order is kept."""
CONFIGS_SHOWN = 6
"""Configs of either side that a language model is asked about, per variant."""


@dataclass(frozen=True)
class VariantQuestion:
    """One kernel at one shape with all its variants: what a live call would ask about."""

    case: kernels.Case
    call: KernelCall
    query: Query
    records: Mapping[str, Variant]
    """By the name of the recorded source, `kernel/NN_short_name`."""

    def rows(self, source: str) -> Rows:
        """Rows of the query that are this variant's, in the order of its own list of configs."""
        name = self.records[source].name
        return np.array([i for i, c in enumerate(self.query.candidates) if c.variant == name], dtype=np.intp)

    def untraced(self) -> list[str]:
        """Variants of which no config has IR: nothing but the configs tells them from the base."""
        texts, candidates = self.query.ttir, self.query.candidates
        return [
            n for n in self.records if not any(assignment_of(candidates[i]) in texts for i in self.rows(n))
        ]

    @property
    def base(self) -> Rows:
        """Rows of the base kernel's configs."""
        return np.array([i for i, c in enumerate(self.query.candidates) if c.is_base_variant], dtype=np.intp)


def call_with_variants(case: kernels.Case, data: kernels.Data, records: Sequence[Variant]) -> KernelCall:
    """The call of a case with all configs of its kernel and of these variants as candidates."""
    listed = kernels.configs(case)
    options: dict[str, Any] = {"store": False, "reset_to_zero": list(case.reset_to_zero)}
    tuner = autotune(listed, list(case.key), **options)(case.kernel)
    functions: dict[str, LoadedVariant] = {v.name: load_variant(case, v) for v in records}
    found = add_variants(describe.configs_by_candidate(listed), functions)
    # As Triton passes them: the base kernel's own `run` wants to be told that it is to launch.
    given = {**data["kwargs"], "grid": data["grid"], "warmup": False}
    return KernelCall(tuner, tuple(data["args"]), given, found, functions)


def variant_question(
    case: kernels.Case,
    found: Sequence[variant_corpus.VariantSource],
    known: dict[str, dict[str, str]],
    *,
    device: Device | None = None,
    workers: int = 2,
) -> VariantQuestion:
    """The query of a case and its variants, with IR and grids, as a live call would have it.

    Needs a device that can be compiled for, real or null. `known` keeps IR by kind of arguments for further
    shapes; `device` takes the place of the active one's record.
    """
    records = {one.name: one.record() for one in found}
    data = case.make("meta")
    call = call_with_variants(case, data, list(records.values()))
    named = call.arguments()
    kernel = describe.kernel_record(case.kernel)
    problem = describe.describe(case.kernel, kernel, named, [named.get(k) for k in case.key], data["grid"])
    texts = known.setdefault(describe.call_kind(problem, case.kernel), {})
    candidates = CandidateList.of(list(call.configs))
    ttir = make_tracer(call, texts, workers)(list(candidates))
    query = Query(
        replace(problem, device=device or problem.device),
        candidates,
        candidate_grids(call, data["grid"], named),
        ttir=ttir,
        sources=LazySources(kernel.source, call.functions),
    )
    return VariantQuestion(case, call, query, records)


def base_measurements(asked: VariantQuestion, tables: Sequence[Table]) -> list[Measurement]:
    """What recorded tables hold of the base kernel's configs at this very shape."""
    rows = set(asked.query.candidates)
    return [
        m
        for t in tables
        if t.problem.extra.get("label") == asked.case.name
        and t.problem.device.slug == asked.query.problem.device.slug
        for m in t.measurements
        if m.candidate.is_base_variant and m.candidate in rows
    ]


def speedup_forecast(forecasts: Forecasts, base: Rows, own: Rows, *, seed: int = 0) -> dict[str, Any]:
    """What forecasts say of one variant: best of its configs against the base's best, from joint draws.

    `base` and `own` are rows. Gives `p_faster` = P(it runs and its best is faster than the base's best),
    mean and sd of log2(its best / the base's best) given that both run, `p_fail` = P(none of its configs
    runs), and `order`: places of its most promising configs in its own list, best first.
    """
    score = forecasts.mean + 6.0 * forecasts.p_fail
    base, mine = (rows[np.argsort(score[rows], kind="stable")[:TOP]] for rows in (base, own))
    rows = np.concatenate([base, mine])
    drawn = forecasts.samples(rows, DRAWS, seed)
    failed = np.random.default_rng(seed + 1).random(drawn.shape) < forecasts.p_fail[rows]
    drawn = np.where(failed, np.inf, drawn)
    theirs, best = drawn[:, : len(base)].min(axis=1), drawn[:, len(base) :].min(axis=1)
    ran, both = np.isfinite(best), np.isfinite(best) & np.isfinite(theirs)
    ratio = best[both] - theirs[both]
    order = [int(np.flatnonzero(own == row)[0]) for row in mine[:ORDERED_CONFIGS]]
    return {
        "p_faster": round(float((best < theirs).mean()), 4),
        "log2_ratio": round(float(ratio.mean()), 4) if len(ratio) else None,
        "sd": round(float(ratio.std()), 4) if len(ratio) else None,
        "p_fail": round(float(1.0 - ran.mean()), 4),
        "order": " ".join(map(str, order)),
    }


def forecast_all(
    asked: VariantQuestion, surrogate: Surrogate, known: Sequence[Measurement] = ()
) -> dict[str, Any]:
    """`speedup_forecast` of every variant of a trial, all of them in one query; `known` is measured already."""
    forecasts = surrogate.forecast(replace(asked.query, measured=known))
    return {name: speedup_forecast(forecasts, asked.base, asked.rows(name)) for name in asked.records}


def query_one_by_one(
    asked: VariantQuestion, model: LLMSurrogate, learned: LearnedSurrogate
) -> dict[str, Any]:
    """What a language model says of every variant, in a question of its own about a few configs.

    Its own words, calibrated, and nothing of the learned surrogate's but which configs are shown. Variants of
    which it said nothing have `said` false, and figures that mean nothing.
    """
    plain = learned.forecast(asked.query)
    score, candidates = plain.mean + 6.0 * plain.p_fail, asked.query.candidates
    found = {}
    for name in asked.records:
        base, own = asked.base, asked.rows(name)
        shown = [rows[np.argsort(score[rows], kind="stable")[:CONFIGS_SHOWN]] for rows in (base, own)]
        rows = np.concatenate(shown)
        query = replace(asked.query, candidates=CandidateList.of([candidates[int(i)] for i in rows]))
        forecasts = model.forecast(query)
        part = forecasts.consultation
        split = len(shown[0])
        figures = speedup_forecast(forecasts, np.arange(split), np.arange(split, len(rows)))
        figures["order"] = " ".join(
            str(int(np.flatnonzero(own == shown[1][int(i)])[0])) for i in figures["order"].split()
        )
        found[name] = {**figures, "said": part is not None and not part.trouble}
    return found


def language_model(spec: str, learned: LearnedSurrogate, timeout_s: float) -> LLMSurrogate:
    """A language model by its specification, with its calibration where it has one."""
    backend = open_backend(spec)
    calibration = find_calibration(
        backend.name, FORECAST_VERSION, calibration_paths(spec, backend.name, None)
    )
    return LLMSurrogate(backend, calibration, base=learned, timeout_s=timeout_s)


def file_digest(path: Path) -> str:
    """sha256 of a file, its beginning."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def source_mark(one: variant_corpus.VariantSource) -> str:
    """sha256 of the text that a forecast may see, its beginning."""
    return hashlib.sha256(one.text.encode()).hexdigest()[:16]


def first_cases_of(kernel: str, count: int) -> list[kernels.Case]:
    """The first cases of a kernel."""
    return kernels.cases([kernel])[:count]


def forecast_case(
    asked: VariantQuestion,
    learned: LearnedSurrogate,
    tables: Sequence[Table],
    models: Mapping[str, LLMSurrogate],
    *,
    plain: bool = True,
) -> dict[str, dict[str, Any]]:
    """Figures of all variants of a trial by who forecasts, then by variant; not `plain`: the models alone."""
    makers: dict[str, Callable[[], dict[str, Any]]] = {}
    if plain:
        makers["learned"] = partial(forecast_all, asked, learned)
        base = base_measurements(asked, tables)
        if any(m.ok for m in base):
            makers["learned, base measured"] = partial(forecast_all, asked, learned, base)
    makers |= {name: partial(query_one_by_one, asked, model, learned) for name, model in models.items()}
    return {name: make() for name, make in makers.items()}


def nan_if_none(value: float | None) -> float:
    """A number, NaN where there is none."""
    return math.nan if value is None else value
