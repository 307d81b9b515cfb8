"""Forecasts learnt from a search's own results: children are like their parents, alike changes act alike.

log2(time) = parent's + what such a change did elsewhere + what such sources are like. A Gaussian process over
the second and third, whose scales are weighed anew for every question; works for any language. P(fail) comes
from results of the same arm, and of similar changes. A pure function of the question.

Sources are read as numbers for any language: what they hold, and what was changed against their parents. Nothing is
parsed beyond tokens, nothing is run. Token n-grams are hashed to a fixed width (Weinberger et al. 2009) with a stable
hash, so that equal texts give equal numbers in every process.

The few scales of the process are weighed by their evidence on a grid (Rasmussen and Williams, Gaussian Processes for
Machine Learning, 2006: equations 2.22-2.24 for predictions, 2.30 for the evidence, 5.3-5.4 for weighing scales and
5.10-5.12 for leave-one-out residuals). A dozen results tell scales badly: the likeliest alone would be far too sure of
itself.
"""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from forecast_autotune.records import Outcome
from forecast_autotune.surrogates.protocol import Array
from forecast_autotune.variants.records import Origin
from forecast_harness.records import Node, NodeForecast
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
        each = [(weight, *fitted.predict(cross, prior)) for weight, fitted in self.parts]
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
    fitted: list[FittedProcess] = []
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
        fitted.append(FittedProcess(variances, inverse, weights, evidence, min(max(stretch, 0.7), 3.0)))
    if not fitted:
        raise ValueError("the grid needs at least one variance for every part")
    fitted.sort(key=lambda one: -one.evidence)
    likely = [math.exp(one.evidence - fitted[0].evidence) for one in fitted]
    kept = [(share, one) for share, one in zip(likely, fitted, strict=True) if share > _MIN_RELATIVE_EVIDENCE]
    total = sum(share for share, _ in kept)
    return ProcessMixture([(share / total, one) for share, one in kept])


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
    seen = Counter(tokens)
    numbers = [float(t) for t in tokens if _NUMBER_PATTERN.match(t)]
    large = [math.log2(v) for v in numbers if 2 <= v < math.inf]
    sizes = (sum(large), max(large, default=0.0), float(len(large)))
    return (math.log2(1 + len(tokens)), *sizes, *(math.log2(1 + seen[w]) for w in _COUNTED_WORDS))


def source_embedding(node: Node) -> Array:
    """Hashed n-grams of a source, [WIDTH], of length 1: what two sources have in common is their product."""
    vector = np.zeros(HASH_WIDTH)
    for place, count in ngram_counts(node.language, node.source):
        vector[place] = math.copysign(math.log1p(abs(count)), count)
    return _normalized(vector)


def edit_embedding(node: Node, parent: Node | None) -> Array:
    """The change, [3 WIDTH]: the signed difference of n-grams, words about the change, and its parts.

    The words are the arm, the author and the note of the provenance; they and the difference are of length 1.
    The parts are the rewrites that a mechanical author names, joined by `+`: what they do adds up, so each
    counts 1 however many there are. Zeros for a node without a parent.
    """
    if parent is None:
        return np.zeros(3 * HASH_WIDTH)
    change = np.zeros(HASH_WIDTH)
    for sign, one in ((1.0, node), (-1.0, parent)):
        for place, count in ngram_counts(one.language, one.source):
            change[place] += sign * count
    origin = node.provenance
    parts = origin.author.split("+") if origin.origin is Origin.REWRITE and origin.author else []
    by = [] if parts else [f"author {origin.author}"]
    words = _normalized(_hashed_words([f"arm {node.arm}", *by, *_note_words(origin.note)]))
    return np.concatenate(
        [_normalized(np.sign(change) * np.log1p(np.abs(change))), words, _hashed_words(parts)]
    )


def static_features(nodes: Sequence[tuple[Node, Node | None]]) -> Array:
    """Counts of each source and their differences against its parent's, [n, 2 counts]."""
    rows = []
    for node, parent in nodes:
        own = np.array(token_statistics(node.language, node.source))
        before = own if parent is None else np.array(token_statistics(parent.language, parent.source))
        rows.append(np.concatenate([own, own - before]))
    return np.array(rows).reshape(len(rows), -1)


def _note_words(note: str) -> list[str]:
    return [f"note {w}" for w in re.findall(r"[a-z_]+|\d+", note.lower())[:24]]


def _hashed_words(words: Iterable[str]) -> Array:
    vector = np.zeros(HASH_WIDTH)
    for word in words:
        code = zlib.crc32(word.encode())
        vector[code % HASH_WIDTH] += 1.0 if code >> 31 else -1.0
    return vector


def _normalized(vector: Array) -> Array:
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
    """See the module."""

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
        known = {n.id: n for n, _, _ in question.judged} | {n.id: n for n in question.nodes}
        known |= {question.reference.id: question.reference}
        scores = {n.id: score for n, _, score in results}
        features = NodeFeatures.of(question.nodes, known, scores)
        before = features.parents + np.array([corrections.get(n.id, 0.0) for n in question.nodes])
        derived = [n for n, _, _ in results if n.parents]
        if len(results) < MIN_RESULTS or not derived:
            wide = np.full(len(before), UNINFORMED_SD)
            reason = f"{len(results)} results of {MIN_RESULTS} that are needed"
            return ScorePosterior(before, wide, np.zeros(len(before)), reason)
        rows = [(n, j, s) for n, j, s in results if n.parents]
        views = NodeFeatures.of([n for n, _, _ in rows], known, scores)
        mean = views.parents + np.array([corrections.get(n.id, 0.0) for n, _, _ in rows])
        targets = _compress_slowdowns(np.array([s for _, _, s in rows]) - mean)
        noise = np.array([_NOISE_SD**2 + j.sd**2 for _, j, _ in rows])
        scale = _column_scale(np.concatenate([views.static_features, features.static_features]))
        fitted = fit_mixture(_covariance_parts(views, views, scale), targets, noise, _VARIANCE_GRID)
        cross = _covariance_parts(features, views, scale)
        shift, sd = fitted.predict(cross, _prior_variances(features))
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
    known = {n.id: n for n, _, _ in question.judged} | {question.reference.id: question.reference}
    failed = np.array([float(j.log2_ratio is None) for _, j in rows])
    overall = (failed.sum() + 0.1 * _PRIOR_FAIL) / (len(rows) + _PRIOR_FAIL)
    if not rows:
        return np.full(len(question.nodes), overall)
    before = np.array([_unit_edit(n, known) for n, _ in rows])
    probabilities = []
    for node in question.nodes:
        alike = np.maximum(before @ _unit_edit(node, known), 0.0) ** 2
        same = np.array([float(n.arm == node.arm) for n, _ in rows])
        weight = _SURE_OF_ARM * same + _SURE_OF_LIKE * alike
        probabilities.append((_PRIOR_FAIL * overall + weight @ failed) / (_PRIOR_FAIL + weight.sum()))
    return np.maximum(probabilities, _LEAST_FAIL)


def _unit_edit(node: Node, known: Mapping[str, Node]) -> Array:
    change = edit_embedding(node, known.get(node.parents[0]) if node.parents else None)
    return change / max(1e-9, float(np.linalg.norm(change)))


def _ancestor_score(node: Node, known: Mapping[str, Node], scores: Mapping[str, float]) -> float:
    """Score of the nearest ancestor that ran, along first parents; 0, the seed's, where none did."""
    seen = {node.id}
    while node.parents and node.parents[0] not in seen:
        above = node.parents[0]
        if above in scores:
            return scores[above]
        if above not in known:
            break
        node = known[above]
        seen.add(above)
    return 0.0


def _compress_slowdowns(differences: Array) -> Array:
    over = differences - KNEE
    return np.where(over > 0, KNEE + BEYOND * over, differences)


def _column_scale(statics: Array) -> Array:
    """Spread of every column, 1 where there is none."""
    spread = statics.std(axis=0)
    return np.where(spread > 1e-9, spread, 1.0)


def _covariance_parts(a: NodeFeatures, b: NodeFeatures, scale: Array) -> dict[str, Array]:
    """Covariances at scale 1 between two sets of nodes, [len(a), len(b)] each."""
    left, right = a.static_features / scale, b.static_features / scale
    apart = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :] - 2 * left @ right.T
    alike = np.clip(a.source_embeddings @ b.source_embeddings.T, -1.0, 1.0)
    return {
        "level": np.ones((len(left), len(right))),
        "slope": np.outer(a.parents, b.parents),
        "edit": a.edit_embeddings @ b.edit_embeddings.T,
        # Squared distance of unit vectors; sources of one family are all alike, so the length is short.
        "whole": np.exp(-(2.0 - 2.0 * alike) / (2 * 0.3**2)),
        "static": np.exp(-np.maximum(apart, 0.0) / (2.0 * left.shape[1])),
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
    own, theirs = _prior_variances(a), _prior_variances(b)
    joint = sum((cross[name] for name in _SIMILARITY_PARTS), np.zeros(1))
    alone = sum((own[name] for name in _SIMILARITY_PARTS), np.zeros(1))
    others = sum((theirs[name] for name in _SIMILARITY_PARTS), np.zeros(1))
    return np.asarray((joint / np.sqrt(np.outer(alone, others))).max(axis=1))
