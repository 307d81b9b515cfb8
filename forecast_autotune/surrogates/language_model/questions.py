"""A query to a surrogate -> a question to a language model: which facts, which neighbours, which reference.

A pure function of its arguments. The suffix of a candidate holds its config, the facts of the cost formula and
another surrogate's guess, some 50 tokens; the prefix holds a reference to compare with and a handful of known
results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.argument_sizes import tensor_bytes
from forecast_autotune.features.devices import device_spec
from forecast_autotune.llm.prompt import (
    Neighbour,
    ProblemDescription,
    Prompt,
    ReferenceTime,
    forecast_prompt,
    guess_text,
    shown,
    sizes_text,
    variant_text,
    work_text,
)
from forecast_autotune.records import Candidate, Measurement, Problem
from forecast_autotune.records.table import latest_labels
from forecast_autotune.surrogates.prior import Prior, formula_prior
from forecast_autotune.surrogates.protocol import Query

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

MAX_CANDIDATES = 256
"""Most candidates of a question; of more, the best by the best estimate without the model."""
_MAX_FAILURE_PROBABILITY = 0.9
"""A candidate that fails with at least this probability by the formula is in no question."""
_GUESSED_FAILURE_PROBABILITY = 0.5
"""A candidate that fails with at least this probability by the formula is guessed to fail."""
MAX_OWN_TIMED, MAX_OWN_FAILED = 6, 2
"""Own results shown at the most, of either kind."""
MAX_RELATIVES = 2
"""Most other problems of the kernel that are shown."""
MAX_RELATIVE_TIMED, MAX_RELATIVE_FAILED = 4, 1
"""Most results shown of another problem, timed and failed."""
_TIE = 1e-6
_FLOOR_MS = 0.003


@dataclass(frozen=True)
class ForecastQuestion:
    """A prompt, with its rows and its reference."""

    prompt: Prompt
    rows: Rows
    """Rows of the query's candidates, one per suffix, ascending."""
    reference: int | None
    """Row that times are compared with; None: a measured candidate that is not in the list."""
    against: str
    """`Candidate.id` of the reference."""
    log2_ms: float
    """The reference's time, measured or estimated."""
    measured: bool

    def ratios(self, log2_ms: Array) -> Array:
        """log2(time / reference time) of the rows asked about, [len(rows)], for training and scoring.

        `log2_ms` [n] are the true times of all candidates, NaN for failures. An estimated reference counts
        with its true time if it ran: an error in a problem's level would shift all its labels alike.
        """
        true = math.nan if self.reference is None else float(log2_ms[self.reference])
        level = self.log2_ms if self.measured or math.isnan(true) else true
        return np.asarray(log2_ms[self.rows] - level)


def build_question(
    query: Query,
    before: Prior,
    believed: Array,
    *,
    own: bool = True,
    most: int = MAX_CANDIDATES,
    among: Rows | None = None,
) -> ForecastQuestion:
    """Ask for the bins of the candidates that may be fast.

    `before` is the formula's belief (its facts are shown), `believed` [n] the best estimate of log2
    milliseconds without a language model: it picks the reference where nothing was measured, and the
    candidates where there are more than `most`; every candidate is shown with its guess. Without `own`, this
    problem's own measurements are left out: a process updates the answer by them afterwards. `among` asks about
    these rows only.
    """
    labels = list(latest_labels(query.measured).values()) if own else []
    candidate, row, log2_ms, is_measured = _choose_reference(query, believed, before, labels)
    reference = ReferenceTime(log2_ms, shown(candidate), is_measured)
    rows = select_candidates(before, believed, most) if among is None else np.sort(among)
    facts = _candidate_facts(query, before, row)
    texts = [_candidate_text(query, int(i), facts) for i in rows]
    if np.ptp(believed) > 0:  # else nothing is believed of any candidate
        texts = [
            f"{t}\n{_guess_text(before, believed, row, int(i))}" for t, i in zip(texts, rows, strict=True)
        ]
    near = [*_own_results(labels, reference), *_relative_results(query)]
    total_bytes = sum(map(tensor_bytes, query.problem.arguments))
    subject = ProblemDescription(query.problem, work=work_text(_flops(query, before), total_bytes))
    prompt = forecast_prompt(subject, texts, reference, near)
    return ForecastQuestion(prompt, rows, row, candidate.id, log2_ms, is_measured)


def build_formula_question(query: Query, *, among: Rows, believed: Array) -> ForecastQuestion:
    """`build_question` with the facts of the cost formula alone, without own results.

    `believed` [n] are the guesses, log2 milliseconds. A model must be asked as it was trained: by guesses of a
    surrogate that had seen nothing of the kernel's family.
    """
    plain = formula_prior(query.problem, query.candidates, query.grids, query.ttir)
    return build_question(query, plain, believed, own=False, among=among)


def _choose_reference(
    query: Query, guess: Array, before: Prior, labels: Sequence[Measurement]
) -> tuple[Candidate, int | None, float, bool]:
    """(candidate to compare with, its row if it is in the list, its log2 milliseconds, whether measured)."""
    timings = [m for m in labels if m.ok]
    if timings:
        best = min(timings, key=lambda m: (m.ms, m.candidate.id))
        row = next((i for i, c in enumerate(query.candidates) if c == best.candidate), None)
        return best.candidate, row, math.log2(best.ms), True
    cost = guess + 6.0 * before.p_fail
    ties = np.flatnonzero(cost <= cost.min() + _TIE)
    # By id, not by row: equal questions must get equal answers.
    row = min(map(int, ties), key=lambda i: query.candidates[i].id)
    log2_ms = float(guess[row]) if before.informed else _memory_bound_log2_ms(query.problem)
    return query.candidates[row], row, log2_ms, False


def _memory_bound_log2_ms(problem: Problem) -> float:
    """log2 milliseconds of moving every tensor once, where nothing better is known."""
    total_bytes = sum(map(tensor_bytes, problem.arguments))
    return math.log2(max(total_bytes / (device_spec(problem.device).memory_gb_s * 1e6), _FLOOR_MS))


def select_candidates(before: Prior, believed: Array, most: int = MAX_CANDIDATES) -> Rows:
    """Rows of the candidates that are not hopeless; of more than `most`, the fastest by `believed`."""
    fit = np.flatnonzero(before.p_fail < _MAX_FAILURE_PROBABILITY)
    rows = fit if len(fit) else np.arange(len(believed))
    if len(rows) > most:
        rows = rows[np.argsort(believed[rows], kind="stable")[:most]]
    return np.sort(rows).astype(np.intp)


def _candidate_text(query: Query, row: int, facts: Sequence[Mapping[str, float]]) -> str:
    candidate = query.candidates[row]
    text = shown(candidate, facts[row] if facts else None)
    source = query.sources.get(candidate.variant)
    if source is None or candidate.variant == "base":
        return text
    return variant_text(query.problem.kernel.source, source, text)


def _guess_text(before: Prior, guess: Array, reference: int | None, row: int) -> str:
    level = float(guess.min() if reference is None else guess[reference])
    return guess_text(
        None if before.p_fail[row] >= _GUESSED_FAILURE_PROBABILITY else float(guess[row]) - level
    )


def _candidate_facts(query: Query, before: Prior, reference: int | None) -> list[dict[str, float]]:
    """Facts of the cost formula per candidate; empty where there is no IR."""
    cost = before.costs
    if cost is None:
        return []
    base = float(cost.total_ms.min()) if reference is None else float(cost.total_ms[reference])
    columns = {
        # Against the reference, as the answer is to be.
        "formula": cost.total_ms / base,
        # Shares of the whole in percent: they may add up to more, as units overlap.
        "mem": _percent(cost.memory_ms, cost.total_ms),
        "dot": _percent(cost.dot_ms, cost.total_ms),
        "alu": _percent(cost.alu_ms, cost.total_ms),
        "lat": _percent(cost.latency_ms, cost.total_ms),
        # Beyond hundreds of them, the last one's filling does not matter.
        "waves": np.minimum(cost.waves, 999.0),
        "occ": cost.occupancy,
        "smemKB": np.round(cost.shared_bytes / 1024.0),
        "regs": np.minimum(np.round(cost.registers), 999.0),
    }
    # A column of zeros says nothing; every token counts.
    informative = {name: values for name, values in columns.items() if values.any()}
    return [
        {name: float(values[i]) for name, values in informative.items()} for i in range(len(query.candidates))
    ]


def _percent(part: Array, whole: Array) -> Array:
    return np.asarray(np.round(100.0 * part / whole))


def _flops(query: Query, before: Prior) -> float:
    """FLOPs of all dots of one launch: the median over the candidates."""
    if before.facts is None or before.costs is None:
        return 0.0
    programs = before.costs.waves * before.costs.occupancy * device_spec(query.problem.device).multiprocessors
    return float(np.median(before.facts["dot_flops"] * programs))


def _own_results(labels: Sequence[Measurement], reference: ReferenceTime) -> list[Neighbour]:
    timings = sorted((m for m in labels if m.ok), key=lambda m: (m.ms, m.candidate.id))
    failures = sorted((m for m in labels if not m.ok), key=lambda m: m.candidate.id)
    # The fastest is the reference itself.
    data = [
        Neighbour(shown(m.candidate), math.log2(m.ms) - reference.log2_ms)
        for m in _evenly_spaced(timings[1:], MAX_OWN_TIMED)
    ]
    return data + [Neighbour(shown(m.candidate), None) for m in _evenly_spaced(failures, MAX_OWN_FAILED)]


def _relative_results(query: Query) -> list[Neighbour]:
    """Results at the kernel's other problems, nearest first; each against the fastest there."""
    neighbours: list[Neighbour] = []
    for relative in list(query.relatives)[:MAX_RELATIVES]:
        rows = relative.labels.values()
        timings = sorted((m for m in rows if m.ok), key=lambda m: (m.ms, m.candidate.id))
        if not timings:
            continue
        where = sizes_text(relative.problem)
        if relative.problem.device.slug != query.problem.device.slug:
            where += f" on {relative.problem.device.name}"
        best = math.log2(timings[0].ms)
        neighbours += [
            Neighbour(shown(m.candidate), math.log2(m.ms) - best, where)
            for m in _evenly_spaced(timings, MAX_RELATIVE_TIMED)
        ]
        failures = sorted((m for m in rows if not m.ok), key=lambda m: m.candidate.id)
        neighbours += [
            Neighbour(shown(m.candidate), None, where) for m in _evenly_spaced(failures, MAX_RELATIVE_FAILED)
        ]
    return neighbours


def _evenly_spaced(rows: Sequence[Measurement], count: int) -> list[Measurement]:
    """`count` of the rows from first to last, evenly."""
    if not rows:
        return []
    places = np.unique(np.round(np.linspace(0, len(rows) - 1, min(count, len(rows))))).astype(int)
    return [rows[i] for i in places]
