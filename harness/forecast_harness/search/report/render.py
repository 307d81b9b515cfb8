"""A search as one self-contained HTML page: nothing is loaded, and nothing from a source is ever markup.

Sources and whatever models wrote are hostile text: the templates escape everything, the script only sets
`textContent`, and the page's own content policy lets no script run but that one.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.report.chart import milliseconds, percent, seconds
from forecast_autotune.report.page import STYLE
from forecast_harness.search import codec
from forecast_harness.search.report import charts, sources, tables, tree
from forecast_harness.search.report.scales import factor
from forecast_harness.search.report.sources import visible
from forecast_harness.search.report.story import Entry, Story

MOST_NODES = 3_000
"""So many nodes can be chosen in a page; of larger searches the page holds the most important ones."""
_FEEDBACK = 4_000
"""Characters."""
_FACTS = 12
"""Facts of the harness about a node that are shown."""
_LEGEND = (
    ("faster", "faster than the seed"),
    ("slower", "slower"),
    ("failed", "failed"),
    ("waiting", "never measured"),
)


class MissingTemplates(ForecastAutotuneError):
    """A page was asked for and jinja2 is not installed."""


def page(story: Story, *, live: bool = False, revision: str = "") -> str:
    """The whole file. `live`: it asks its server every other second for news after `revision`.

    Raises `MissingTemplates` when jinja2 is not installed.
    """
    parts = pieces(story, revision=revision)
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}; base-uri 'none'; form-action 'none'"
    )
    from markupsafe import Markup

    html: str = _template("page.html.j2").render(
        title=f"search of {visible(story.target.name)}",
        policy=policy,
        live=live,
        style=Markup(STYLE + _asset("page.css")),
        script=Markup(script),
        content=Markup(parts["content"]),
        data=Markup(embedded(parts["data"])),
    )
    return html


def pieces(story: Story, *, revision: str = "") -> dict[str, Any]:
    """What changes while a search runs: `content`, HTML, and `data`, what the script shows of nodes."""
    labels = {name: label(entry) for name, entry in story.entries.items()}
    final = story.final
    best = final.node if final and final.node in story.entries else story.root
    drawing = tree.draw(story)
    data = {"revision": revision, **_data(story, best)}
    workloads = tables.workloads(story)
    content = _template("content.html.j2").render(
        head=_head(story),
        cards=tables.cards(story),
        progress=[charts.progress(story, labels, by=by) for by in ("measurements", "device_seconds")],
        forecasts=[charts.scatter(story, labels), charts.reliability(story)],
        legend=_LEGEND,
        tree=drawing,
        tree_note=_tree_note(drawing),
        labels=labels,
        best=best,
        finalists=tables.finalists(story, workloads),
        finalists_note=_finalists_note(story),
        workloads=[visible(w) for w in workloads],
        budget=tables.budget(story),
        kinds=tables.kinds(story),
        arms=tables.arms(story),
        outcomes=tables.outcomes(story),
        lost=_lost(story),
        problems=[(visible(text), count) for text, count in story.problems.most_common(20)],
        notes=_notes(story, data),
        context=visible(json.dumps(codec.to_json(story.context), indent=2, ensure_ascii=False)),
    )
    return {"content": content, "data": data}


def embedded(data: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def label(entry: Entry) -> str:
    """A node's short name for people: its number and how it did."""
    return f"#{entry.number} {result(entry)}"


def result(entry: Entry) -> str:
    """How a node did, in a word or two."""
    if entry.score is not None and (entry.node.parents or entry.judged is not None):
        return factor(-entry.score)
    return "seed" if entry.kind == "seed" and entry.judged is None else entry.status


def _heading(story: Story, entry: Entry) -> str:
    again = story.confirmed.get(entry.node.id)
    if again is None:
        return result(entry)
    if again.log2_ratio is None:
        return f"{result(entry)}, but not confirmed: {again.outcome}".replace("_", " ")
    how = "confirmed" if again.evidence == "confirmed" else "not shown to be faster"
    return f"{factor(-again.log2_ratio)}, {how} ({result(entry)} during the search)"


def _head(story: Story) -> dict[str, str]:
    target, context, settings = story.target, story.context, story.context.settings
    return {
        "title": f"Search of {visible(target.name)}",
        "about": visible(
            f"{target.kind} in {target.language} on {context.device}, started {_moment(story.at)}; "
            f"archive {settings.archive}, proposers {', '.join(settings.proposers) or 'none'}, surrogate "
            f"{context.surrogate}, seed {settings.seed}. Speed-ups are over node #0, the first seed."
            + (f" Taken up again {story.resumed} times." if story.resumed else "")
        ),
        "statement": visible(target.statement),
    }


def _moment(at: str) -> str:
    return at.replace("T", " ").replace("+00:00", " UTC").replace("Z", " UTC") or "at an unknown time"


def _data(story: Story, best: str) -> dict[str, Any]:
    order = tree.important(story)[:MOST_NODES]
    written = sources.bounded(story.entries[n].node for n in order)
    texts = {n.id: number for number, n in enumerate(written)}
    nodes: dict[str, Any] = {}
    for name in order:
        entry = story.entries[name]
        parent = entry.node.parents[0] if entry.node.parents else ""
        known = parent if parent in story.entries else ""
        nodes[name] = {
            "label": f"#{entry.number}",
            "result": _heading(story, entry),
            "note": visible(entry.node.provenance.note),
            "parent": known,
            "facts": _facts(story, entry),
            "ran": entry.score is not None,
            "feedback": visible(entry.judged.feedback[:_FEEDBACK]) if entry.judged else "",
            "source": texts.get(name, -1),
            "cut": sources.shown(entry.node.source).cut,
            "steps": sources.difference(story.entries[known].node.source, entry.node.source)
            if known in texts and name in texts
            else None,
        }
    return {
        "best": best,
        "over": story.stopped is not None and not story.stopped.interrupted,
        "nodes": nodes,
        "sources": [sources.shown(n.source).lines for n in written],
    }


def _facts(story: Story, entry: Entry) -> list[tuple[str, list[tuple[str, str]]]]:
    """Groups of (name, value); a value that is a node's id becomes a link."""
    node, judged, belief = entry.node, entry.judged, entry.belief
    found: list[tuple[str, list[tuple[str, str]]]] = []
    if judged is not None:
        found.append(("Result", _judged_facts(entry)))
        if judged.seconds:
            times = [(k, milliseconds(1000 * v)) for k, v in list(judged.seconds.items())[:12]]
            found.append(("Times", times))
    again = story.confirmed.get(node.id)
    if again is not None and again.log2_ratio is not None:
        between = tables.interval_text(again.log2_ratio, again.sd)
        pairs = [("speed-up", factor(-again.log2_ratio)), ("95 % interval", between)]
        found.append(("Confirmation, over the seed", pairs))
    if belief is not None:
        pairs = [
            ("speed-up", tables.forecast(belief)),
            ("over", entry.reference),
            ("P(better)", percent(belief.p_better)),
            ("P(fails)", percent(belief.p_fail)),
        ]
        if belief.abstains:
            pairs.append(("says", "that it does not know"))
        if belief.note:
            pairs.append(("note", belief.note))
        found.append(("Belief before it ran", pairs))
    origin = node.provenance
    made = [("parent" if n == 0 else "and", name) for n, name in enumerate(node.parents)]
    made += [("arm", node.arm), ("origin", str(origin.origin)), ("author", origin.author), ("at", origin.at)]
    made += [
        ("batch", str(node.batch) if node.request else ""),
        ("language", node.language),
        ("id", node.id[:12]),
    ]
    if entry.reason:
        made.append(("measured as", f"{entry.reason} (probability {percent(entry.propensity)})"))
    found.append(("Provenance", made))
    facts = judged.facts if judged is not None else {}
    told = [(name, _short(value)) for name, value in facts.items() if value not in (None, "", [], {}, ())]
    found.append(("Harness", told[:_FACTS]))
    return [(name, [(visible(k), visible(v)) for k, v in pairs if v]) for name, pairs in found if pairs]


def _judged_facts(entry: Entry) -> list[tuple[str, str]]:
    judged = entry.judged
    assert judged is not None
    pairs = [("outcome", f"{judged.outcome}{f' at {judged.stage}' if judged.stage else ''}")]
    if entry.score is not None:
        pairs += [
            ("speed-up", factor(-entry.score)),
            ("95 % interval", tables.interval_text(entry.score, entry.sd)),
        ]
    if judged.log2_ratio is not None and judged.against != entry.node.id:
        pairs += [("timed beside", judged.against), ("over that", factor(-judged.log2_ratio))]
    pairs += [
        ("config", tables.config_text(judged.config)),
        ("configs timed", f"{judged.measurements:,}" if judged.measurements else ""),
        ("device time", seconds(judged.device_seconds) if judged.device_seconds else ""),
        ("device", judged.device),
    ]
    return pairs


def _short(value: Any) -> str:
    text = tables.config_text(value) if isinstance(value, Mapping) else str(value)
    return text if len(text) <= 160 else text[:160] + "..."


def _tree_note(drawing: tree.Tree) -> str:
    if not drawing.thinned:
        return "A number is a node's own."
    return (
        f"{len(drawing.leaves):,} of {drawing.total:,} nodes are drawn: the best with their ancestors first, "
        "then what ran, failed and waits; +n counts children left out."
    )


def _finalists_note(story: Story) -> str:
    if story.confirmed:
        return "Timed again beside the first seed in a fresh process with fresh inputs."
    over = " so far" if story.stopped is None or story.stopped.interrupted else ""
    return f"The fastest of the search{over}, not confirmed: chosen for being low, these times flatter them."


def _lost(story: Story) -> str:
    if not story.lost:
        return ""
    last = story.lost[-1]
    return visible(
        f"{len(story.lost)} jobs were lost with their lanes and tried again; the last one"
        f"{f' on {last.lane}' if last.lane else ''}: {last.reason[:300]}"
    )


def _notes(story: Story, data: Mapping[str, Any]) -> list[str]:
    notes = []
    total, kept, texts = len(story.entries), len(data["nodes"]), len(data["sources"])
    if kept < total:
        notes.append(
            f"{kept:,} of {total:,} nodes can be chosen here, the most important ones; the log has all."
        )
    if texts < kept:
        notes.append(
            f"This page holds the sources of {texts:,} nodes; all are in the folder `nodes` beside it."
        )
    notes.append(
        "Intervals are normal approximations from the paired timings, along the chain of comparisons to the "
        "first seed. Written by forecast-autotune."
    )
    return notes


@cache
def _asset(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")


@cache
def _template(name: str) -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise MissingTemplates(
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
