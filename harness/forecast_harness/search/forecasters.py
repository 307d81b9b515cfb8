"""Forecasts of whole sources before they run: learnt in the search, read in IR, by language models."""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
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
from forecast_autotune.records import Device, Kernel, Outcome, Problem
from forecast_autotune.surrogates.protocol import Array
from forecast_autotune.variants.records import Origin
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
from forecast_harness.targets.novelty import source_tokens

_JITTER = 1e-8
_MIN_RELATIVE_EVIDENCE = 0.01
"""Evidence against the best's below which scales are left out."""


@dataclass(frozen=True)
class FittedProcess:
    """A posterior: values at training points were `targets` with independent `noise`."""

    variances: Mapping[str, float]
    """Variances of every part of the covariance."""
    inverse: Array
    """Inverse of the training covariance with its noise, [n, n]."""
    weights: Array
    """Inverse times targets, [n]."""
    evidence: float
    """Natural log of the marginal likelihood, without its constant."""
    sd_scale: float
    """Factor of standard deviations: how far leave-one-out residuals lay off, in their own."""

    def predict(self, cross: Mapping[str, Array], prior: Mapping[str, Array]) -> tuple[Array, Array]:
        """Mean and standard deviation at m points, [m] each, without the noise of a measurement.

        `cross`: each part between them and the training points, [m, n]; `prior`: each part's own variance at
        scale 1, [m].
        """
        joint = sum((v * cross[name] for name, v in self.variances.items()), np.zeros(1))
        own = sum((v * prior[name] for name, v in self.variances.items()), np.zeros(1))
        mean = joint @ self.weights
        variance = own - ((joint @ self.inverse) * joint).sum(axis=1)
        return mean, self.sd_scale * np.sqrt(np.maximum(variance, _JITTER))


@dataclass(frozen=True)
class ProcessMixture:
    """Posteriors under several scales, with weights that add up to 1, the heaviest first."""

    parts: Sequence[tuple[float, FittedProcess]]

    def predict(self, cross: Mapping[str, Array], prior: Mapping[str, Array]) -> tuple[Array, Array]:
        """As `FittedProcess.predict`: mean and standard deviation of the mixture, [m] each."""
        each = [(weight, *process.predict(cross, prior)) for weight, process in self.parts]
        mean = sum((w * m for w, m, _ in each), np.zeros(1))
        second = sum((w * (sd**2 + m**2) for w, m, sd in each), np.zeros(1))
        return mean, np.sqrt(np.maximum(second - mean**2, _JITTER))


def fit_mixture(
    parts: Mapping[str, Array],
    targets: Array,
    noise: Array,
    grid: Mapping[str, Sequence[float]],
) -> ProcessMixture:
    """Posteriors under the variances of the grid, each weighed by how well it explains the targets.

    `parts`: covariances at scale 1 by name, [n, n]; `noise`: variances, [n]; `grid`: the variances to try,
    by the same names; all are as likely before. Raises `ValueError` for an empty grid.
    """
    processes: list[FittedProcess] = []
    names = list(parts)
    for values in itertools.product(*(grid[name] for name in names)):
        variances = dict(zip(names, values, strict=True))
        covariance = sum((v * parts[name] for name, v in variances.items()), np.zeros(1))
        covariance = covariance + np.diag(noise + _JITTER)
        root = np.linalg.cholesky(covariance)
        half = np.linalg.solve(root, np.eye(len(targets)))
        inverse = half.T @ half
        weights = inverse @ targets
        evidence = -0.5 * float(targets @ weights) - float(np.log(np.diag(root)).sum())
        # Equations 5.10-5.12: the residual of each point under all others, and its variance.
        off = weights**2 / np.diag(inverse)
        stretch = math.sqrt((float(off.sum()) + 4.0) / (len(targets) + 4.0))
        processes.append(FittedProcess(variances, inverse, weights, evidence, min(max(stretch, 0.7), 3.0)))
    if not processes:
        raise ValueError("the grid needs at least one variance for every part")
    processes.sort(key=lambda p: -p.evidence)
    ratios = [math.exp(p.evidence - processes[0].evidence) for p in processes]
    mixture = [(w, p) for w, p in zip(ratios, processes, strict=True) if w > _MIN_RELATIVE_EVIDENCE]
    total = sum(w for w, _ in mixture)
    return ProcessMixture([(w / total, p) for w, p in mixture])


# --- sources as numbers ---


HASH_WIDTH = 384
"""Hashed coordinates of n-grams."""
_NGRAM_LENGTHS = (1, 2, 3)
_COUNTED_WORDS = (
    *("for", "while", "if", "load", "store", "dot", "exp", "sum", "max", "empty", "zeros", "clone", "copy_"),
    *("contiguous", "to", "float", "view", "reshape", "transpose", "matmul", "einsum", "compile", "out"),
    *("atomic_add", "num_warps", "num_stages", "static_range", "range", "eviction_policy", "cache_modifier"),
)
"""Words whose numbers say something about speed in torch, Triton or CUDA."""
_NUMBER_PATTERN = re.compile(r"^\d+(\.\d*)?(e[+-]?\d+)?$", re.IGNORECASE)


@lru_cache(maxsize=8192)
def ngram_counts(language: str, source: str) -> tuple[tuple[int, float], ...]:
    """Hashed counts of token n-grams, (coordinate, count) in order; signs keep collisions from adding up."""
    tokens = source_tokens(language, source)
    counts: Counter[int] = Counter()
    for n in _NGRAM_LENGTHS:
        for start in range(len(tokens) - n + 1):
            code = zlib.crc32("\0".join(tokens[start : start + n]).encode("utf-8", "replace"))
            counts[code % HASH_WIDTH] += 1 if code >> 31 else -1
    return tuple(sorted((k, float(v)) for k, v in counts.items() if v))


@lru_cache(maxsize=8192)
def token_statistics(language: str, source: str) -> tuple[float, ...]:
    """Logarithms of how long a source is, how often it uses telling words, and how large its numbers are."""
    tokens = source_tokens(language, source)
    counts = Counter(tokens)
    numbers = [float(t) for t in tokens if _NUMBER_PATTERN.match(t)]
    large = [math.log2(v) for v in numbers if 2 <= v < math.inf]
    sizes = (sum(large), max(large, default=0.0), float(len(large)))
    return (math.log2(1 + len(tokens)), *sizes, *(math.log2(1 + counts[w]) for w in _COUNTED_WORDS))


def source_embedding(node: Node) -> Array:
    """Hashed n-grams of a source, [WIDTH], of length 1: the product of two is their similarity."""
    vector = np.zeros(HASH_WIDTH)
    for place, count in ngram_counts(node.language, node.source):
        vector[place] = math.copysign(math.log1p(abs(count)), count)
    return _normalize(vector)


def edit_embedding(node: Node, parent: Node | None) -> Array:
    """The change, [3 WIDTH]: the signed difference of n-grams, words about the change, and its parts.

    The words are the arm, the author and the note of the provenance; they and the difference are of length 1.
    The parts are the rewrites that a mechanical author names, joined by `+`: their effects add up, so each
    counts 1 however many there are. Zeros for a node without a parent.
    """
    if parent is None:
        return np.zeros(3 * HASH_WIDTH)
    change = np.zeros(HASH_WIDTH)
    for sign, side in ((1.0, node), (-1.0, parent)):
        for place, count in ngram_counts(side.language, side.source):
            change[place] += sign * count
    origin = node.provenance
    parts = origin.author.split("+") if origin.origin is Origin.REWRITE and origin.author else []
    authors = [] if parts else [f"author {origin.author}"]
    notes = [f"note {w}" for w in re.findall(r"[a-z_]+|\d+", origin.note.lower())[:24]]
    words = _normalize(_hashed_words([f"arm {node.arm}", *authors, *notes]))
    return np.concatenate(
        [_normalize(np.sign(change) * np.log1p(np.abs(change))), words, _hashed_words(parts)]
    )


def static_features(nodes: Sequence[tuple[Node, Node | None]]) -> Array:
    """Counts of each source and their differences against its parent's, [n, 2 counts]."""
    rows = []
    for node, parent in nodes:
        own = np.array(token_statistics(node.language, node.source))
        before = own if parent is None else np.array(token_statistics(parent.language, parent.source))
        rows.append(np.concatenate([own, own - before]))
    return np.array(rows).reshape(len(rows), -1)


def _hashed_words(words: Iterable[str]) -> Array:
    vector = np.zeros(HASH_WIDTH)
    for word in words:
        code = zlib.crc32(word.encode())
        vector[code % HASH_WIDTH] += 1.0 if code >> 31 else -1.0
    return vector


def _normalize(vector: Array) -> Array:
    size = float(np.linalg.norm(vector))
    return vector / size if size > 0 else vector


# --- the forecaster ---


MIN_RESULTS = 3
"""Results that ran before anything is said, and of which one at least must have a parent."""
MIN_CORRELATION = 0.1
"""Correlation below which a node is unlike everything measured."""
UNINFORMED_SD = 0.7
"""Spread (log2) where nothing is known but the parent's score."""
KNEE, BEYOND = 1.0, 0.25
"""A child more than twice as slow as its parent counts for less than that: how slow does not matter."""
_NOISE_SD = 0.02
_VARIANCE_GRID: Mapping[str, Sequence[float]] = {
    "level": (0.01, 0.09),
    "slope": (0.04,),
    "edit": (0.003, 0.03, 0.15, 0.6),
    "whole": (0.001, 0.02, 0.2),
    "static": (0.001, 0.02, 0.2),
}
"""Variances in squared log2 units."""
_SIMILARITY_PARTS = ("edit", "whole")
_MAX_RESULTS = 256
"""Results that are looked at: all of few, the latest of many."""
_SURE_OF_ARM, _SURE_OF_LIKE, _PRIOR_FAIL, _LEAST_FAIL = 1.5, 8.0, 2.0, 0.01


@dataclass(frozen=True)
class NodeFeatures:
    """Features of n nodes that the covariance rests on; rows are nodes."""

    edit_embeddings: Array
    source_embeddings: Array
    static_features: Array
    parents: Array
    """Scores of their nearest scored ancestors, [n]."""

    @classmethod
    def of(
        cls, nodes: Sequence[Node], known: Mapping[str, Node], scores: Mapping[str, float]
    ) -> NodeFeatures:
        """`known`: every node that may be a parent; `scores`: log2 of those that ran."""
        firsts = [known.get(n.parents[0]) if n.parents else None for n in nodes]
        pairs = list(zip(nodes, firsts, strict=True))
        return cls(
            np.array([edit_embedding(n, p) for n, p in pairs]).reshape(len(nodes), 3 * HASH_WIDTH),
            np.array([source_embedding(n) for n in nodes]).reshape(len(nodes), HASH_WIDTH),
            static_features(pairs),
            np.array([_ancestor_score(n, known, scores) for n in nodes]),
        )


@dataclass(frozen=True)
class ScorePosterior:
    """Scores (log2 time against the first seed) of n nodes, [n] each."""

    mean: Array
    sd: Array
    nearest_correlation: Array
    """Correlation with the most alike result; 0 far from everything."""
    reason: str = ""
    """Why nothing is said; then `mean` is the parent's score and `sd` wide."""


class LineageForecaster:
    """Learns from the search's own results: a Gaussian process over sources and their changes."""

    name = "lineage-3"

    def forecast(self, question: NodeForecastRequest) -> Forecasted:
        """Beliefs about every node; those far from all results, and all before `MIN_RESULTS` results, abstain."""
        posterior = self.posterior(question)
        fails = failure_probabilities(question)
        return relative_forecasts(question, posterior, fails, self.name)

    def posterior(
        self, question: NodeForecastRequest, offsets: Mapping[str, float] | None = None
    ) -> ScorePosterior:
        """The posterior of the question's nodes.

        `offsets` corrects what is expected of a node (log2, by id) before anything was learnt: another
        surrogate's word on how it differs from its parent. Results then teach how far off that is.
        """
        corrections = offsets or {}
        results = [r for r in question.judged if r[1].log2_ratio is not None][-_MAX_RESULTS:]
        nodes = question.nodes_by_id()
        scores = {n.id: score for n, _, score in results}
        features = NodeFeatures.of(question.nodes, nodes, scores)
        before = features.parents + np.array([corrections.get(n.id, 0.0) for n in question.nodes])
        rows = [(n, j, s) for n, j, s in results if n.parents]
        if len(results) < MIN_RESULTS or not rows:
            wide = np.full(len(before), UNINFORMED_SD)
            reason = f"{len(results)} results of {MIN_RESULTS} that are needed"
            return ScorePosterior(before, wide, np.zeros(len(before)), reason)
        views = NodeFeatures.of([n for n, _, _ in rows], nodes, scores)
        mean = views.parents + np.array([corrections.get(n.id, 0.0) for n, _, _ in rows])
        targets = np.array([s for _, _, s in rows]) - mean
        targets = np.where(targets > KNEE, KNEE + BEYOND * (targets - KNEE), targets)
        noise = np.array([_NOISE_SD**2 + j.sd**2 for _, j, _ in rows])
        spread = np.concatenate([views.static_features, features.static_features]).std(axis=0)
        scale = np.where(spread > 1e-9, spread, 1.0)
        mixture = fit_mixture(_covariance_parts(views, views, scale), targets, noise, _VARIANCE_GRID)
        cross = _covariance_parts(features, views, scale)
        shift, sd = mixture.predict(cross, _prior_variances(features))
        return ScorePosterior(before + shift, sd, _nearest_correlation(features, views, cross))

    def close(self) -> None:
        """Holds nothing."""


def relative_forecasts(
    question: NodeForecastRequest, posterior: ScorePosterior, fails: Array, name: str
) -> Forecasted:
    """Beliefs relative to the question's reference. Where the posterior gives a reason, all abstain."""
    scores = {n.id: s for n, j, s in question.judged if j.log2_ratio is not None}
    base = scores.get(question.reference.id, 0.0)
    beliefs: dict[str, NodeForecast] = {}
    for i, node in enumerate(question.nodes):
        mean, sd, p_fail = float(posterior.mean[i]) - base, float(posterior.sd[i]), float(fails[i])
        far = float(posterior.nearest_correlation[i]) < MIN_CORRELATION
        sd = max(sd, UNINFORMED_SD) if far else sd
        note = posterior.reason or ("unlike everything measured" if far else name)
        better = (1.0 - p_fail) * 0.5 * math.erfc(mean / (sd * math.sqrt(2.0)))
        # Rounded: linear algebra differs in the last digits between processors and numbers of threads.
        mean, sd, p_fail, better = (round(v, 6) for v in (mean, sd, p_fail, better))
        beliefs[node.id] = NodeForecast(mean, sd, p_fail, better, bool(posterior.reason) or far, note)
    return Forecasted(question.batch, question.reference.id, beliefs)


def failure_probabilities(question: NodeForecastRequest) -> Array:
    """P(fails) of every node, [n]: the share of failures, of the same arm and of alike changes above all.

    A smoothed mean over results, weighed by whether they are of the arm and by the squared cosine of the
    edits. A failure of the harness itself is no result.
    """
    rows = [(n, j) for n, j, _ in question.judged if j.outcome is not Outcome.INFRASTRUCTURE and n.parents]
    nodes = {n.id: n for n, _, _ in question.judged} | {question.reference.id: question.reference}
    failed = np.array([float(j.log2_ratio is None) for _, j in rows])
    overall = (failed.sum() + 0.1 * _PRIOR_FAIL) / (len(rows) + _PRIOR_FAIL)
    if not rows:
        return np.full(len(question.nodes), overall)
    before = np.array([_unit_edit(n, nodes) for n, _ in rows])
    probabilities = []
    for node in question.nodes:
        similarity = np.maximum(before @ _unit_edit(node, nodes), 0.0) ** 2
        same_arm = np.array([float(n.arm == node.arm) for n, _ in rows])
        weight = _SURE_OF_ARM * same_arm + _SURE_OF_LIKE * similarity
        probabilities.append((_PRIOR_FAIL * overall + weight @ failed) / (_PRIOR_FAIL + weight.sum()))
    return np.maximum(probabilities, _LEAST_FAIL)


def _unit_edit(node: Node, known: Mapping[str, Node]) -> Array:
    change = edit_embedding(node, known.get(node.parents[0]) if node.parents else None)
    return change / max(1e-9, float(np.linalg.norm(change)))


def _ancestor_score(node: Node, known: Mapping[str, Node], scores: Mapping[str, float]) -> float:
    """Score of the nearest ancestor that ran, along first parents; 0, the seed's, where none did."""
    ids = {node.id}
    while node.parents and node.parents[0] not in ids:
        parent = node.parents[0]
        if parent in scores:
            return scores[parent]
        if parent not in known:
            break
        node = known[parent]
        ids.add(parent)
    return 0.0


def _covariance_parts(a: NodeFeatures, b: NodeFeatures, scale: Array) -> dict[str, Array]:
    """Covariances at scale 1 between two sets of nodes, [len(a), len(b)] each."""
    left, right = a.static_features / scale, b.static_features / scale
    distances = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :] - 2 * left @ right.T
    cosines = np.clip(a.source_embeddings @ b.source_embeddings.T, -1.0, 1.0)
    return {
        "level": np.ones((len(left), len(right))),
        "slope": np.outer(a.parents, b.parents),
        "edit": a.edit_embeddings @ b.edit_embeddings.T,
        # Squared distance of unit vectors; sources of one family are all alike, so the length is short.
        "whole": np.exp(-(2.0 - 2.0 * cosines) / (2 * 0.3**2)),
        "static": np.exp(-np.maximum(distances, 0.0) / (2.0 * left.shape[1])),
    }


def _prior_variances(a: NodeFeatures) -> dict[str, Array]:
    ones = np.ones(len(a.parents))
    return {
        "level": ones,
        "slope": a.parents**2,
        "edit": (a.edit_embeddings**2).sum(axis=1),
        "whole": ones,
        "static": ones,
    }


def _nearest_correlation(a: NodeFeatures, b: NodeFeatures, cross: Mapping[str, Array]) -> Array:
    """Correlation with the most alike training point, [len(a)], by what nodes are and change alone."""
    variances, training_variances = _prior_variances(a), _prior_variances(b)
    joint = sum((cross[name] for name in _SIMILARITY_PARTS), np.zeros(1))
    totals = sum((variances[name] for name in _SIMILARITY_PARTS), np.zeros(1))
    training_totals = sum((training_variances[name] for name in _SIMILARITY_PARTS), np.zeros(1))
    return np.asarray((joint / np.sqrt(np.outer(totals, training_totals))).max(axis=1))


# --- which forecaster ---


class Forecaster(Protocol):
    """Forecasts nodes without running them."""

    name: str
    """Its name and version, a part of the context."""

    def forecast(self, question: NodeForecastRequest) -> Forecasted:
        """Beliefs about `question.nodes` relative to `question.reference`. Failures are reported, not raised."""
        ...

    def close(self) -> None:
        """Free its resources."""
        ...


def open_forecaster(spec: str, target: SearchTarget) -> Forecaster | None:
    """The forecaster that `spec` names; None for `none`.

    `auto` learns from the search's own results, and adds the shipped surrogate where the target is a Triton kernel.
    `llm:SPEC` blends a language model with that. Raises `SettingsError` for anything else.
    """
    if spec == "none":
        return None
    if spec != "auto" and not spec.startswith("llm:"):
        raise SettingsError(
            f"no forecaster is called {spec!r}; there are auto, none, or llm:SPEC with a model as in "
            "FORECAST_AUTOTUNE_LLM"
        )
    backend = None
    if spec != "auto":
        from forecast_autotune.llm.providers import provider

        backend = provider().backend(spec.removeprefix("llm:"))
    auto = TritonForecaster(target) if target.kind is TargetKind.KERNEL else LineageForecaster()
    return auto if backend is None else LLMNodeForecaster(backend, auto)


UNTESTED_DIFFERENCE_SD = 0.5
"""Spread (log2) of a forecast difference between two sources, before the search has tried any."""
_DIFFERENCE_SHARE = 0.5
"""Share of a forecast difference that is believed before results say more."""


class TritonForecaster:
    """Adds the shipped surrogate's forecasts, made from IR, to the lineage's. A pure function of the question."""

    def __init__(self, target: SearchTarget) -> None:
        """A sandbox traces sources for the shipped surrogate, once they are first asked about."""
        from forecast_harness.trials.configs.variant_tracing import VariantTracer

        self._tracer = VariantTracer(target)
        self._lineage = LineageForecaster()
        self.name = f"traced-1-{self._tracer.version}+{self._lineage.name}"

    def forecast(self, question: NodeForecastRequest) -> Forecasted:
        """Beliefs about every node; one that cannot be traced is left to its lineage."""
        nodes = question.nodes_by_id()
        self._tracer.prepare(list(nodes.values()))
        forecasts = {node.id: self._tracer.best_forecast(node) for node in nodes.values()}
        offsets = {}
        for node in nodes.values():
            parent = forecasts.get(node.parents[0]) if node.parents else None
            own = forecasts[node.id]
            if parent is not None and own is not None:
                offsets[node.id] = _DIFFERENCE_SHARE * (own[0] - parent[0])
        posterior = self._lineage.posterior(question, offsets)
        if posterior.reason and question.nodes:
            # Before the search has results of its own, IR says something where there is any.
            has_offset = np.array([n.id in offsets for n in question.nodes])
            posterior = replace(
                posterior,
                sd=np.where(has_offset, UNTESTED_DIFFERENCE_SD, UNINFORMED_SD),
                nearest_correlation=has_offset.astype(float),
                reason="",
            )
        fails = failure_probabilities(question)
        for i, node in enumerate(question.nodes):
            own = forecasts[node.id]
            if own is not None:
                fails[i] = 1.0 - (1.0 - fails[i]) * (1.0 - own[1])
        return relative_forecasts(question, posterior, fails, self.name)

    def close(self) -> None:
        """End the sandbox that traces."""
        self._tracer.close()


MODEL_ERROR_SD = 0.5
"""Standard deviation (log2) of a model's own error, on top of the spread that it states."""
MAX_SHOWN_RESULTS = 6
"""Results that are shown: the fastest, and failures."""
_TIMEOUT_S = 300.0
_MIN_LABEL_MASS = 0.2
"""Probability that must lie on the labels: a smaller one means the question was not understood."""
_FAIL_WEIGHT = 0.3


class LLMNodeForecaster:
    """Blends a language model's forecasts with those of `base`. Deterministic as far as its backend is."""

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
        return self._blend(question, before, answer)

    def close(self) -> None:
        """Free the model."""
        self._backend.close()
        self._base.close()

    def _blend(
        self, question: NodeForecastRequest, before: Forecasted, answer: BackendResponse
    ) -> Forecasted:
        mean, sd, p_fail = BINS.moments(_normalize_rows(answer))
        valid = answer.answered & (answer.mass >= _MIN_LABEL_MASS)
        beliefs = dict(before.beliefs)
        for i, node in enumerate(question.nodes):
            if valid[i]:
                word = (float(mean[i]), float(sd[i]), float(p_fail[i]))
                beliefs[node.id] = blend_forecast(before.beliefs[node.id], *word)
        usage = answer.usage
        cost = SearchCost(
            wall_seconds=usage.seconds, tokens=usage.prompt_tokens + usage.output_tokens, money=usage.money
        )
        problem = before.problem
        if not valid.all():
            trouble = "; ".join(answer.trouble) or "too little probability on the labels"
            problem = f"{int((~valid).sum())} of {len(valid)} not forecast by {self._backend.name}: {trouble}"
        return Forecasted(question.batch, before.reference, beliefs, before.spent + cost, problem[:500])


def blend_forecast(before: NodeForecast, mean: float, sd: float, p_fail: float) -> NodeForecast:
    """A belief and a model's word on it, weighed by their precisions; the model's with `MODEL_ERROR_SD` added.

    A belief that abstains still does: that the model thinks it knows has not been proved.
    """
    doubt = sd**2 + MODEL_ERROR_SD**2
    precision = 1.0 / before.sd**2 + 1.0 / doubt
    blend = (before.mean / before.sd**2 + mean / doubt) / precision
    spread = math.sqrt(1.0 / precision)
    odds = (1.0 - _FAIL_WEIGHT) * _logit(before.p_fail) + _FAIL_WEIGHT * _logit(p_fail)
    fails = 1.0 / (1.0 + math.exp(-odds))
    better = (1.0 - fails) * 0.5 * math.erfc(blend / (spread * math.sqrt(2.0)))
    note = f"{before.note}{MODEL_NOTE}{mean:+.2f}"
    return NodeForecast(blend, spread, fails, better, before.abstains, note)


def question_prompt(question: NodeForecastRequest) -> Prompt:
    """The question to a model: the incumbent's source and time, results, and the nodes as changes to it."""
    reference, target = question.reference, question.target
    results = {n.id: (n, j, s) for n, j, s in question.judged}
    row = results.get(reference.id)
    seconds = [] if row is None else list(row[1].seconds.values())
    log2_ms = float(np.mean(np.log2(seconds))) + math.log2(1e3) if seconds else 0.0
    score = row[2] if row is not None else 0.0
    name, statement = ("", "") if target is None else (target.name, target.statement)
    kernel = Kernel(name, reference.language, reference.source)
    return forecast_prompt(
        ProblemDescription(Problem("", kernel, (), _device(question)), work=_task_summary(statement)),
        [variant_text(reference.source, n.source, f"by {_node_title(n)}") for n in question.nodes],
        ReferenceTime(log2_ms, "the source above, geometric mean over all workloads", bool(seconds)),
        _neighbours(reference, score, list(results.values())),
    )


def _device(question: NodeForecastRequest) -> Device:
    """The device that the target states; else a CPU, of which no device's figures are shown."""
    if question.target is not None and (device := question.target.payload.get("device")) is not None:
        return Device.from_json(device)
    devices = (j.device for n, j, _ in question.judged if n.id == question.reference.id)
    return Device(next(devices, "") or "unknown", "cpu")


def _neighbours(
    reference: Node, score: float, results: Sequence[tuple[Node, NodeResult, float]]
) -> list[Neighbour]:
    """The fastest of the other results, and the latest failures; each by its note."""
    rest = [r for r in results if r[0].id != reference.id]
    successes = sorted((r for r in rest if r[1].log2_ratio is not None), key=lambda r: (r[2], r[0].id))
    failures = [r for r in rest if r[1].log2_ratio is None]
    fastest = [Neighbour(_node_title(n), s - score) for n, _, s in successes[: MAX_SHOWN_RESULTS - 2]]
    return fastest + [Neighbour(_node_title(n), None) for n, _, _ in failures[-2:]]


def _node_title(node: Node) -> str:
    return " ".join((node.provenance.note or node.arm or node.id).split())[:160]


def _task_summary(statement: str) -> str:
    """The part of a statement before its rules, in a line."""
    summary = statement.partition("\nRules for a source:")[0]
    return " ".join(summary.split())[:1500]


def _normalize_rows(answer: BackendResponse) -> Array:
    """Probabilities whose rows sum to 1; rows without an answer are even, and not used."""
    rows = np.asarray(answer.probabilities, float)
    total = rows.sum(axis=1, keepdims=True)
    return np.asarray(np.where(total > 0.5, rows / np.maximum(total, 1e-9), 1.0 / rows.shape[1]))


def _logit(p: float) -> float:
    p = min(max(p, 1e-3), 1.0 - 1e-3)
    return math.log(p / (1.0 - p))
