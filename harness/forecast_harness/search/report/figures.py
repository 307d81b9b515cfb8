"""A search in the shape in which people read it: nodes, costs, and rows of text."""

from __future__ import annotations

import difflib
import math
import statistics
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log2
from typing import Any

from forecast_autotune.printable import count_text
from forecast_autotune.report.chart import milliseconds, percent, seconds
from forecast_harness.clocks.times import matched_times
from forecast_harness.records import (
    EVIDENCE_TEXTS,
    MODEL_NOTE,
    Node,
    NodeForecast,
    NodeResult,
    Proposed,
    SearchBudget,
    SearchCost,
)
from forecast_harness.search.events import Lost
from forecast_harness.search.state import SearchState
from forecast_harness.verify.verdict import memory_rise

# --- sources, bounded and made safe to look at ---


MAX_CHARACTERS = 3_000_000
"""Characters of all sources in one page together."""
MAX_LINES = 1_500
"""Lines of one source; longer ones are cut, and say so."""
MAX_LINE_CHARACTERS = 4_000
"""Characters of one line."""
_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Categories of characters that are spelled out."""


@dataclass(frozen=True)
class DisplayedSource:
    """A source as it is shown."""

    lines: tuple[str, ...]
    cut: bool
    """Whether lines, or ends of lines, are missing."""


def escape_invisible(text: str) -> str:
    """The text with every character that a reader cannot see, or that moves others, spelled out.

    Keeps tabs and line feeds. Among the rest are controls, bidirectional overrides (which make a source read
    differently from what runs), zero-width characters and lone surrogates.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c in "\t\n" or unicodedata.category(c) not in _INVISIBLE else f"\\u{{{ord(c):x}}}" for c in text
    )


@lru_cache(maxsize=4096)
def display_source(source: str) -> DisplayedSource:
    """Lines of a source, at most `MAX_LINES` of at most `MAX_LINE_CHARACTERS` characters."""
    lines = source.replace("\r\n", "\n").removesuffix("\n").split("\n")
    rows = [escape_invisible(line[:MAX_LINE_CHARACTERS]) for line in lines[:MAX_LINES]]
    return DisplayedSource(
        tuple(rows), len(rows) < len(lines) or any(len(line) > MAX_LINE_CHARACTERS for line in lines)
    )


@lru_cache(maxsize=4096)
def line_opcodes(before: str, after: str) -> tuple[tuple[str, int, int, int, int], ...]:
    """The edits from one source's shown lines to another's: difflib's opcodes, `equal` included."""
    a, b = display_source(before).lines, display_source(after).lines
    # Empty lines are alike everywhere: no match may rest on them.
    matcher = difflib.SequenceMatcher(lambda line: not line.strip(), a, b, autojunk=len(b) > 400)
    return tuple(matcher.get_opcodes())


def sources_within(nodes: Iterable[Node], most: int = MAX_CHARACTERS) -> list[Node]:
    """The first of `nodes` whose sources fit together into `most` characters; at least one, if any."""
    selection: list[Node] = []
    for node in nodes:
        most -= sum(len(line) + 1 for line in display_source(node.source).lines)
        if most < 0 and selection:
            break
        selection.append(node)
    return selection


_FORECASTER_MARK, _WRITER_MARK = "llm-", "llm:"


def model_text(state: SearchState) -> str:
    """A sentence on forecasts and proposals of language models; empty where no model is named."""
    answers: dict[str, list[Proposed]] = {}
    for answer in state.answers.values():
        answers.setdefault(answer.arm.partition("/")[0], []).append(answer)
    writers = sorted({a.partition("/")[0] for a in state.context.arms if a.startswith(_WRITER_MARK)})
    forecasts = state.context.surrogate.startswith(_FORECASTER_MARK)
    if not writers and not forecasts:
        return ""
    sentences = [
        _forecast_text(state) if forecasts else "not asked for forecasts: --surrogate llm:SPEC asks one"
    ]
    for name in writers:
        own = answers.get(name, [])
        runs = sum(n in state.judged for n, node in state.nodes.items() if node.arm.partition("/")[0] == name)
        count = (
            f"asked {len(own)} times for sources: {sum(len(a.nodes) for a in own)} proposals, {runs} measured"
        )
        sentences.append(f"{name} {count if own else 'not asked for sources: no batch was due'}")
    return "; ".join(sentences)


def _forecast_text(state: SearchState) -> str:
    answers = [b.forecasted for b in state.batches.values() if b.forecasted is not None]
    if not answers:
        return "not asked for forecasts: no batch had new sources"
    beliefs = [belief for answer in answers for belief in answer.beliefs.values()]
    count = sum(MODEL_NOTE in belief.note for belief in beliefs)
    tokens, seconds = (sum(getattr(a.spent, f) for a in answers) for f in ("tokens", "wall_seconds"))
    text = f"asked for forecasts in {len(answers)} batches, moved {count} of {len(beliefs)} forecasts, "
    text += f"{tokens:,} tokens, {seconds:.1f} s"
    if trouble := Counter(a.problem for a in answers if a.problem):
        text += f"; not heard: {', '.join(f'{why} ({n}x)' for why, n in trouble.most_common(3))}"
    return text


Z90, Z95 = 1.6449, 1.9600
"""Two-sided 90 % and 95 % quantiles of the normal distribution."""


def speedup_interval(score: float, sd: float) -> tuple[float, float]:
    """95 % interval of a speed-up whose -log2 is `score` with a standard error of `sd`: (low, high)."""
    return float(2.0 ** -(score + Z95 * sd)), float(2.0 ** -(score - Z95 * sd))


@dataclass(frozen=True)
class ReportNode:
    """One node and all that is known of it."""

    node: Node
    number: int
    """0 for the first seed; then in the order in which nodes were accepted."""
    judged: NodeResult | None = None
    score: float | None = None
    """log2(time / time of the first seed); None unless it ran."""
    sd: float = 0.0
    """Standard error of `score`, along the chain of comparisons that leads to the first seed."""
    belief: NodeForecast | None = None
    """The last forecast from before it was judged."""
    reference: str = ""
    """Id of the node that `belief` is relative to."""
    measured: float | None = None
    """log2(time / time of `reference`), to hold against `belief`; None unless it ran."""
    reason: str = ""
    propensity: float = 1.0
    status: str = ""
    """Its outcome, in a word or two."""

    @property
    def is_unverified(self) -> bool:
        """Whether it seems faster and was not verified in full: it may not be called the best."""
        return self.judged is not None and self.judged.is_unverified_gain

    @property
    def kind(self) -> str:
        """`seed`, `faster` or `slower` (than the first seed), `failed`, `waiting`."""
        if not self.node.parents:
            return "seed"
        if self.judged is None:
            return "waiting"
        if self.score is None:
            return "failed"
        return "faster" if self.score < 0 else "slower"


@dataclass(frozen=True)
class BestResult:
    """The best source of a search so far: its speed-up, and the evidence for it."""

    node: str
    score: float
    sd: float
    evidence: str
    """The text of `SearchState.evidence`."""

    @property
    def speedup(self) -> float:
        """Time of the first seed over its own."""
        return float(2.0**-self.score)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the speed-up."""
        return speedup_interval(self.score, self.sd)


@dataclass(frozen=True)
class SearchReport:
    """A whole search. Built by `build_report`, read by the page and the last lines of the command."""

    state: SearchState
    entries: Mapping[str, ReportNode]
    """By node id, in the order in which nodes were accepted."""
    final: BestResult | None
    """None while nothing but the first seed has run."""

    @property
    def root(self) -> str:
        """The seed that speed-ups are stated against."""
        return self.state.seeds[0]

    @property
    def problems(self) -> Counter[str]:
        """Problems of authors and forecasters that had no answer, counted."""
        answers, batches = self.state.answers.values(), self.state.batches.values()
        forecasts = [b.forecasted.problem for b in batches if b.forecasted is not None]
        return Counter(
            [
                *(f"{a.arm}: {a.problem}" for a in answers if a.problem),
                *(f"forecasts: {problem}" for problem in forecasts if problem),
            ]
        )

    @property
    def lost(self) -> list[Lost]:
        """Jobs whose lanes failed."""
        jobs = [*(b.lost for b in self.state.batches.values()), self.state.lost_verifications]
        each = [loss for by_node in jobs for losses in by_node.values() for loss in losses]
        return [*each, *self.state.lost_confirmations]


def build_report(state: SearchState) -> SearchReport:
    """The report of a state. Raises `RecordError` before the search has started."""
    entries = _report_nodes(state)
    return SearchReport(state, entries, _best_result(state, entries))


def _report_nodes(state: SearchState) -> dict[str, ReportNode]:
    chances = {
        name: chance
        for batch in state.batches.values()
        if batch.chosen is not None
        for name, chance in zip(batch.chosen.nodes, batch.chosen.propensities, strict=True)
    }
    nodes: dict[str, ReportNode] = {}
    for number, (name, node) in enumerate(state.nodes.items()):
        reference, belief = state.beliefs.get(name, ("", None))
        score = state.scores.get(name)
        ratio = None
        if score is not None and reference in state.scores:
            ratio = score - state.scores[reference]
        nodes[name] = ReportNode(
            node,
            number,
            state.judged.get(name),
            score,
            0.0,
            belief,
            reference,
            ratio,
            state.reason(name),
            chances.get(name, 1.0),
            state.status(name),
        )
    for point in state.history:  # in this order, a node comes after the one it was timed beside
        entry = nodes[point.node]
        if entry.score is not None and entry.judged is not None and point.node != state.seeds[0]:
            sd = math.hypot(nodes[entry.judged.against].sd, entry.judged.sd)
            nodes[point.node] = replace(entry, sd=sd)
    return nodes


def _best_result(state: SearchState, entries: Mapping[str, ReportNode]) -> BestResult | None:
    if not any(name != state.seeds[0] for name in state.scores):
        return None
    best = state.best
    result = state.confirmed.get(best)
    has_ratio = result is not None and result.log2_ratio is not None
    sd = result.sd if result is not None and has_ratio else entries[best].sd
    return BestResult(best, state.best_score, sd, state.evidence(best))


# --- rows of text ---


def factor_text(at: float) -> str:
    """2 to the power of `at` with three digits: `1.21x`, `12.3x`, `0.845x`."""
    value = 2.0**at
    if value >= 99.95:
        return f"{value:.0f}x"
    return f"{value:.2f}x" if value < 9.995 else f"{value:.1f}x"


MAX_FINALISTS = 8
_LIMIT_NAMES = {
    "measurements": "measurements",
    "device_seconds": "device time",
    "wall_seconds": "wall time",
    "tokens": "tokens",
    "money": "money",
}


@dataclass(frozen=True)
class HeaderCard:
    """A figure of the header."""

    value: str
    name: str
    css: str = ""


@dataclass(frozen=True)
class ShareBar:
    """A share of something, with its figures."""

    name: str
    share: float
    """0 to 100."""
    text: str
    limited: bool = True
    """Whether there is a whole to have a share of."""


@dataclass(frozen=True)
class FinalistRow:
    """A row of the table of finalists."""

    id: str
    label: str
    note: str
    speedup: str
    css: str
    interval: str
    during: str
    forecast: str
    times: Sequence[str]
    config: str


def header_cards(report: SearchReport) -> list[HeaderCard]:
    """The figures of the header."""
    cost, final = report.state.spent, report.final
    proposals = sum(len(a.nodes) for a in report.state.answers.values())
    most = report.state.settings.budget.measurements
    limit = "" if most is None else f" of {most:,}"
    return [
        best_card(final),
        HeaderCard(f"{cost.measurements:,}{limit}", f"candidates measured, of {proposals:,} proposed"),
        HeaderCard(seconds(cost.device_seconds), "device time"),
        HeaderCard(*per_percent(final, cost)),
        status_card(report),
    ]


_UNCONFIRMED_NOTE = "not confirmed yet: the best of many looks better than it is"


def best_card(final: BestResult | None) -> HeaderCard:
    """The claim, with its interval, and whether it was confirmed."""
    if final is None:
        return HeaderCard("-", "no source but the seed has run")
    if final.score >= 0.0:
        return HeaderCard(factor_text(-final.score), "nothing faster than the seed was found", "fair")
    low, _ = final.interval
    evidence = EVIDENCE_TEXTS[final.evidence] if final.evidence else _UNCONFIRMED_NOTE
    css = "good" if low > 1.0 else "fair"
    between = interval_text(final.score, final.sd)
    return HeaderCard(factor_text(-final.score), f"best speed-up, 95 % interval {between}; {evidence}", css)


def per_percent(final: BestResult | None, cost: SearchCost) -> tuple[str, str]:
    """The cost of each per cent of the first seed's time that is saved: (in device time, in all else)."""
    saving = 0.0 if final is None else 100.0 * (1.0 - 1.0 / final.speedup)
    if saving <= 0.0:
        return "-", "nothing was gained"
    parts = [f", {cost.tokens / saving:,.0f} tokens"] if cost.tokens else []
    parts += [f", US$ {cost.money / saving:.3g}"] if cost.money else []
    return (
        seconds(cost.device_seconds / saving),
        f"of device time{''.join(parts)} per percent of the seed's time saved",
    )


def status_card(report: SearchReport) -> HeaderCard:
    """The state of the search, and the reason of its end."""
    if report.state.stopped is None:
        return HeaderCard(
            f"batch {max(report.state.batches, default=0)}", "under way, or ended without saying so"
        )
    word = "interrupted" if report.state.stopped.interrupted else "finished"
    return HeaderCard(
        word,
        escape_invisible(report.state.stopped.reason) or "no reason given",
        "fair" if report.state.stopped.interrupted else "",
    )


def bars_of_budget(cost: SearchCost, limits: SearchBudget) -> list[ShareBar]:
    """Each limit and what was spent of it, or a sum without one; costs neither limited nor spent are left out."""
    bars = []
    for name, label in _LIMIT_NAMES.items():
        limit, amount = getattr(limits, name), getattr(cost, name)
        if limit is None and not amount:
            continue
        share = 0.0 if not limit else min(100.0, 100.0 * amount / limit)
        text = _amount_text(name, amount) + ("" if limit is None else f" of {_amount_text(name, limit)}")
        bars.append(ShareBar(label, round(share, 1), text, limited=limit is not None))
    return bars


def _amount_text(name: str, value: float) -> str:
    if name.endswith("seconds"):
        return seconds(value)
    return f"US$ {value:.2f}" if name == "money" else f"{value:,.0f}"


def _cost_cells(cost: SearchCost) -> tuple[str, ...]:
    return (
        f"{cost.measurements:,}" if cost.measurements else "",
        seconds(cost.device_seconds) if cost.device_seconds else "",
        seconds(cost.wall_seconds) if cost.wall_seconds else "",
        f"{cost.tokens:,}" if cost.tokens else "",
        f"{cost.money:.3f}" if cost.money else "",
    )


def cost_rows(report: SearchReport) -> list[tuple[str, ...]]:
    """Costs by kind of work, and their sum."""
    rows = [
        (name, *_cost_cells(cost)) for name, cost in report.state.spent_on.items() if cost != SearchCost()
    ]
    return [*rows, ("in all", *_cost_cells(report.state.spent))]


def finalist_rows(report: SearchReport, workloads: Sequence[str]) -> list[FinalistRow]:
    """The confirmed nodes, or without a confirmation the best of the search; fastest first."""
    results = {n: j for n, j in report.state.confirmed.items() if n in report.entries}
    names = sorted(results, key=lambda n: (results[n].log2_ratio is None, results[n].log2_ratio or 0.0))
    if not names:
        candidates = [e for e in report.entries.values() if e.score is not None and not e.is_unverified]
        entries = [e for e in candidates if e.node.id != report.root]
        names = [e.node.id for e in sorted(entries, key=lambda e: (e.score or 0.0, e.number))[:MAX_FINALISTS]]
    seed = report.state.judged.get(report.root) if not results else results.get(report.root)
    rows = [_finalist_row(report.entries[n], results.get(n), seed, workloads) for n in names]
    if seed is not None and (compiled_seconds := seed.facts.get("compiled")):
        times = [milliseconds(1000 * compiled_seconds[w]) if w in compiled_seconds else "" for w in workloads]
        text, note = (
            factor_text(-compiled_score(seed)),
            "the seed under torch.compile, with the same arithmetic settings",
        )
        rows.append(FinalistRow(report.root, "#0", note, text, "", "", "", "", times, ""))
    return rows


def compiled_score(seed: NodeResult | None) -> float:
    """log2 of the seed's time under `torch.compile` over its own, the mean over workloads; 0 where it was not timed."""
    times = {} if seed is None else seed.facts.get("compiled", {})
    pairs = [] if seed is None else [(s, seed.seconds[n]) for n, s in times.items() if n in seed.seconds]
    return statistics.fmean(math.log2(s / own) for s, own in pairs) if pairs else 0.0


def _finalist_row(
    entry: ReportNode, confirmation: NodeResult | None, seed: NodeResult | None, workloads: Sequence[str]
) -> FinalistRow:
    """`seed`: the seed's result, beside whose times those of this one are told."""
    result = confirmation or entry.judged
    score, sd = entry.score, entry.sd
    if confirmation is not None:
        score, sd = confirmation.log2_ratio, confirmation.sd
    low, _ = speedup_interval(score or 0.0, sd)
    times = {} if result is None else result.seconds
    if seed is not None and score is not None and times:
        times = matched_times(times, seed.seconds, 2.0**score)
    configs = [r.config for r in (result, entry.judged) if r is not None and r.config]
    return FinalistRow(
        entry.node.id,
        f"#{entry.number}",
        escape_invisible(entry.node.provenance.note) or "the seed",
        str(result.outcome if result else "") if score is None else factor_text(-score),
        "bad" if score is None else "good" if low > 1.0 else "",
        "" if score is None else interval_text(score, sd),
        "" if entry.score is None else factor_text(-entry.score),
        "" if entry.belief is None else forecast_text(entry.belief),
        [milliseconds(1000 * times[w]) if w in times else "" for w in workloads],
        config_text(configs[0] if configs else {}),
    )


def workload_names(report: SearchReport, most: int = 6) -> list[str]:
    """Names of the workloads that results tell times of; the first few."""
    names: dict[str, None] = {}
    for r in (*report.state.confirmed.values(), *(e.judged for e in report.entries.values() if e.judged)):
        names.update(dict.fromkeys(r.seconds))
    return list(names)[:most]


def forecast_text(belief: NodeForecast) -> str:
    """A belief in a few words."""
    return f"{factor_text(-belief.mean)} ({interval_text(belief.mean, belief.sd)})"


def interval_text(score: float, sd: float) -> str:
    """The 95 % interval of a speed-up: `1.19x to 1.23x`."""
    return f"{factor_text(-(score + Z95 * sd))} to {factor_text(-(score - Z95 * sd))}"


def config_text(config: Mapping[str, Any]) -> str:
    """A config on a line: nested mappings are written out."""
    parts: list[str] = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            parts.append(config_text(value))
        elif value is not None:
            parts.append(f"{name}={value}")
    return escape_invisible(", ".join(p for p in parts if p))


# --- the end of a search in a few lines ---


def summary_lines(state: SearchState) -> list[tuple[str, str]]:
    """The result of a search and its cost: (name, text). Raises `RecordError` before the search has started."""
    report = build_report(state)
    per, note = per_percent(report.final, report.state.spent)
    cost = report.state.spent
    parts = [count_text(cost.measurements, "measurement"), f"{seconds(cost.device_seconds)} of device time"]
    parts += [f"{cost.tokens:,} tokens"] if cost.tokens else []
    parts += [f"US$ {cost.money:.2f}"] if cost.money else []
    end = status_card(report)
    model = escape_invisible(model_text(report.state))
    return [
        ("best", _best_text(report)),
        ("spent", ", ".join(parts)),
        *([] if per == "-" else [("cost", f"{per} {note}")]),
        *([("language model", model)] if model else []),
        ("ended", end.name if end.name.startswith(end.value) else f"{end.value}: {end.name}"),
    ]


def _best_text(report: SearchReport) -> str:
    final = report.final
    if final is None or final.score >= 0.0:
        return best_card(final).name
    note = escape_invisible(report.entries[final.node].node.provenance.note)
    evidence, results = EVIDENCE_TEXTS[final.evidence], {**report.state.judged, **report.state.confirmed}
    own, base = (dict(results[n].facts.get("peak_bytes") or {}) for n in (final.node, report.root))
    base = results[final.node].facts.get("base_peak_bytes") or base
    seed = results[report.root]
    compiled_text = (
        f"the seed under torch.compile: {factor_text(-score)}" if (score := compiled_score(seed)) else ""
    )
    texts = (memory_rise(own, base), results[final.node].other_calls_text, compiled_text, note)
    parts = [text for text in texts if text]
    return (
        f"{factor_text(-final.score)} over the seed, 95 % interval {interval_text(final.score, final.sd)}, "
        f"{'; '.join([evidence, *parts])}"
    )


# --- progress, and what forecasts were worth ---

CHART_WIDTH, CHART_HEIGHT = 600, 160


@dataclass(frozen=True)
class ProgressChart:
    """The best speed-up over measurements, as a path `CHART_WIDTH` wide and `CHART_HEIGHT` high."""

    path: str
    top: str
    """The speed-up at the upper edge; the lower one is 1x."""
    measurements: int


def progress_chart(report: SearchReport) -> ProgressChart | None:
    """None before anything was measured."""
    points = report.state.history
    if not points:
        return None
    # A source that is verified in full at the end only was never the best before.
    scores = [*(p.best for p in points), report.final.score if report.final is not None else 0.0]
    top, best, path = max(-min(scores), log2(1.1)), 0.0, f"M0 {CHART_HEIGHT}"
    for number, score in enumerate(scores, 1):
        if score < best:  # flat stretches need no points: thousands of results, a few dozen steps
            best, at = score, CHART_WIDTH * min(1.0, number / len(points))
            path += f"H{at:.1f}V{CHART_HEIGHT * (1 + best / top):.1f}"
    return ProgressChart(f"{path}H{CHART_WIDTH}", factor_text(top), len(points))


def coverage_text(report: SearchReport) -> str:
    """A sentence on how often forecasts held what was measured; empty where nothing that was forecast ran."""
    forecasts = [e for e in report.entries.values() if e.belief is not None and not e.belief.abstains]
    pairs = [(e.belief, e.measured) for e in forecasts if e.belief is not None and e.measured is not None]
    if not pairs:
        return ""
    inside = sum(abs(ratio - belief.mean) <= Z90 * belief.sd for belief, ratio in pairs)
    text = (
        f"{inside} of {len(pairs)} forecasts ({percent(inside / len(pairs))}) hold the measured speed-up in their "
        "90 % interval, 90 % should. What was measured was chosen by them."
    )
    if failed := [e.belief.p_fail for e in forecasts if e.belief and e.judged and e.score is None]:
        chance = sum(belief.p_fail for belief, _ in pairs) / len(pairs)
        text += (
            f" Those that failed ({len(failed)}) were given a {percent(sum(failed) / len(failed))} chance "
            f"of that, those that ran {percent(chance)}."
        )
    return text
