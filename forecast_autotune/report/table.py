"""Tables, panels and texts for a terminal, out of what others wrote: without control characters, bounded."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forecast_autotune.printable import LONGEST_NAME, LONGEST_TEXT, printable
from forecast_autotune.records import LLMConsultation
from forecast_autotune.report.chart import bar, milliseconds, percent, seconds, sparkline
from forecast_autotune.report.summary import ModelTally, consultation_text
from forecast_autotune.tuning.replays.replay import ReplayReport, ReplayRow


def shown_text(text: object, style: str = "", *, limit: int = LONGEST_TEXT, lines: bool = False) -> Text:
    """`printable(text, limit)` in a style; with `lines`, its line breaks stay, and `limit` holds for each line.

    Markup in it is not read.
    """
    return Text(printable(text, limit, lines=lines), style=style)


def model_tally(report: ReplayReport) -> ModelTally:
    """The sum of the model's parts in all problems of a replay."""
    tally = ModelTally()
    for row in report.rows:
        tally.add(row.llm)
    return tally


def model_rows(report: ReplayReport) -> list[tuple[str, str]]:
    """Lines of a replay's panel: the part of the model, or advice, and the sums without; empty where there was none."""
    if report.without is None:
        return []
    alone = report.without.summary()
    counts = sum(r.measured for r in report.rows), sum(r.measured for r in report.without.rows)
    texts = [
        f"{counts[1]} candidates measured (with it {counts[0]})",
        f"{percent(alone['geomean_regret'])} regret, {percent(alone['max_regret'])} at worst",
        f"{seconds(alone['tune_s'])} of tuning",
    ]
    if report.left_out == "advice":
        count = sum(bool(row.advice) for row in report.rows)
        return [("advice", f"in {count} of {len(report.rows)} decisions"), ("without it", ", ".join(texts))]
    line = model_tally(report).line().removeprefix("language model: ")
    return [("language model", line or "not asked: no decision was due"), ("without it", ", ".join(texts))]


_NARROW_COLUMNS = 110
"""Below so many columns the charts give way to the figures."""
_TINY_COLUMNS = 72
"""Below so many columns the times give way to the problems' names."""


_LEAST_NAME, _LEAST_CHART = 12, 8
"""Characters of a name, and of a text behind figures, that are worth more than a further column of figures."""


class _FittingTable(Table):
    """A table that leaves out columns from its right where too few characters would be left of the names."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines of the table without the columns that do not fit; those before the first figures stay."""
        fitting = copy.copy(self)
        names = next((i for i, c in enumerate(self.columns) if c.no_wrap), len(self.columns))
        while len(fitting.columns) > names and fitting._least_width(console, options) > options.max_width:
            fitting.columns = fitting.columns[:-1]
        yield from Table.__rich_console__(fitting, console, options)

    def _least_width(self, console: Console, options: ConsoleOptions) -> int:
        width = 3 * len(self.columns) - 1  # the edges, and what stands between two columns
        least = _LEAST_NAME
        for column in self.columns:
            cells = (column.header, *column.cells)
            whole = max(Measurement.get(console, options, cell).maximum for cell in cells)
            width += whole if column.no_wrap else min(whole, least)
            least = _LEAST_CHART if column.no_wrap else least
        return width


def plain_table(*columns: str, title: str = "") -> Table:
    """An airy table; a column whose name starts with `>` is aligned to the right, and never broken.

    Where it is too wide, it is printed without its last columns.
    """
    table = _FittingTable(
        box=box.SIMPLE_HEAD, pad_edge=False, title=title or None, title_justify="left", header_style="bold"
    )
    for name in columns:
        right = name.startswith(">")
        table.add_column(
            name.removeprefix(">"),
            justify="right" if right else "left",
            no_wrap=right,
            # Names tell rows apart, so all of a name is worth a second line; a chart is not.
            overflow="ellipsis" if any(c.no_wrap for c in table.columns) else "fold",
        )
    return table


def key_value_table(pairs: Iterable[tuple[str, str | Text]]) -> Table:
    """Names and values in two columns without lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in pairs:
        table.add_row(name, value if isinstance(value, Text) else shown_text(value))
    return table


def checklist(rows: Iterable[tuple[str, str, str, str]]) -> Table:
    """`doctor`'s lines: status, name, detail, remedy."""
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table.grid(padding=(0, 2))
    for whole in (True, True, False, False):  # a cut-off name says nothing, a wrapped remedy still helps
        table.add_column(no_wrap=whole)
    for status, name, detail, remedy in rows:
        table.add_row(
            shown_text(status, style=colours[status]),
            shown_text(name, style="bold"),
            shown_text(detail),
            shown_text(remedy, style=colours[status]),
        )
    return table


def settings_table(rows: Iterable[tuple[str, str, str]]) -> Table:
    """Variables, their values in force, and their meanings."""
    table = Table.grid(padding=(0, 2))
    for variable, value, meaning in rows:
        table.add_row(
            shown_text(variable), shown_text(value or "-", style="bold"), shown_text(meaning, style="dim")
        )
    return table


def _colour(regret: float, tolerance: float) -> str:
    if regret <= tolerance + 1e-9:
        return "green"
    return "yellow" if regret <= max(0.1, 5 * tolerance) else "red"


def replay_table(report: ReplayReport, *, width: int = 132, plain: bool = False) -> RenderableType:
    """One line per problem, with its regret after each measurement as a sparkline.

    `width` is the terminal's; `plain` uses ASCII only.
    """
    wide = width >= _NARROW_COLUMNS
    table = plain_table(
        "problem",
        ">measured",
        *(["share", "regret, falling"] if wide else []),
        ">regret",
        *([">stated risk"] if wide else []),
        *([">tuned in", ">all configs"] if width >= _TINY_COLUMNS else []),
        *([">faster"] if wide else []),
    )
    if wide:
        table.columns[0].overflow = "ellipsis"  # one line each, as charts are compared with those below
    for row in report.rows:
        table.add_row(*_cells(row, report.tolerance, width, plain))
    if not wide:
        return table
    low, high = ("_", "#") if plain else ("▁", "█")
    limit = percent(64 * max(report.tolerance, 0.005))
    legend = (
        "regret, falling: of the best config so far, after each measurement; "
        f"{low} within {percent(report.tolerance)}, each step doubles it, {high} above {limit}"
    )
    return Group(table, Padding(shown_text(legend, style="dim"), (0, 0, 1, 0)))


def _cells(row: ReplayRow, tolerance: float, width: int, plain: bool) -> list[Text]:
    colour = _colour(row.regret, tolerance)
    counts = [
        shown_text(row.label or row.kernel, limit=LONGEST_NAME),
        shown_text(f"{row.measured} of {row.candidates}"),
    ]
    regret = shown_text(percent(row.regret), style=colour)
    times = [shown_text(seconds(row.tune_s)), shown_text(seconds(row.exhaustive_s), style="dim")]
    if width < _NARROW_COLUMNS:
        return [*counts, regret, *(times if width >= _TINY_COLUMNS else [])]
    return [
        *counts,
        shown_text(bar(row.measured / row.candidates, plain=plain), style="cyan on grey23"),
        shown_text(sparkline(row.path, tolerance, plain=plain), style=colour),
        regret,
        shown_text(percent(row.stated_risk)),
        *times,
        shown_text(f"{row.exhaustive_s / max(row.tune_s, 1e-9):.0f}x"),
    ]


def model_comparison(report: ReplayReport) -> RenderableType:
    """One line per problem: what was measured, its regret and its seconds, with the model or advice and without it."""
    model = "the language model (candidates moved into and out of the plan, its weight)"
    subject = "advice" if report.left_out == "advice" else model
    table = plain_table(
        "problem",
        "advice" if report.left_out == "advice" else "model",
        ">measured",
        ">without",
        ">regret",
        ">without",
        ">tuned in",
        ">without",
        title=f"with {subject}, and without it",
    )
    for row, alone in zip(report.rows, report.without.rows if report.without else (), strict=True):
        table.add_row(
            shown_text(row.label or row.kernel, limit=LONGEST_NAME),
            shown_text(row.advice or "-" if report.left_out == "advice" else _consulted(row)),
            str(row.measured),
            shown_text(str(alone.measured), style="dim"),
            shown_text(percent(row.regret), style=_colour(row.regret, report.tolerance)),
            shown_text(percent(alone.regret), style="dim"),
            seconds(row.tune_s),
            shown_text(seconds(alone.tune_s), style="dim"),
        )
    return table


def _consulted(row: ReplayRow) -> str:
    part = row.llm
    if part is None:
        return "-"
    if not part.asked:
        return f"not asked: {part.why}"
    text = f"+{part.moved_in} -{part.moved_out} at {part.weight:.2f}"
    return f"{text}; {part.trouble}" if part.trouble else text


def replay_panel(report: ReplayReport) -> RenderableType:
    """A panel with the sums over all rows."""
    s = report.summary()
    shares = {name: percent(value) for name, value in s.items() if isinstance(value, float)}
    beyond = sum(row.regret > report.tolerance + 1e-9 for row in report.rows)
    speed = shown_text(f"{seconds(s['tune_s'])} instead of {seconds(s['exhaustive_s'])}: ")
    speed.append(f"{s['speedup']:.1f}x faster", style="bold green" if s["speedup"] > 1 else "bold red")
    regrets = f"{shares['geomean_regret']} geometric mean, {shares['p95_regret']} at the 95th percentile"
    miss_share = f"{shares['beyond_tolerance_share']} (forecast: {shares['mean_stated_risk']})"
    than = f"ended more than {shares['tolerance']} above the best config"
    pairs: list[tuple[str, str | Text]] = [
        ("problems", f"{s['problems']} of {s['kernels']} kernels"),
        ("measured", f"{shares['median_measured_share']} of the configs, median"),
        ("regret", f"{regrets}, {shares['max_regret']} at worst"),
        ("missed the tolerance", f"{miss_share}: {beyond} of {s['problems']} {than}"),
        ("tuning", speed),
        *([] if report.without is None else model_rows(report)),
        ("with", f"policy {s['policy']}, surrogate {s['surrogate']}"),
    ]
    return Panel(key_value_table(pairs), title="replay", title_align="left", border_style="dim", expand=False)


def store_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A table of a store's contents, per kernel and device."""
    table = plain_table(
        "kernel", "device", ">problems", ">decided", ">candidates", ">ok", ">failed", ">best", "last measured"
    )
    for row in rows:
        table.add_row(
            shown_text(row["kernel"], style="bold", limit=LONGEST_NAME),
            shown_text(row["device"], limit=LONGEST_NAME),
            str(row["problems"]),
            shown_text(str(row["decided"]), style="green" if row["decided"] == row["problems"] else "yellow"),
            str(row["candidates"]),
            str(row["ok"]),
            shown_text(str(row["failed"]), style="red" if row["failed"] else "dim"),
            milliseconds(row["best_ms"]),
            shown_text(str(row["last"]), style="dim", limit=LONGEST_NAME),
        )
    return table


_EVIDENCE = {
    "measured": "measured: it was timed for this decision",
    "forecast": "forecast: it was never timed",
    "stored": "stored: earlier measurements were enough",
    "only": "only: there was nothing to decide",
}


def decision_explanation(problem: Mapping[str, Any], top: int) -> RenderableType:
    """Why one problem got its config; `problem` is an entry of `explain --json`."""
    title = Text("  ").join(
        (
            shown_text(problem["kernel"], "bold", limit=LONGEST_NAME),
            shown_text(" ".join(problem["key"])),
            shown_text(problem["device"], "dim", limit=LONGEST_NAME),
        )
    )
    parts: list[RenderableType] = [
        title,
        Padding(key_value_table(_decision_rows(problem["decision"])), (0, 0, 0, 2)),
    ]
    fast = [m for m in problem["measurements"] if m["outcome"] == "ok"]
    choice = None if problem["decision"] is None else problem["decision"]["candidate"]
    if fast:
        table = plain_table("", "config", ">measured", ">forecast", ">90 % range", ">off by")
        for place, m in enumerate(fast[:top], 1):
            chosen = m["candidate"] == choice
            mark = f"{place} *" if chosen else f"{place}"
            table.add_row(mark, *_forecast_cells(m, fast[0]["median_ms"]), style="bold" if chosen else "")
        parts.append(Padding(table, (0, 0, 0, 2)))
    failures: dict[str, int] = {}
    for m in problem["measurements"]:
        if m["outcome"] != "ok":
            failures[m["outcome"]] = failures.get(m["outcome"], 0) + 1
    remarks = ["* chosen"] if any(m["candidate"] == choice for m in fast[:top]) else []
    remarks += [f"{len(fast) - top} slower ones ran, too"] if len(fast) > top else []
    remarks += [f"{count} {outcome}" for outcome, count in sorted(failures.items())]
    if remarks:
        parts.append(Padding(shown_text("; ".join(remarks), style="dim"), (0, 0, 1, 2)))
    return Group(*parts)


def _forecast_cells(m: Mapping[str, Any], best_ms: float) -> list[Text]:
    slower = m["median_ms"] / best_ms - 1
    time_text = shown_text(milliseconds(m["median_ms"]))
    time_text.append(f"  +{percent(slower)}" if slower > 0 else "  best", style="dim")
    cells = [shown_text(m["shown"], limit=LONGEST_NAME), time_text]
    forecast = m["forecast"]
    if forecast is None:
        return [*cells, shown_text("-"), shown_text("-"), shown_text("-")]
    low, high = forecast["low_ms"], forecast["high_ms"]
    inside = low <= m["median_ms"] <= high
    return [
        *cells,
        shown_text(milliseconds(forecast["ms"], 3)),
        shown_text(f"{milliseconds(low, 2)} - {milliseconds(high, 2)}", style="dim"),
        shown_text(_distance(forecast["ms"] / m["median_ms"]), style="green" if inside else "yellow"),
    ]


def _distance(ratio: float) -> str:
    """The error of a forecast: `1.08x too low`; without a direction where it rounds to 1."""
    factor = max(ratio, 1 / ratio)
    text = f"{factor:.2f}x" if factor < 9.995 else f"{factor:.0f}x"
    return text if text == "1.00x" else f"{text} too {'high' if ratio > 1 else 'low'}"


def _decision_rows(decision: Mapping[str, Any] | None) -> list[tuple[str, str | Text]]:
    if decision is None:
        return [("decision", shown_text("none stored: measured, imported or interrupted", style="yellow"))]
    cost = decision["cost"]
    cost_text = (
        f"{seconds(cost['wall_s'])}: {seconds(cost['forecast_s'])} forecasting, {seconds(cost['compile_s'])} "
        f"compiling ({cost['compiled']} configs, in parallel), {seconds(cost['timing_s'])} timing"
    )
    if decision["saved_s"] >= 1:
        cost_text += f"; about {seconds(decision['saved_s'])} saved"
    choice = shown_text(decision["shown"], style="bold green", limit=LONGEST_NAME)
    if decision["median_ms"] is not None:
        choice.append(f"   {milliseconds(decision['median_ms'])}", style="bold")
    tolerance = percent(decision["tolerance"])
    risk = f"{percent(decision['stated_risk'])} that a better one (more than {tolerance} faster) is untried"
    counts = f"{decision['candidates']}: {decision['measured']} measured, {decision['known']} known before, "
    counts += (
        f"{decision['trusted']} trusted to be no faster, {decision['refused']} refused as unable to launch"
    )
    pairs: list[tuple[str, str | Text]] = [
        ("chosen", choice),
        ("evidence", _EVIDENCE.get(decision["evidence"], decision["evidence"])),
        ("because", decision["reason"]),
        ("stated risk", risk),
        ("candidates", counts),
        ("cost", cost_text),
        ("decided", decision["at"]),
    ]
    if decision.get("llm") is not None:
        message = consultation_text(LLMConsultation.from_json(decision["llm"]))
        pairs.append(("language model", message.removeprefix("language model ")))
    return pairs + [(f"plan {i}", text) for i, text in enumerate(decision["rounds"], 1)]
