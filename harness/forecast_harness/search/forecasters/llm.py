"""A language model's word on whole sources, blended with what the search has learnt of its own results.

The model is asked for bins of time / time of the incumbent, so that bins stay fine where decisions are made
however far a search has come. Its word is one more measurement of a node's time, with an error of its own
that is not small: an unproved model can tip a decision, never make it. A failing model leaves the other
forecaster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

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
from forecast_harness.records import MODEL_NOTE, Node, NodeForecast, NodeResult, SearchCost
from forecast_harness.search.history.events import Forecasted, NodeForecastRequest
from forecast_harness.search.interfaces import Forecaster

MODEL_ERROR_SD = 0.5
"""Standard deviation (log2) of a model's own error, on top of the spread that it states."""
MAX_SHOWN_RESULTS = 6
"""Results that are shown: the fastest, and failures."""
_TIMEOUT_S = 300.0
_MIN_LABEL_MASS = 0.2
"""Of the probability that must lie on the labels: a smaller one means the question was not understood."""
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
        asked = question_prompt(question)
        try:
            answer = self._backend.forecast(asked.prefix, asked.suffixes, asked.labels, timeout_s=_TIMEOUT_S)
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
            told = "; ".join(answer.trouble) or "too little probability on the labels"
            problem = f"{int((~heard).sum())} of {len(heard)} not forecast by {self._backend.name}: {told}"
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
    told = [Neighbour(_node_title(n), s - score) for n, _, s in ran[: MAX_SHOWN_RESULTS - 2]]
    return told + [Neighbour(_node_title(n), None) for n, _, _ in failed[-2:]]


def _node_title(node: Node) -> str:
    return " ".join((node.provenance.note or node.arm or node.id).split())[:160]


def _shown_change(reference: Node, node: Node) -> str:
    return variant_text(reference.source, node.source, f"by {_node_title(node)}")


def _task_summary(statement: str) -> str:
    """What a statement says before its rules, in a line."""
    told = statement.partition("\nRules for a source:")[0]
    return " ".join(told.split())[:1500]


def _normalized_rows(answer: BackendResponse) -> Array:
    """Probabilities whose rows sum to 1; rows without an answer are even, and not used."""
    rows = np.asarray(answer.probabilities, float)
    total = rows.sum(axis=1, keepdims=True)
    return np.asarray(np.where(total > 0.5, rows / np.maximum(total, 1e-9), 1.0 / rows.shape[1]))


def _logit(p: float) -> float:
    p = min(max(p, 1e-3), 1.0 - 1e-3)
    return math.log(p / (1.0 - p))
