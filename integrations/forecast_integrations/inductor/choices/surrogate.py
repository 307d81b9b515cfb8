"""The surrogate for Inductor's choices: templates in closed form, vendor kernels by their roofline.

Templates go through the same formula, learned residual, Gaussian process and calibration as kernels
whose TTIR was read. Choices that are no templates (ATen, cuBLAS, CUTLASS, decompositions) have no parameters to learn
from: it is forecast apart, with a wide spread, and tells nothing about the templates' level.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.cost import FactColumns
from forecast_autotune.features.devices import DeviceSpec, device_spec
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.llm.advice.subject import AdviceError, AdviceSubject
from forecast_autotune.records import Argument, Candidate, Kernel, Measurement, Problem, digest
from forecast_autotune.records.table import latest_labels
from forecast_autotune.store.installed_advice import installed_advice
from forecast_autotune.surrogates.advised import advised_forecasts
from forecast_autotune.surrogates.covariance import Hyperparameters, Rows
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.learned import LearnedModel, LearnedSurrogate, shipped_model
from forecast_autotune.surrogates.prior import Prior, prior_from_facts
from forecast_autotune.surrogates.protocol import Array, Forecasts, Query, Relative, Surrogate
from forecast_integrations.inductor.choices.geometry import (
    AttentionGeometry,
    ConvolutionGeometry,
    Geometry,
    MatmulGeometry,
    operation_geometry,
)
from forecast_integrations.inductor.choices.templates import (
    advised_sizes,
    closed_form,
    has_closed_form,
    template_tiles,
)

_EFFICIENCY = 0.75
"""Share of the tensor cores' rate that a vendor library reaches on a large product."""
_BANDWIDTH = 0.8
"""Share of the memory's rate that a vendor library reaches on a thin product."""
_LAUNCH_MS = 0.004
_SPREAD = 0.5
"""Standard deviation of log2(milliseconds) of a roofline: libraries fall off their best by kernel choice."""
_LEVEL = 0.7
"""Standard deviation of the formula's own level. Elsewhere only the candidates' order counts and it may be
anything; here it is compared with a vendor kernel's time, which is usually known first."""
_NOISE = 0.02
"""Standard deviation of a time that was measured."""
_OTHER_SHAPE_SD = 0.25
"""Standard deviation of the same kernel at another shape, relative to the roofline."""
_RATE_BY_BITS = {8: 2.0, 32: 0.5, 64: 0.07}
"""Tensor-core rate by operand bits, as a multiple of the 16-bit one."""


def default() -> Surrogate:
    """The surrogate for Inductor's choices that ships with this release."""
    model = template_model()
    if model is None:
        return TemplateSurrogate(with_shared_level(Hyperparameters()))
    return LearnedTemplateSurrogate(model, with_shared_level(model.hyper))


def with_shared_level(hyper: Hyperparameters) -> Hyperparameters:
    """Hyperparameters of the process where templates are compared with vendor kernels."""
    return replace(hyper, intercept=_LEVEL)


@cache
def template_model() -> LearnedModel | None:
    """The model learned from Inductor's own templates; else from all kernels; None where nothing ships."""
    path = Path(str(files("forecast_autotune") / "assets" / "inductor.npz"))
    return LearnedModel.load(path) if path.is_file() else shipped_model()


@dataclass(frozen=True)
class _CandidateSplit:
    """One list of candidates, told apart."""

    candidates: CandidateList
    shape: Geometry | None
    is_template: npt.NDArray[np.bool_]
    templates: CandidateList


_NONE: dict[Any, Any] = {}
"""No grids and no IR: always the same object, by which surrogates know that they were asked this before."""


class TemplateSurrogate(AnalyticSurrogate):
    """Closed form + Gaussian process for templates, a roofline for the rest."""

    name = "inductor"
    version = f"{AnalyticSurrogate.version}-template-1"
    answers_drafts_alike = True
    """Nothing that it knows is too slow for a draft."""
    _latest: _CandidateSplit | None = None

    def forecast(self, query: Query) -> Forecasts:
        """Forecast all choices of one op; never raises for odd problems, it widens instead.

        With no template among them (C++ templates, custom operators), or on a CPU, all of them are
        treated alike: by the coordinates of their parameters.
        """
        shape = operation_geometry(query.problem)
        device = device_spec(query.problem.device)
        kinds = self._kinds(query, shape)
        candidates, is_template, names = kinds.candidates, kinds.is_template, kinds.templates
        if shape is None or not len(names):
            return super().forecast(query)
        inner = replace(
            query,
            candidates=names,
            grids=_NONE,
            measured=[m for m in query.measured if m.candidate in names.row_of],
            relatives=[_templates_of(relative) for relative in query.relatives],
            ttir=_NONE,
        )
        forecasts = super().forecast(inner) if query.advice is None else advised_forecasts(self, inner)
        externs = [c for c, template in zip(candidates, is_template, strict=True) if not template]
        if not externs:
            return replace(forecasts, candidates=candidates, reason=_reason(forecasts, 0))
        has_level = any(m.ok for m in latest_labels(inner.measured).values())
        libraries = _forecast_externs(query, externs, shape, device)
        return _join_forecasts(candidates, is_template, forecasts, libraries, has_level)

    def _kinds(self, query: Query, shape: Geometry | None) -> _CandidateSplit:
        """The candidates by kind. A decision asks about one list round after round: the latest is kept, and
        so is what the surrogate below keeps of it."""
        candidates, last = CandidateList.of(query.candidates), self._latest
        if last is None or last.candidates is not candidates or last.shape != shape:
            is_template = np.array(
                [shape is not None and has_closed_form(shape, c) for c in candidates], dtype=bool
            )
            names = CandidateList.of(c for c, is_one in zip(candidates, is_template, strict=True) if is_one)
            last = self._latest = _CandidateSplit(candidates, shape, is_template, names)
        return last

    def advised_rows(self, query: Query) -> Rows:
        """All: advice is on templates, and only these are asked about."""
        return np.arange(len(query.candidates))

    def advice_subject(self, query: Query, rows: Rows) -> AdviceSubject:
        """The operation's geometry as arguments, and the tiles of these templates."""
        shape = operation_geometry(query.problem)
        candidates = [query.candidates[int(i)] for i in rows]
        if shape is None or not all(has_closed_form(shape, c) for c in candidates):
            raise AdviceError("advice on templates holds for products, convolutions and attention")
        tiles = [template_tiles(shape, c) for c in candidates]
        config = {name: np.array([tile[name] for tile in tiles]) for name in tiles[0]}
        sizes = [
            Argument(n, "scalar", "i64", value=v) for n, v in advised_sizes(shape, candidates[0]).items()
        ]
        arguments = {a.name: a for a in sizes}
        return AdviceSubject(config, arguments, (), device_spec(query.problem.device), len(candidates))

    def prior(self, query: Query) -> Prior:
        """The cost formula on closed-form facts; the usual one where any candidate has none."""
        candidates = CandidateList.of(query.candidates)
        shape = operation_geometry(query.problem)
        if shape is None or not len(candidates):
            return super().prior(query)
        device = device_spec(query.problem.device)
        units = candidates.units({}, None)
        if not all(has_closed_form(shape, candidates[int(row)]) for row in units.first):
            return super().prior(query)
        first = [candidates[int(row)] for row in units.first]
        facts = [closed_form(shape, c.variant, c.config.parameters(), device.multiprocessors) for c in first]
        closed_forms = [form for form in facts if form is not None]
        few = FactColumns.of([form.facts for form in closed_forms])
        table = FactColumns(
            {name: column[units.of] for name, column in few.columns.items()}, few.dots[units.of]
        )
        grids = [closed_forms[unit].grid for unit in units.of]
        exact = np.ones(len(candidates), dtype=bool)
        configs = [c.config for c in candidates]
        plain = prior_from_facts(table, grids, configs, device, _unique_bytes(shape), exact)
        return _with_single_stage_cost(plain, np.array([c.num_stages for c in configs]))


class LearnedTemplateSurrogate(LearnedSurrogate, TemplateSurrogate):
    """The same with a learned residual on the closed-form facts."""

    name = "inductor-learned"
    version = TemplateSurrogate.version


def template_advice(problem: Problem) -> Advice | None:
    """The installed advice on the templates of an operation, as on the operation's own source."""
    shape = operation_geometry(problem)
    if shape is None:
        return None
    name = f"{type(shape).__name__.removesuffix('Geometry').lower()}_template"
    return _template_advice(name, problem.kernel.source_sha256)


@cache
def _template_advice(name: str, source_sha256: str) -> Advice | None:
    advice = installed_advice(Kernel(name, "inductor", source_sha256=digest("inductor", name)))
    return advice and replace(advice, source_sha256=source_sha256)


def _with_single_stage_cost(plain: Prior, stages: npt.NDArray[np.int_]) -> Prior:
    """The belief with what one stage costs: a program loads, waits and multiplies in turn.

    Only programs that share the multiprocessor fill the gaps then. A fifth of EXHAUSTIVE has one stage,
    which hand-written spaces hardly ever contain.
    """
    cost = plain.costs
    if cost is None:
        return plain
    in_turn = (cost.memory_ms + cost.dot_ms + cost.alu_ms) / cost.occupancy + cost.latency_ms
    slower = np.where(stages <= 1, np.maximum(cost.total_ms, in_turn), cost.total_ms)
    return replace(plain, mean=plain.mean + np.log2(slower / cost.total_ms))


def _templates_of(relative: Relative) -> Relative:
    """The part of a relative that tells about templates; nothing where its own geometry is unknown."""
    shape = operation_geometry(relative.problem)
    rows = [m for m in relative.measurements if shape is not None and has_closed_form(shape, m.candidate)]
    return Relative(relative.problem, rows)


@dataclass(frozen=True)
class _ExternForecasts:
    """Forecasts of the n candidates that are no templates."""

    mean: Array
    """log2(milliseconds), [n]."""
    sd: Array
    p_fail: Array
    is_tried: npt.NDArray[np.bool_]
    """The candidates that were tried, [n]."""


def _forecast_externs(
    query: Query, externs: Sequence[Candidate], shape: Geometry, device: DeviceSpec
) -> _ExternForecasts:
    level = math.log2(roofline_ms(shape, device))
    here = latest_labels(query.measured)
    elsewhere: dict[Candidate, list[float]] = {}
    for relative in query.relatives:
        there = operation_geometry(relative.problem)
        if there is None:
            continue
        base = math.log2(roofline_ms(there, device_spec(relative.problem.device)))
        for candidate, m in relative.labels.items():
            if m.ok:
                elsewhere.setdefault(candidate, []).append(math.log2(m.ms) - base)
    mean, sd, p_fail = (np.zeros(len(externs)) for _ in range(3))
    is_tried = np.zeros(len(externs), dtype=bool)
    for i, candidate in enumerate(externs):
        mean[i], sd[i], p_fail[i] = _forecast_extern(level, here.get(candidate), elsewhere.get(candidate, []))
        is_tried[i] = candidate in here
    return _ExternForecasts(mean, sd, p_fail, is_tried)


def _forecast_extern(
    level: float, here: Measurement | None, elsewhere: Sequence[float]
) -> tuple[float, float, float]:
    if here is not None:
        return (math.log2(here.ms), _NOISE, 0.0) if here.ok else (level, _SPREAD, 1.0)
    if elsewhere:
        return (
            level + statistics.median(elsewhere),
            math.hypot(_OTHER_SHAPE_SD, _SPREAD / len(elsewhere)),
            0.01,
        )
    return level, _SPREAD, 0.01


def roofline_ms(shape: Geometry, device: DeviceSpec) -> float:
    """Milliseconds of a good kernel: arithmetic or bytes, whichever takes longer, and the launch."""
    if isinstance(shape, MatmulGeometry):
        flops, width = shape.flops, max(shape.left.bits, shape.right.bits)
    elif isinstance(shape, ConvolutionGeometry):
        taps = math.prod(shape.kernel) * shape.channels
        pixels = shape.batch * math.prod(shape.out or shape.image)
        flops, width = 2.0 * pixels * shape.filters * taps, shape.bits
    else:
        both = shape.width + shape.value_width
        flops = 2.0 * shape.batch * shape.heads * shape.queries * shape.keys * both
        width = shape.bits
    rate = device.tensor_tflops * 1e9 * _RATE_BY_BITS.get(width, 1.0) * _EFFICIENCY
    memory_ms = _unique_bytes(shape) / (device.memory_gb_s * 1e6 * _BANDWIDTH)
    return max(flops / rate, memory_ms) + _LAUNCH_MS


def _unique_bytes(shape: Geometry) -> float:
    """Bytes of all operands and the result."""
    if isinstance(shape, MatmulGeometry):
        return shape.unique_bytes
    if isinstance(shape, AttentionGeometry):
        queries = shape.heads * shape.queries * (shape.width + shape.value_width)
        keys = shape.kv_heads * shape.keys * (shape.width + shape.value_width)
        return shape.batch * (queries + keys) * shape.bits / 8.0
    size = shape.bits / 8.0
    taps = math.prod(shape.kernel) * shape.channels * shape.filters
    image = shape.batch * shape.channels * math.prod(shape.image)
    result = shape.batch * shape.filters * math.prod(shape.out or shape.image)
    return (image + taps) * size + result * shape.out_bits / 8.0


def _reason(forecasts: Forecasts, externs: int) -> str:
    basis = forecasts.reason.replace("cost formula on TTIR", "cost formula on the templates' closed form")
    return f"{basis}; {externs} by roofline" if externs else basis


def _join_forecasts(
    candidates: CandidateList,
    is_template: npt.NDArray[np.bool_],
    forecasts: Forecasts,
    externs: _ExternForecasts,
    has_level: bool,
) -> Forecasts:
    """Return the forecasts of templates and externs in the order of `candidates`.

    Until a template has run (`has_level`), the level of the formula is unknown. The roofline, which knows
    as little, goes up and down with the best template's.
    """
    place = np.zeros(len(candidates), dtype=np.intp)
    place[is_template] = np.arange(int(is_template.sum()))
    place[~is_template] = np.arange(int((~is_template).sum()))

    def join(templates: Array, extern_values: Array) -> Array:
        both = np.empty(len(candidates))
        both[is_template], both[~is_template] = templates, extern_values
        return both

    leader = int(forecasts.order()[0])
    level_share = np.where(externs.is_tried | has_level, 0.0, 1.0)

    def sample(rows: npt.NDArray[np.intp], count: int, generator: np.random.Generator) -> Array:
        inner = np.append(place[rows[is_template[rows]]], leader)
        if forecasts.sampler is not None:
            samples = forecasts.sampler(inner, count, generator)
        else:
            noise = generator.standard_normal((count, len(inner)))
            samples = forecasts.mean[inner] + forecasts.sd[inner] * noise
        values = np.empty((count, len(rows)))
        values[:, is_template[rows]] = samples[:, :-1]
        places = place[rows[~is_template[rows]]]
        level = (samples[:, -1:] - forecasts.mean[leader]) * level_share[places]
        spread = externs.sd[places] * generator.standard_normal((count, len(places)))
        values[:, ~is_template[rows]] = externs.mean[places] + level + spread
        return values

    # Never ranked out: as promising as the best template until it has been timed.
    best_case = np.minimum(forecasts.optimistic().min(), externs.mean - 2 * externs.sd)
    low = np.where(externs.is_tried, externs.mean - 2 * externs.sd, best_case)
    return replace(
        forecasts,
        candidates=candidates,
        mean=join(forecasts.mean, externs.mean),
        sd=join(forecasts.sd, np.hypot(externs.sd, level_share * forecasts.sd[leader])),
        p_fail=join(forecasts.p_fail, externs.p_fail),
        sampler=sample,
        reason=_reason(forecasts, int((~is_template).sum())),
        lower_bound=join(forecasts.optimistic(), low),
    )
