"""A search as one self-contained HTML page: nothing is loaded, and nothing from a source is ever markup.

Sources and whatever models wrote are hostile text: the templates escape everything, the script only sets
`textContent`, and the page's own content policy lets no script run but that one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.records import codec
from forecast_autotune.report.chart import milliseconds, percent, seconds
from forecast_autotune.report.page_parts import STYLE, page_file, policy_source
from forecast_harness.search.report import figures
from forecast_harness.search.report.figures import ReportNode, SearchReport, escape_invisible, factor_text

MAX_LISTED_NODES = 400
"""Rows of the list of nodes; the rest are counted below it."""


def path_to_root(report: SearchReport, name: str) -> list[str]:
    """The node and its ancestors by first parents, youngest first."""
    path: dict[str, None] = {}
    while name in report.entries and name not in path:
        path[name] = None
        parents = report.entries[name].node.parents
        name = parents[0] if parents else ""
    return list(path)


def by_importance(report: SearchReport) -> list[str]:
    """All node ids, by importance to a reader: ends and their ancestors, then by kind and speed."""
    final = report.final
    ends = [*([final.node] if final else []), *sorted(report.state.confirmed), *report.state.seeds]
    first = [n for end in ends for n in path_to_root(report, end)]
    rank = {"seed": 0, "faster": 1, "slower": 2, "failed": 3, "waiting": 4}

    def key(entry: ReportNode) -> tuple[int, float, int]:
        return rank[entry.kind], entry.score or 0.0, -entry.number

    rest = sorted(report.entries.values(), key=key)
    return list(dict.fromkeys([*first, *(e.node.id for e in rest)]))


def lineage_rows(
    report: SearchReport, order: Sequence[str], best: str
) -> list[tuple[str, str, str, str, str]]:
    """(id, number and result, CSS class, number of the parent, change) of the first nodes of `order`."""
    rows = []
    for name in order[:MAX_LISTED_NODES]:
        entry = report.entries[name]
        parent = report.entries.get(next(iter(entry.node.parents), ""))
        rows.append(
            (
                name,
                node_label(entry),
                "good" if name == best else entry.kind,
                "" if parent is None else f"from #{parent.number}",
                escape_invisible(entry.node.provenance.note),
            )
        )
    return rows


# --- the page ---


MOST_NODES = 3_000
"""Nodes of a page at most: the most important ones of a larger search."""
_MAX_FEEDBACK_CHARS = 4_000
"""Characters of a node's feedback."""
_MAX_FACTS = 12
"""Facts of the harness about a node that are shown."""


class MissingTemplateEngine(ForecastAutotuneError):
    """A page was asked for and jinja2 is not installed."""


def render_page(report: SearchReport) -> str:
    """The whole file. Raises `MissingTemplateEngine` when jinja2 is not installed."""
    parts = render_parts(report)
    script = page_file(__package__, "templates/page.js")
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src {policy_source(script)}; img-src data:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    from markupsafe import Markup

    html: str = _template("page.html.j2").render(
        title=f"search of {escape_invisible(report.state.target.name)}",
        policy=policy,
        style=Markup(STYLE + page_file(__package__, "templates/page.css")),
        script=Markup(script),
        content=Markup(parts["content"]),
        data=Markup(json_for_script(parts["data"])),
    )
    return html


def render_parts(report: SearchReport) -> dict[str, Any]:
    """The parts of a page that are the search's: `content`, HTML, and `data`, which the script shows."""
    final = report.final
    best = final.node if final and final.node in report.entries else report.root
    order = by_importance(report)[:MOST_NODES]
    data = _page_data(report, order, best)
    workloads = figures.workload_names(report)
    content = _template("content.html.j2").render(
        head=_page_header(report),
        cards=figures.header_cards(report),
        progress=figures.progress_chart(report),
        coverage=figures.coverage_text(report),
        lineage=lineage_rows(report, order, best),
        nodes=len(report.entries),
        finalists=figures.finalist_rows(report, workloads),
        finalists_note=_finalists_note(report),
        workloads=[escape_invisible(w) for w in workloads],
        budget=figures.bars_of_budget(report.state.spent, report.state.settings.budget),
        kinds=figures.cost_rows(report),
        lost=_lost_jobs_note(report),
        problems=[(escape_invisible(text), count) for text, count in report.problems.most_common(20)],
        notes=_footnotes(report, data),
        context=escape_invisible(
            json.dumps(codec.to_json(report.state.context), indent=2, ensure_ascii=False)
        ),
    )
    return {"content": content, "data": data}


def json_for_script(data: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def node_label(entry: ReportNode) -> str:
    """A node's short name for people: its number and how it did."""
    return f"#{entry.number} {result_text(entry)}"


def result_text(entry: ReportNode) -> str:
    """A node's result, in a word or two."""
    if entry.score is not None and (entry.node.parents or entry.judged is not None):
        return factor_text(-entry.score)
    return "seed" if entry.kind == "seed" and entry.judged is None else entry.status


def _node_heading(report: SearchReport, entry: ReportNode) -> str:
    confirmation = report.state.confirmed.get(entry.node.id)
    if confirmation is None:
        return result_text(entry)
    if confirmation.log2_ratio is None:
        return f"{result_text(entry)}, but not confirmed: {confirmation.outcome}".replace("_", " ")
    verdict = "confirmed" if confirmation.evidence == "confirmed" else "not shown to be faster"
    return f"{factor_text(-confirmation.log2_ratio)}, {verdict} ({result_text(entry)} during the search)"


def _page_header(report: SearchReport) -> dict[str, str]:
    target, context, settings = report.state.target, report.state.context, report.state.settings
    model = figures.model_text(report.state)
    at = report.state.started.at if report.state.started else ""
    start = at.replace("T", " ").replace("+00:00", " UTC").replace("Z", " UTC") or "at an unknown time"
    return {
        "title": f"Search of {escape_invisible(target.name)}",
        "about": escape_invisible(
            f"{target.kind} in {target.language} on {context.device}, started {start}; "
            f"archive {settings.archive}, proposers {', '.join(settings.proposers) or 'none'}, surrogate "
            f"{context.surrogate}, seed {settings.seed}. Speed-ups are over node #0, the first seed."
            + (f" Taken up again {report.state.resumed} times." if report.state.resumed else "")
            + (f" Language model: {model}." if model else "")
        ),
        "statement": escape_invisible(target.statement),
    }


def _page_data(report: SearchReport, order: Sequence[str], best: str) -> dict[str, Any]:
    sources = figures.sources_within(report.entries[n].node for n in order)
    texts = {n.id: number for number, n in enumerate(sources)}
    nodes: dict[str, Any] = {}
    for name in order:
        entry = report.entries[name]
        parent = entry.node.parents[0] if entry.node.parents else ""
        base = parent if parent in report.entries else ""
        nodes[name] = {
            "label": f"#{entry.number}",
            "result": _node_heading(report, entry),
            "note": escape_invisible(entry.node.provenance.note),
            "parent": base,
            "facts": _node_facts(report, entry),
            "ran": entry.score is not None,
            "feedback": escape_invisible(entry.judged.feedback[:_MAX_FEEDBACK_CHARS]) if entry.judged else "",
            "source": texts.get(name, -1),
            "cut": figures.display_source(entry.node.source).cut,
            "steps": figures.line_opcodes(report.entries[base].node.source, entry.node.source)
            if base in texts and name in texts
            else None,
        }
    return {
        "best": best,
        "nodes": nodes,
        "sources": [figures.display_source(n.source).lines for n in sources],
    }


def _node_facts(report: SearchReport, entry: ReportNode) -> list[tuple[str, list[tuple[str, str]]]]:
    """Groups of (name, value); a value that is a node's id becomes a link."""
    node, result, belief = entry.node, entry.judged, entry.belief
    groups: list[tuple[str, list[tuple[str, str]]]] = []
    if result is not None:
        groups.append(("Result", _result_facts(entry)))
        if result.seconds:
            times = [(k, milliseconds(1000 * v)) for k, v in list(result.seconds.items())[:12]]
            groups.append(("Times", times))
    confirmation = report.state.confirmed.get(node.id)
    if confirmation is not None and confirmation.log2_ratio is not None:
        between = figures.interval_text(confirmation.log2_ratio, confirmation.sd)
        pairs = [("speed-up", factor_text(-confirmation.log2_ratio)), ("95 % interval", between)]
        groups.append(("Confirmation, over the seed", pairs))
    if belief is not None:
        pairs = [
            ("speed-up", figures.forecast_text(belief)),
            ("over", entry.reference),
            ("P(better)", percent(belief.p_better)),
            ("P(fails)", percent(belief.p_fail)),
        ]
        if belief.abstains:
            pairs.append(("says", "that it does not know"))
        if belief.note:
            pairs.append(("note", belief.note))
        groups.append(("Belief before it ran", pairs))
    origin = node.provenance
    origins = [("parent" if n == 0 else "and", name) for n, name in enumerate(node.parents)]
    origins += [
        ("arm", node.arm),
        ("origin", str(origin.origin)),
        ("author", origin.author),
        ("at", origin.at),
    ]
    origins += [
        ("batch", str(node.batch) if node.request else ""),
        ("language", node.language),
        ("id", node.id[:12]),
    ]
    if entry.reason:
        origins.append(("measured as", f"{entry.reason} (probability {percent(entry.propensity)})"))
    groups.append(("Provenance", origins))
    facts = result.facts if result is not None else {}
    harness_facts = [
        (name, _short_value(value)) for name, value in facts.items() if value not in (None, "", [], {}, ())
    ]
    groups.append(("Harness", harness_facts[:_MAX_FACTS]))
    return [
        (name, [(escape_invisible(k), escape_invisible(v)) for k, v in pairs if v])
        for name, pairs in groups
        if pairs
    ]


def _result_facts(entry: ReportNode) -> list[tuple[str, str]]:
    result = entry.judged
    assert result is not None
    pairs = [("outcome", f"{result.outcome}{f' at {result.stage}' if result.stage else ''}")]
    if entry.score is not None:
        pairs += [
            ("speed-up", factor_text(-entry.score)),
            ("95 % interval", figures.interval_text(entry.score, entry.sd)),
        ]
    if result.log2_ratio is not None and result.against != entry.node.id:
        pairs += [("timed beside", result.against), ("over that", factor_text(-result.log2_ratio))]
    pairs += [
        ("config", figures.config_text(result.config)),
        ("configs timed", f"{result.measurements:,}" if result.measurements else ""),
        ("device time", seconds(result.device_seconds) if result.device_seconds else ""),
        ("device", result.device),
    ]
    return pairs


def _short_value(value: Any) -> str:
    text = figures.config_text(value) if isinstance(value, Mapping) else str(value)
    return text if len(text) <= 160 else text[:160] + "..."


def _finalists_note(report: SearchReport) -> str:
    if report.state.confirmed:
        return "Timed again beside the first seed in a fresh process with fresh inputs."
    note = " so far" if report.state.stopped is None or report.state.stopped.interrupted else ""
    return f"The fastest of the search{note}, not confirmed: chosen for being low, these times flatter them."


def _lost_jobs_note(report: SearchReport) -> str:
    if not report.lost:
        return ""
    last = report.lost[-1]
    return escape_invisible(
        f"{len(report.lost)} jobs were lost with their lanes and tried again; the last one"
        f"{f' on {last.lane}' if last.lane else ''}: {last.reason[:300]}"
    )


def _footnotes(report: SearchReport, data: Mapping[str, Any]) -> list[str]:
    notes = []
    total, node_count, source_count = len(report.entries), len(data["nodes"]), len(data["sources"])
    if node_count < total:
        notes.append(
            f"{node_count:,} of {total:,} nodes can be chosen here, the most important ones; the log has all."
        )
    if source_count < node_count:
        notes.append(
            f"This page holds the sources of {source_count:,} nodes; all are in the folder `nodes` beside it."
        )
    notes.append(
        "Intervals are normal approximations from the paired timings, along the chain of comparisons to the "
        "first seed. Written by forecast-autotune."
    )
    return notes


@cache
def _template(name: str) -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise MissingTemplateEngine(
            f"the page needs jinja2, which torch brings ({error}): pip install 'forecast-autotune[llm]'"
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("forecast_harness.search.report", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    return environment.get_template(name)
