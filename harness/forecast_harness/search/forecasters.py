"""Forecasts of whole sources before they run: learnt in the search, read in IR, from judgements, by language models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from forecast_autotune.errors import SettingsError
from forecast_autotune.llm.backend import Backend, BackendResponse, LLMError
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.prompt import (
    FORECAST_VERSION,
    Neighbour,
    ProblemDescription,
    Prompt,
    ReferenceTime,
    forecast_prompt,
    variant_text,
)
from forecast_autotune.records import Device, Kernel, Problem
from forecast_autotune.surrogates.protocol import Array
from forecast_autotune.variants.records import SourceJudgement, source_digest
from forecast_harness.records import (
    MODEL_NOTE,
    Node,
    NodeForecast,
    NodeResult,
    SearchCost,
    SearchTarget,
    TargetKind,
)
from forecast_harness.search.events import Forecasted, NodeForecastRequest
from forecast_harness.search.lineage import (
    UNINFORMED_SD,
    LineageForecaster,
    failure_probabilities,
    relative_forecasts,
)


class Forecaster(Protocol):
    """Forecasts nodes without running them."""

    name: str
    """With its version: part of the context."""

    def forecast(self, question: NodeForecastRequest) -> Forecasted:
        """Beliefs about `question.nodes` relative to `question.reference`. Failures are told, not raised."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


SPEC_FORMS = (
    "auto, none, lineage, triton, recorded:FILE with judgements of sources, or llm:SPEC with a model as in "
    "FORECAST_AUTOTUNE_LLM"
)


def open_forecaster(spec: str, target: SearchTarget) -> Forecaster | None:
    """The forecaster that `spec` names; None for `none`.

    `lineage` learns from the search's own results, in any language. `triton` adds the shipped surrogate where the
    target is a Triton kernel. `auto` is `triton` there, else `lineage`. `llm:SPEC`
    blends a language model with `auto`, `recorded:FILE` a file of judgements. Raises `SettingsError` for anything
    else, and for `triton` where there is nothing to trace.
    """
    if spec == "none":
        return None
    if spec.startswith("llm:"):
        from forecast_autotune.llm.providers import provider

        return LLMNodeForecaster(provider().backend(spec.removeprefix("llm:")), _without_llm("auto", target))
    if spec.startswith("recorded:"):
        from forecast_autotune.variants.records import read_judgements

        judgements = read_judgements(Path(spec.removeprefix("recorded:")))
        return RecordedForecaster(judgements, _without_llm("auto", target))
    return _without_llm(spec, target)


def _without_llm(spec: str, target: SearchTarget) -> Forecaster:
    traceable = target.kind is TargetKind.KERNEL
    if spec == "lineage" or (spec == "auto" and not traceable):
        return LineageForecaster()
    if spec in ("auto", "triton"):
        if not traceable:
            raise SettingsError(
                f"triton forecasts variants of a Triton kernel; {target.name} is a {target.kind} in {target.language}: "
                "use lineage"
            )

        return TritonForecaster(target)
    raise SettingsError(f"no forecaster is called {spec!r}; there are {SPEC_FORMS}")


UNTESTED_DIFFERENCE_SD = 0.5
"""Spread (log2) of a forecast difference between two sources, before the search has tried any."""
_DIFFERENCE_SHARE = 0.5
"""Share of a forecast difference that is believed before results say more."""


class TritonForecaster:
    """See the module. A pure function of the question: IR depends on the text alone."""

    def __init__(self, target: SearchTarget) -> None:
        """A sandbox traces sources for the shipped surrogate, once they are first asked about."""
        from forecast_harness.trials.configs.variant_tracing import VariantTracer

        self._tracer = VariantTracer(target)
        self._lineage = LineageForecaster()
        self.name = f"traced-1-{self._tracer.version}+{self._lineage.name}"

    def forecast(self, question: NodeForecastRequest) -> Forecasted:
        """Beliefs about every node; one that cannot be traced is left to its lineage."""
        known = {n.id: n for n, _, _ in question.judged} | {n.id: n for n in question.nodes}
        known |= {question.reference.id: question.reference}
        self._tracer.prepare(list(known.values()))
        seen = {node.id: self._tracer.best_forecast(node) for node in known.values()}
        offsets = {}
        for node in known.values():
            above = seen.get(node.parents[0]) if node.parents else None
            mine = seen[node.id]
            if above is not None and mine is not None:
                offsets[node.id] = _DIFFERENCE_SHARE * (mine[0] - above[0])
        posterior = self._lineage.posterior(question, offsets)
        if posterior.reason and question.nodes:
            # Before the search has results of its own, IR says something where there is any.
            traced = np.array([n.id in offsets for n in question.nodes])
            posterior = replace(
                posterior,
                sd=np.where(traced, UNTESTED_DIFFERENCE_SD, UNINFORMED_SD),
                nearest_correlation=traced.astype(float),
                reason="",
            )
        fails = failure_probabilities(question)
        for i, node in enumerate(question.nodes):
            mine = seen[node.id]
            if mine is not None:
                fails[i] = 1.0 - (1.0 - fails[i]) * (1.0 - mine[1])
        return relative_forecasts(question, posterior, fails, self.name)

    def close(self) -> None:
        """End the sandbox that traces."""
        self._tracer.close()


SHARED_ERROR_SD = 0.1
"""Spread (log2) of what judgements of one kernel's sources are off by in common."""
_LEAST_SD = 0.02
_MOST_ERRORS = 2.0
"""Standard deviations that one result moves the others by at most."""


class RecordedForecaster:
    """See the module. A pure function of the question and the file."""

    def __init__(self, judgements: Mapping[str, SourceJudgement], base: Forecaster) -> None:
        self._judgements, self._base = judgements, base
        figures = ("log2_ratio", "sd", "p_wrong")
        content = repr(
            sorted(
                (key, {f: getattr(judgement, f) for f in figures}) for key, judgement in judgements.items()
            )
        )
        self.name = f"recorded-1-{source_digest(content)[:8]}+{base.name}"

    def forecast(self, question: NodeForecastRequest) -> Forecasted:
        """The base's beliefs, and judgements where there are any."""
        before = self._base.forecast(question)
        scores = {n.id: s for n, j, s in question.judged if j.log2_ratio is not None}
        shift = self._shift(question)
        beliefs = dict(before.beliefs)
        for node in question.nodes:
            judgement = self._said(node)
            if judgement is not None:
                mean = judgement.log2_ratio + shift - scores.get(question.reference.id, 0.0)
                beliefs[node.id] = blend_judgement(beliefs[node.id], replace(judgement, log2_ratio=mean))
        return replace(before, beliefs=beliefs)

    def close(self) -> None:
        """Close the other forecaster."""
        self._base.close()

    def _said(self, node: Node) -> SourceJudgement | None:
        return self._judgements.get(source_digest(node.source))

    def _shift(self, question: NodeForecastRequest) -> float:
        """The common error of judgements of sources that ran, shrunk towards nothing."""
        moved = total = 0.0
        for node, result, score in question.judged:
            judgement = self._said(node) if result.log2_ratio is not None and node.parents else None
            if judgement is None:
                continue
            sd = max(_LEAST_SD, judgement.sd)
            off = max(-_MOST_ERRORS * sd, min(_MOST_ERRORS * sd, score - judgement.log2_ratio))
            moved, total = moved + off / sd**2, total + 1.0 / sd**2
        return moved / (total + SHARED_ERROR_SD**-2)


def blend_judgement(before: NodeForecast, judgement: SourceJudgement) -> NodeForecast:
    """A belief and a judgement, relative to the same node, by their precisions; alone where the belief abstains."""
    sd = max(_LEAST_SD, judgement.sd)
    precision = 1.0 / sd**2 + (0.0 if before.abstains else 1.0 / before.sd**2)
    mean = (
        judgement.log2_ratio / sd**2 + (0.0 if before.abstains else before.mean / before.sd**2)
    ) / precision
    spread = math.sqrt(1.0 / precision)
    p_fail = 1.0 - (1.0 - before.p_fail) * (1.0 - judgement.p_wrong)
    better = (1.0 - p_fail) * 0.5 * math.erfc(mean / (spread * math.sqrt(2.0)))
    mean, spread, p_fail, better = (round(v, 6) for v in (mean, spread, p_fail, better))
    note = f"{before.note}; judged {judgement.log2_ratio:+.2f}"
    return NodeForecast(mean, spread, p_fail, better, False, note)


MODEL_ERROR_SD = 0.5
"""Standard deviation (log2) of a model's own error, on top of the spread that it states."""
MAX_SHOWN_RESULTS = 6
"""Results that are shown: the fastest, and failures."""
_TIMEOUT_S = 300.0
_MIN_LABEL_MASS = 0.2
"""Probability that must lie on the labels: a smaller one means the question was not understood."""
_FAIL_WEIGHT = 0.3


class LLMNodeForecaster:
    """See the module. Deterministic as far as its backend is."""

    def __init__(self, backend: Backend, base: Forecaster) -> None:
        self._backend, self._base = backend, base
        self.name = f"llm-1-{FORECAST_VERSION}-{backend.name}+{base.name}"

    def forecast(self, question: NodeForecastRequest) -> Forecasted:
        """The base's beliefs, moved by the model's; `problem` says why the model said nothing."""
        before = self._base.forecast(question)
        if not question.nodes:
            return before
        prompt = question_prompt(question)
        try:
            answer = self._backend.forecast(
                prompt.prefix, prompt.suffixes, prompt.labels, timeout_s=_TIMEOUT_S
            )
        except (LLMError, OSError, ValueError) as error:
            return replace(before, problem=f"{self._backend.name}: {error}"[:500])
        return self._blended(question, before, answer)

    def close(self) -> None:
        """Free the model."""
        self._backend.close()
        self._base.close()

    def _blended(
        self, question: NodeForecastRequest, before: Forecasted, answer: BackendResponse
    ) -> Forecasted:
        mean, sd, p_fail = BINS.moments(_normalized_rows(answer))
        heard = answer.answered & (answer.mass >= _MIN_LABEL_MASS)
        beliefs = dict(before.beliefs)
        for i, node in enumerate(question.nodes):
            if heard[i]:
                word = (float(mean[i]), float(sd[i]), float(p_fail[i]))
                beliefs[node.id] = blend_forecast(before.beliefs[node.id], *word)
        used = answer.usage
        spent = SearchCost(
            wall_seconds=used.seconds, tokens=used.prompt_tokens + used.output_tokens, money=used.money
        )
        problem = before.problem
        if not heard.all():
            trouble = "; ".join(answer.trouble) or "too little probability on the labels"
            problem = f"{int((~heard).sum())} of {len(heard)} not forecast by {self._backend.name}: {trouble}"
        return Forecasted(question.batch, before.reference, beliefs, before.spent + spent, problem[:500])


def blend_forecast(before: NodeForecast, mean: float, sd: float, p_fail: float) -> NodeForecast:
    """A belief and a model's word on it, weighed by their precisions; the model's with `MODEL_ERROR_SD` added.

    A belief that abstains still does: that the model thinks it knows has not been proved.
    """
    doubt = sd**2 + MODEL_ERROR_SD**2
    precision = 1.0 / before.sd**2 + 1.0 / doubt
    moved = (before.mean / before.sd**2 + mean / doubt) / precision
    spread = math.sqrt(1.0 / precision)
    odds = (1.0 - _FAIL_WEIGHT) * _logit(before.p_fail) + _FAIL_WEIGHT * _logit(p_fail)
    fails = 1.0 / (1.0 + math.exp(-odds))
    better = (1.0 - fails) * 0.5 * math.erfc(moved / (spread * math.sqrt(2.0)))
    note = f"{before.note}{MODEL_NOTE}{mean:+.2f}"
    return NodeForecast(moved, spread, fails, better, before.abstains, note)


def question_prompt(question: NodeForecastRequest) -> Prompt:
    """The question to a model: the incumbent's source and time, results, and the nodes as changes to it."""
    reference, target = question.reference, question.target
    results = {n.id: (n, j, s) for n, j, s in question.judged}
    known = results.get(reference.id)
    seconds = [] if known is None else list(known[1].seconds.values())
    log2_ms = float(np.mean(np.log2(seconds))) + math.log2(1e3) if seconds else 0.0
    score = known[2] if known is not None else 0.0
    name, statement = ("", "") if target is None else (target.name, target.statement)
    kernel = Kernel(name, reference.language, reference.source)
    return forecast_prompt(
        ProblemDescription(Problem("", kernel, (), _device(question)), work=_task_summary(statement)),
        [_shown_change(reference, n) for n in question.nodes],
        ReferenceTime(log2_ms, "the source above, geometric mean over all workloads", bool(seconds)),
        _neighbours(reference, score, list(results.values())),
    )


def _device(question: NodeForecastRequest) -> Device:
    """Where the target is searched: as it says itself, or a CPU, of which no device's figures are shown."""
    if question.target is not None and (given := question.target.payload.get("device")) is not None:
        return Device.from_json(given)
    named = (j.device for n, j, _ in question.judged if n.id == question.reference.id)
    return Device(next(named, "") or "unknown", "cpu")


def _neighbours(
    reference: Node, score: float, results: Sequence[tuple[Node, NodeResult, float]]
) -> list[Neighbour]:
    """The fastest of the other results, and the latest failures; each by its note."""
    others = [r for r in results if r[0].id != reference.id]
    ran = sorted((r for r in others if r[1].log2_ratio is not None), key=lambda r: (r[2], r[0].id))
    failed = [r for r in others if r[1].log2_ratio is None]
    fastest = [Neighbour(_node_title(n), s - score) for n, _, s in ran[: MAX_SHOWN_RESULTS - 2]]
    return fastest + [Neighbour(_node_title(n), None) for n, _, _ in failed[-2:]]


def _node_title(node: Node) -> str:
    return " ".join((node.provenance.note or node.arm or node.id).split())[:160]


def _shown_change(reference: Node, node: Node) -> str:
    return variant_text(reference.source, node.source, f"by {_node_title(node)}")


def _task_summary(statement: str) -> str:
    """The part of a statement before its rules, in a line."""
    summary = statement.partition("\nRules for a source:")[0]
    return " ".join(summary.split())[:1500]


def _normalized_rows(answer: BackendResponse) -> Array:
    """Probabilities whose rows sum to 1; rows without an answer are even, and not used."""
    rows = np.asarray(answer.probabilities, float)
    total = rows.sum(axis=1, keepdims=True)
    return np.asarray(np.where(total > 0.5, rows / np.maximum(total, 1e-9), 1.0 / rows.shape[1]))


def _logit(p: float) -> float:
    p = min(max(p, 1e-3), 1.0 - 1e-3)
    return math.log(p / (1.0 - p))
