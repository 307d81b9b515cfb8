"""A search in the shape in which people read it: nodes, arms, costs, and rows of text."""

from __future__ import annotations

import difflib
import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import log2
from typing import Any

from forecast_autotune.report.chart import milliseconds, percent, seconds
from forecast_harness.clocks.times import matched_times
from forecast_harness.records import (
    EVIDENCE_TEXTS,
    MODEL_NOTE,
    Node,
    NodeForecast,
    NodeResult,
    SearchBudget,
    SearchCost,
)
from forecast_harness.search.events import Lost
from forecast_harness.search.state import HistoryPoint, SearchState
from forecast_harness.verify.verdict import memory_rise

# --- sources, bounded and made safe to look at ---


MAX_CHARACTERS = 3_000_000
"""Characters of all sources in one page together."""
MAX_LINES = 1_500
"""Lines of one source; longer ones are cut, and say so."""
MAX_LINE_CHARACTERS = 4_000
"""Characters of one line."""


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
    return "".join(c if c in "\t\n" or not _is_invisible(c) else f"\\u{{{ord(c):x}}}" for c in text)


def _is_invisible(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


@lru_cache(maxsize=4096)
def display_source(source: str) -> DisplayedSource:
    """Lines of a source, at most `MAX_LINES` of at most `MAX_LINE_CHARACTERS` characters."""
    lines = source.replace("\r\n", "\n").removesuffix("\n").split("\n")
    kept = [escape_invisible(line[:MAX_LINE_CHARACTERS]) for line in lines[:MAX_LINES]]
    return DisplayedSource(
        tuple(kept), len(kept) < len(lines) or any(len(line) > MAX_LINE_CHARACTERS for line in lines)
    )


@lru_cache(maxsize=4096)
def line_opcodes(before: str, after: str) -> tuple[tuple[str, int, int, int, int], ...]:
    """How the shown lines of one source become another's: difflib's opcodes, `equal` included."""
    a, b = display_source(before).lines, display_source(after).lines
    # Empty lines are everywhere alike: what is matched must not hang on them.
    matcher = difflib.SequenceMatcher(lambda line: not line.strip(), a, b, autojunk=len(b) > 400)
    return tuple(matcher.get_opcodes())


def sources_within(nodes: Iterable[Node], most: int = MAX_CHARACTERS) -> list[Node]:
    """The first of `nodes` whose sources fit together into `most` characters; at least one, if any."""
    shown: list[Node] = []
    for node in nodes:
        most -= sum(len(line) + 1 for line in display_source(node.source).lines)
        if most < 0 and shown:
            break
        shown.append(node)
    return shown


_FORECASTER_MARK, _WRITER_MARK = "llm-", "llm:"


def model_text(state: SearchState) -> str:
    """A sentence on forecasts and proposals of language models; empty where no model is named."""
    arms = {name: stats for name, stats in state.arms.items() if name.startswith(_WRITER_MARK)}
    forecasts = state.context.surrogate.startswith(_FORECASTER_MARK)
    if not arms and not forecasts:
        return ""
    sentences = [
        _forecast_text(state) if forecasts else "not asked for forecasts: --surrogate llm:SPEC asks one"
    ]
    for name in sorted({n.partition("/")[0] for n in arms}):
        own = [stats for arm, stats in arms.items() if arm.partition("/")[0] == name]
        requests, proposals, measured = (
            sum(getattr(s, field) for s in own) for field in ("requests", "proposals", "measured")
        )
        count = f"asked {requests} times for sources: {proposals} proposals, {measured} measured"
        sentences.append(f"{name} {count if requests else 'not count for sources: no batch was due'}")
    return "; ".join(sentences)


def _forecast_text(state: SearchState) -> str:
    answers = [b.forecasted for b in state.batches.values() if b.forecasted is not None]
    if not answers:
        return "not asked for forecasts: no batch had new sources"
    beliefs = [belief for answer in answers for belief in answer.beliefs.values()]
    heard = sum(MODEL_NOTE in belief.note for belief in beliefs)
    tokens, seconds = (sum(getattr(a.spent, f) for a in answers) for f in ("tokens", "wall_seconds"))
    text = f"asked for forecasts in {len(answers)} batches, moved {heard} of {len(beliefs)} forecasts, "
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
    """The last one from before it was judged."""
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
    """The end of a search, or where it stands: what is claimed, and how surely."""

    node: str
    score: float
    sd: float
    evidence: str
    """As `SearchState.evidence` has it."""

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
    def outcomes(self) -> Counter[tuple[str, str]]:
        """How often nodes ended so: (outcome, stage)."""
        return Counter((str(e.judged.outcome), e.judged.stage) for e in self.entries.values() if e.judged)

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
        each = [one for by_node in jobs for losses in by_node.values() for one in losses]
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
        measured = None
        if score is not None and reference in state.scores:
            measured = score - state.scores[reference]
        nodes[name] = ReportNode(
            node,
            number,
            state.judged.get(name),
            score,
            0.0,
            belief,
            reference,
            measured,
            state.reason(name),
            chances.get(name, 1.0),
            state.status(name),
        )
    for point in state.history:  # in this order whatever a node was timed beside comes before it
        entry = nodes[point.node]
        if entry.score is not None and entry.judged is not None and point.node != state.seeds[0]:
            sd = math.hypot(nodes[entry.judged.against].sd, entry.judged.sd)
            nodes[point.node] = replace(entry, sd=sd)
    return nodes


def _best_result(state: SearchState, entries: Mapping[str, ReportNode]) -> BestResult | None:
    if not any(name != state.seeds[0] for name in state.scores):
        return None
    best = state.best
    judged = state.confirmed.get(best)
    sure = judged is not None and judged.log2_ratio is not None
    sd = judged.sd if judged is not None and sure else entries[best].sd
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
    css: str = ""
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


def header_cards(story: SearchReport) -> list[HeaderCard]:
    """The figures of the header."""
    spent, final = story.state.spent, story.final
    proposed = sum(a.proposals for a in story.state.arms.values())
    most = story.state.settings.budget.measurements
    limit = "" if most is None else f" of {most:,}"
    return [
        best_card(final),
        HeaderCard(f"{spent.measurements:,}{limit}", f"candidates measured, of {proposed:,} proposed"),
        HeaderCard(seconds(spent.device_seconds), "device time"),
        HeaderCard(*per_percent(final, spent)),
        status_card(story),
    ]


_UNCONFIRMED_NOTE = "not confirmed yet: the best of many looks better than it is"


def best_card(final: BestResult | None) -> HeaderCard:
    """The claim, with its interval, and whether it was confirmed."""
    if final is None:
        return HeaderCard("-", "no source but the seed has run")
    if final.score >= 0.0:
        return HeaderCard(factor_text(-final.score), "nothing faster than the seed was found", "fair")
    low, _ = final.interval
    how = EVIDENCE_TEXTS[final.evidence] if final.evidence else _UNCONFIRMED_NOTE
    css = "good" if low > 1.0 else "fair"
    between = interval_text(final.score, final.sd)
    return HeaderCard(factor_text(-final.score), f"best speed-up, 95 % interval {between}; {how}", css)


def per_percent(final: BestResult | None, spent: SearchCost) -> tuple[str, str]:
    """The cost of each per cent of the first seed's time that is saved: (in device time, in all else)."""
    saved = 0.0 if final is None else 100.0 * (1.0 - 1.0 / final.speedup)
    if saved <= 0.0:
        return "-", "nothing was gained"
    paid = [f"{spent.measurements / saved:.3g} measurements"]
    if spent.tokens:
        paid.append(f"{spent.tokens / saved:,.0f} tokens")
    if spent.money:
        paid.append(f"US$ {spent.money / saved:.3g}")
    return (
        seconds(spent.device_seconds / saved),
        f"of device time per percent of the seed's time saved; {', '.join(paid)}",
    )


def status_card(story: SearchReport) -> HeaderCard:
    """Whether it runs, and why it ended."""
    if story.state.stopped is None:
        return HeaderCard(
            f"batch {max(story.state.batches, default=0)}", "under way, or ended without saying so"
        )
    word = "interrupted" if story.state.stopped.interrupted else "finished"
    return HeaderCard(
        word,
        escape_invisible(story.state.stopped.reason) or "no reason given",
        "fair" if story.state.stopped.interrupted else "",
    )


def budget_bars(story: SearchReport) -> list[ShareBar]:
    """Each limit and what was spent of it; what has no limit is told by its sum."""
    return bars_of_budget(story.state.spent, story.state.settings.budget)


def bars_of_budget(spent: SearchCost, limits: SearchBudget) -> list[ShareBar]:
    """`budget_bars`, of anything; what is neither limited nor spent is left out."""
    bars = []
    for name, shown in _LIMIT_NAMES.items():
        limit, used = getattr(limits, name), getattr(spent, name)
        if limit is None and not used:
            continue
        share = 0.0 if not limit else min(100.0, 100.0 * used / limit)
        text = _amount_text(name, used) + ("" if limit is None else f" of {_amount_text(name, limit)}")
        bars.append(ShareBar(shown, round(share, 1), text, limited=limit is not None))
    return bars


def _amount_text(name: str, value: float) -> str:
    if name.endswith("seconds"):
        return seconds(value)
    return f"US$ {value:.2f}" if name == "money" else f"{value:,.0f}"


def _cost_cells(spent: SearchCost) -> tuple[str, ...]:
    return (
        f"{spent.measurements:,}" if spent.measurements else "",
        seconds(spent.device_seconds) if spent.device_seconds else "",
        seconds(spent.wall_seconds) if spent.wall_seconds else "",
        *_payment_cells(spent),
    )


def _payment_cells(spent: SearchCost) -> tuple[str, str]:
    return f"{spent.tokens:,}" if spent.tokens else "", f"{spent.money:.3f}" if spent.money else ""


def cost_rows(story: SearchReport) -> list[tuple[str, ...]]:
    """Costs by kind of work, and their sum."""
    rows = [
        (name, *_cost_cells(spent)) for name, spent in story.state.spent_on.items() if spent != SearchCost()
    ]
    return [*rows, ("in all", *_cost_cells(story.state.spent))]


def arm_rows(story: SearchReport) -> list[tuple[str, ...]]:
    """A row per arm, the best first: what was asked, proposed, new, measured, ran, was better, and its best."""
    rows = []
    for name, stats in story.state.arms.items():
        own = [e for e in story.entries.values() if e.node.arm == name and e.judged is not None]
        ratios = [e.judged.log2_ratio for e in own if e.judged is not None]
        ran = [ratio for ratio in ratios if ratio is not None]
        scores = [e.score for e in own if e.score is not None and not e.is_unverified]
        best = min(scores, default=None)
        counts = (
            *(stats.requests, stats.proposals, stats.new, stats.measured),
            *(len(ran), sum(ratio < 0 for ratio in ran)),
        )
        shown = (
            escape_invisible(name),
            *(f"{n:,}" for n in counts),
            "" if best is None else factor_text(-best),
            *_payment_cells(stats.spent),
        )
        rows.append(((best is None, best or 0.0, name), shown))
    return [shown for _, shown in sorted(rows)]


def outcome_bars(story: SearchReport) -> list[ShareBar]:
    """How many nodes ended how, and at which stage; what waits to be measured last."""
    counts = story.outcomes
    waiting = sum(e.judged is None for e in story.entries.values())
    again = len(story.state.duplicates)
    most = max([*counts.values(), waiting, again, 1])
    bars = [
        ShareBar(
            f"{outcome.replace('_', ' ')}{f' at {stage}' if stage and outcome != 'ok' else ''}",
            round(100.0 * count / most, 1),
            f"{count:,} ({percent(count / counts.total())})",
            "" if outcome == "ok" else "bad",
        )
        for (outcome, stage), count in sorted(counts.items(), key=lambda i: (i[0][0] != "ok", -i[1], i[0]))
    ]
    if waiting:
        bars.append(ShareBar("never measured", round(100.0 * waiting / most, 1), f"{waiting:,}", "soft"))
    if again:
        bars.append(
            ShareBar("not new: not even a node", round(100.0 * again / most, 1), f"{again:,}", "soft")
        )
    return bars


def finalist_rows(story: SearchReport, workloads: Sequence[str]) -> list[FinalistRow]:
    """The confirmed nodes, or without a confirmation the best of the search; fastest first."""
    judged = {n: j for n, j in story.state.confirmed.items() if n in story.entries}
    names = sorted(judged, key=lambda n: (judged[n].log2_ratio is None, judged[n].log2_ratio or 0.0))
    if not names:
        able = [e for e in story.entries.values() if e.score is not None and not e.is_unverified]
        ran = [e for e in able if e.node.id != story.root]
        names = [e.node.id for e in sorted(ran, key=lambda e: (e.score or 0.0, e.number))[:MAX_FINALISTS]]
    seed = story.state.judged.get(story.root) if not judged else judged.get(story.root)
    return [_finalist_row(story.entries[n], judged.get(n), seed, workloads) for n in names]


def _finalist_row(
    entry: ReportNode, confirmed: NodeResult | None, seed: NodeResult | None, workloads: Sequence[str]
) -> FinalistRow:
    """`seed`: the seed's result, beside whose times those of this one are told."""
    judged = confirmed or entry.judged
    score, sd = entry.score, entry.sd
    if confirmed is not None:
        score, sd = confirmed.log2_ratio, confirmed.sd
    low, _ = speedup_interval(score or 0.0, sd)
    took = {} if judged is None else judged.seconds
    if seed is not None and score is not None and took:
        took = matched_times(took, seed.seconds, 2.0**score)
    config = (judged.config if judged and judged.config else None) or (
        entry.judged.config if entry.judged else {}
    )
    return FinalistRow(
        entry.node.id,
        f"#{entry.number}",
        escape_invisible(entry.node.provenance.note) or "the seed",
        str(judged.outcome if judged else "") if score is None else factor_text(-score),
        "bad" if score is None else "good" if low > 1.0 else "",
        "" if score is None else interval_text(score, sd),
        "" if entry.score is None else factor_text(-entry.score),
        "" if entry.belief is None else forecast_text(entry.belief),
        [milliseconds(1000 * took[w]) if w in took else "" for w in workloads],
        config_text(config),
    )


def workload_names(story: SearchReport, most: int = 6) -> list[str]:
    """Names of the workloads that results tell times of; the first few."""
    names: dict[str, None] = {}
    for judged in (*story.state.confirmed.values(), *(e.judged for e in story.entries.values() if e.judged)):
        names.update(dict.fromkeys(judged.seconds))
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
    story = build_report(state)
    per, what = per_percent(story.final, story.state.spent)
    spent = story.state.spent
    paid = [f"{spent.measurements:,} measurements", f"{seconds(spent.device_seconds)} of device time"]
    paid += [f"{spent.tokens:,} tokens"] if spent.tokens else []
    paid += [f"US$ {spent.money:.2f}"] if spent.money else []
    end = status_card(story)
    model = escape_invisible(model_text(story.state))
    return [
        ("best", _best_text(story)),
        ("spent", ", ".join(paid)),
        *([] if per == "-" else [("cost", f"{per} {what}")]),
        *([("language model", model)] if model else []),
        ("ended", end.name if end.name.startswith(end.value) else f"{end.value}: {end.name}"),
    ]


def _best_text(story: SearchReport) -> str:
    final = story.final
    if final is None or final.score >= 0.0:
        return best_card(final).name
    note = escape_invisible(story.entries[final.node].node.provenance.note)
    sure, results = EVIDENCE_TEXTS[final.evidence], {**story.state.judged, **story.state.confirmed}
    own, base = (dict(results[n].facts.get("peak_bytes") or {}) for n in (final.node, story.root))
    base = results[final.node].facts.get("base_peak_bytes") or base
    told = [text for text in (memory_rise(own, base), results[final.node].other_calls_text, note) if text]
    return (
        f"{factor_text(-final.score)} over the seed, 95 % interval {interval_text(final.score, final.sd)}, "
        f"{'; '.join([sure, *told])}"
    )


# --- charts: only geometry; the template draws them ---


@dataclass(frozen=True)
class AxisScale:
    """A linear map of [low, high] to [start, end]; what lies beyond is drawn at the edge."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Place on paper, rounded to a tenth of a unit to keep pages small."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def padded_bounds(
    values: Iterable[float], *, least: float = 1e-9, margin: float = 0.06
) -> tuple[float, float]:
    """Bounds a little beyond all values, at least `least` apart; (-least / 2, least / 2) for none."""
    finite = [v for v in values if math.isfinite(v)] or [0.0]
    low, high = min(finite), max(finite)
    middle, half = (low + high) / 2, max((high - low) / 2, least / 2)
    return middle - half * (1 + margin), middle + half * (1 + margin)


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values in [low, high]: multiples of 1, 2 or 5 times a power of ten, at most `most` + 1."""
    raw = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    unit = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / unit - 1e-9)
    return [round(n * unit, 12) for n in range(first, math.floor(high / unit + 1e-9) + 1)]


def factor_ticks(low: float, high: float, most: int = 6) -> list[tuple[float, str]]:
    """Ticks of an axis in log2 of a speed-up, named as factors: (log2, `1.2x`).

    Round factors where the axis spans less than two doublings, powers of two where it spans more.
    """
    if high - low <= 2.0:
        ticks = [math.log2(v) for v in round_ticks(2.0**low, 2.0**high, most) if v > 0]
    else:
        unit = math.ceil((high - low) / most)
        ticks = [n * float(unit) for n in range(math.ceil(low / unit), math.floor(high / unit) + 1)]
        if unit == 1 and len(ticks) < most:  # 1, 1.5, 2, 3, 4, 6, 8
            ticks = sorted([*ticks, *(v for n in ticks if (v := n + math.log2(1.5)) <= high)])
    return [(at, factor_text(at)) for at in ticks]


def amount_text(value: float) -> str:
    """A count or sum for a tick: `1,200`, `12 k`, `3.4 M`, `0.02`."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g} M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.3g} k"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"


# --- a chart as plain data, in the units of its own paper ---


@dataclass(frozen=True)
class ChartMark:
    """A mark that stands for a node (`node` is its id) or for a bin (empty)."""

    x: float
    y: float
    css: str
    title: str
    node: str = ""
    radius: float = 4.0
    cross: bool = False


@dataclass(frozen=True)
class ChartPath:
    """A path; `path` is SVG's."""

    path: str
    css: str
    title: str = ""


@dataclass(frozen=True)
class ChartLabel:
    """A label inside the chart."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    css: str = "soft"


@dataclass
class ChartPanel:
    """One chart. `x` and `y` map values to paper; ticks are (place, name)."""

    title: str
    x: AxisScale
    y: AxisScale
    x_title: str
    y_title: str
    x_ticks: Sequence[tuple[float, str]] = ()
    y_ticks: Sequence[tuple[float, str]] = ()
    lines: list[ChartPath] = field(default_factory=list)
    dots: list[ChartMark] = field(default_factory=list)
    words: list[ChartLabel] = field(default_factory=list)
    note: str = ""
    """A sentence under it."""
    empty: str = ""
    """Why there is nothing to see; empty if there is."""
    width: float = 600.0
    height: float = 300.0

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom of the plotting area."""
        return self.x.start, self.y.end, self.x.end, self.y.start


LEFT, TOP, RIGHT, BOTTOM = 70.0, 14.0, 576.0, 254.0
"""Where the plotting area of a panel of the usual size lies."""


def x_axis(low: float, high: float) -> AxisScale:
    """The x axis of a panel of the usual size."""
    return AxisScale(low, high, LEFT, RIGHT)


def y_axis(low: float, high: float) -> AxisScale:
    """The y axis of a panel of the usual size."""
    return AxisScale(low, high, BOTTOM, TOP)


def place_ticks(scale: AxisScale, ticks: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """Ticks by their places on paper."""
    return [(scale(value), name) for value, name in ticks]


def step_path(points: Sequence[tuple[float, float]], end: float) -> str:
    """A path that keeps each height until the next point, and the last one until `end`."""
    if not points:
        return ""
    (x, y), rest = points[0], points[1:]
    parts = [f"M{x:g} {y:g}"]
    for after_x, after_y in rest:
        if after_y != y:  # flat stretches need no points: thousands of results, a few dozen steps
            parts.append(f"H{after_x:g}V{after_y:g}")
            y = after_y
    return "".join([*parts, f"H{end:g}"])


# --- the charts ---


MOST_DOTS = 600
"""A chart has at most so many marks of single results; the best ones and every n-th of the others stay."""


def progress_chart(story: SearchReport, labels: dict[str, str], *, by: str) -> ChartPanel:
    """Best speed-up so far over `by`: `measurements` or `device_seconds`. Each result is a mark."""
    unit = "measurements" if by == "measurements" else "device seconds"
    limit = getattr(story.state.settings.budget, by)
    spent = [float(getattr(s, by)) for s in story.state.history]
    end = max([*spent, 6.0 if by == "measurements" else 1e-3])  # room for whole ticks
    if limit is not None and limit <= 3 * end:
        end = max(end, float(limit))
    heights = [-s.score for s in story.state.history if s.score is not None]
    low, high = padded_bounds([0.0, *(max(h, -1.0) for h in heights)], least=log2(1.1))
    x, y = x_axis(0.0, end * 1.02), y_axis(low, high)
    panel = ChartPanel(
        f"Best speed-up over {unit}",
        x,
        y,
        unit,
        "speed-up",
        place_ticks(x, [(t, amount_text(t)) for t in round_ticks(0.0, end)]),
        place_ticks(y, factor_ticks(low, high)),
    )
    if not story.state.history:
        panel.empty = "Nothing has been measured yet."
        return panel
    for step, cost in _thin_points(story.state.history, spent):
        name = labels.get(step.node, step.node)
        if step.score is None:
            panel.dots.append(ChartMark(x(cost), y(low), "failed", f"{name}: failed", step.node, 3.0, True))
        else:
            css = "faster" if step.score < 0 else "slower"
            title = f"{name}: {factor_text(-step.score)}"
            if story.entries[step.node].is_unverified:
                title += ", not verified in full"
            panel.dots.append(ChartMark(x(cost), y(-step.score), css, title, step.node, 3.0))
    best = [(x(cost), y(-step.best)) for step, cost in zip(story.state.history, spent, strict=True)]
    panel.lines.append(ChartPath(f"M{x(0):g} {y(0):g}H{x(end):g}", "zero"))
    panel.lines.append(ChartPath(step_path([(x(0), y(0)), *best], x(max(spent))), "best"))
    if limit is not None and limit <= end:
        panel.lines.append(ChartPath(f"M{x(limit):g} {y(low):g}V{y(high):g}", "limit", f"budget: {limit:g}"))
        panel.words.append(ChartLabel(x(limit) - 5, y(low) - 8, "budget", "end"))
    if len(panel.dots) < len(story.state.history):
        panel.note = (
            f"{len(panel.dots)} of {len(story.state.history)} results are marked; the line is drawn from all."
        )
    return panel


def _thin_points(steps: Sequence[HistoryPoint], spent: Sequence[float]) -> list[tuple[HistoryPoint, float]]:
    pairs = list(zip(steps, spent, strict=True))
    if len(pairs) <= MOST_DOTS:
        return pairs
    before = [0.0, *(s.best for s in steps[:-1])]
    stay = {n for n, (s, b) in enumerate(zip(steps, before, strict=True)) if s.best < b}
    stay = set(sorted(stay)[-MOST_DOTS // 2 :])
    stride = -(-len(pairs) // (MOST_DOTS - len(stay)))
    return [pair for n, pair in enumerate(pairs) if n in stay or n % stride == 0]


def forecast_chart(story: SearchReport, labels: dict[str, str]) -> ChartPanel:
    """Forecast against measured speed-up, both over the reference of the forecast, with 90 % intervals."""
    forecasts = [e for e in story.entries.values() if e.belief is not None and not e.belief.abstains]
    timed = [e for e in forecasts if e.measured is not None]
    pairs = [(-e.belief.mean, -(e.measured or 0.0)) for e in timed if e.belief is not None]
    low, high = padded_bounds(
        [max(-3.0, min(3.0, v)) for pair in pairs for v in pair], least=log2(1.2), margin=0.15
    )
    x, y = x_axis(low, high), y_axis(low, high)
    panel = ChartPanel(
        "Forecast against measured speed-up",
        x,
        y,
        "forecast, over the best at that time",
        "measured",
        place_ticks(x, factor_ticks(low, high, 7)),
        place_ticks(y, factor_ticks(low, high)),
    )
    failed = [e for e in forecasts if e.judged is not None and e.score is None]
    if not timed:
        panel.empty = "Nothing that was forecast has run yet."
        return panel
    panel.lines.append(
        ChartPath(f"M{x(low):g} {y(low):g}L{x(high):g} {y(high):g}", "zero", "forecast = measured")
    )
    inside = 0
    shown = {e.node.id for e in timed[:: -(-len(timed) // MOST_DOTS)]}
    for e in timed:
        assert e.belief is not None
        assert e.measured is not None
        half = Z90 * e.belief.sd
        hit = abs(e.measured - e.belief.mean) <= half
        inside += hit
        if e.node.id not in shown:
            continue
        at, css = -e.belief.mean, "faster" if hit else "missed"
        panel.lines.append(
            ChartPath(f"M{x(at - half):g} {y(-e.measured):g}H{x(at + half):g}", f"interval {css}")
        )
        panel.dots.append(ChartMark(x(at), y(-e.measured), css, _forecast_title(e, labels), e.node.id, 3.5))
    panel.note = (
        f"{inside} of {len(timed)} ({percent(inside / len(timed))}) lie inside their 90 % interval "
        f"(blue; the others are orange), 90 % should. What was measured was chosen by these forecasts."
    )
    if failed:
        chance = sum(e.belief.p_fail for e in failed if e.belief is not None) / len(failed)
        ran = sum(e.belief.p_fail for e in timed if e.belief is not None) / len(timed)
        panel.note += (
            f" {len(failed)} failed and have no place here: they were given a {percent(chance)} chance "
            f"of that, what ran {percent(ran)}."
        )
    if len(shown) < len(timed):
        panel.note += f" {len(shown)} are drawn, the counts are of all."
    return panel


def _forecast_title(e: ReportNode, labels: dict[str, str]) -> str:
    assert e.belief is not None
    assert e.measured is not None
    return (
        f"{labels.get(e.node.id, e.node.id)}: forecast {factor_text(-e.belief.mean)}, "
        f"measured {factor_text(-e.measured)}"
    )
