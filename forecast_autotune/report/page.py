"""A replay as one self-contained HTML page: no network, no script, everything escaped."""

from __future__ import annotations

import base64
from html import escape

from forecast_autotune.printable import LONGEST_NAME, printable
from forecast_autotune.report.chart import milliseconds, percent, seconds, sparkline
from forecast_autotune.tuning.replays.replay import ReplayReport, ReplayRow

STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --soft: #6e7781; --line: #e3e7eb; --paper: #fff; }
:root { --good: #1a7f37; --fair: #9a6700; --bad: #cf222e; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); }
body { margin: 2.5rem auto; max-width: 78rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } p { color: var(--soft); margin: .2rem 0 1.4rem; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin-bottom: 1.5rem; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .6rem 1rem; }
.card b { display: block; font-size: 1.35rem; } .card span { color: var(--soft); font-size: .85rem; }
img { width: 100%; height: auto; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, td.text { text-align: left; }
th { position: sticky; top: 0; background: var(--paper); }
td.line { font-family: monospace; letter-spacing: -1px; text-align: left; }
.good { color: var(--good); } .fair { color: var(--fair); } .bad { color: var(--bad); }
"""
"""Of all pages; a page that also has a dark face sets the variables anew."""

_HEADS = (
    "problem",
    "measured",
    "regret per measurement",
    "regret",
    "stated risk",
    "chosen",
    "its time",
    "tuned in",
    "all configs",
    "evidence",
)


def render_page(report: ReplayReport, picture: bytes) -> str:
    """The page; `picture` is the PNG of `report.plot.png`."""
    s = report.summary()
    cards = (
        (f"{s['speedup']:.1f}x", "faster tuning"),
        (percent(s["median_measured_share"]), "of configs measured (median)"),
        (percent(s["geomean_regret"]), "regret (geometric mean)"),
        (percent(s["beyond_tolerance_share"]), f"of problems beyond {percent(s['tolerance'])}"),
        (percent(s["mean_stated_risk"]), "stated risk (mean)"),
        (seconds(s["tune_s"]), f"tuning, not {seconds(s['exhaustive_s'])}"),
    )
    shown = "".join(f'<div class="card"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in cards)
    about = (
        f"{s['problems']} problems of {s['kernels']} kernels; policy {s['policy']}, "
        f"surrogate {s['surrogate']}, prior {s['prior']}; "
        f"accepted: {percent(s['risk'])} risk of more than {percent(s['tolerance'])} regret."
    )
    heads = "".join(f"<th>{escape(name)}</th>" for name in _HEADS)
    body = "\n".join(_row(row, report.tolerance) for row in report.rows)
    image = base64.b64encode(picture).decode("ascii")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>forecast-autotune replay</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<h1>forecast-autotune replay</h1>\n<p>{escape(printable(about))}</p>\n<div class="cards">{shown}</div>\n'
        '<img alt="Regret over measurements, and tuning seconds per problem" '
        f'src="data:image/png;base64,{image}">\n<div class="scroll"><table>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>\n"
        "</body>\n</html>\n"
    )


def _row(row: ReplayRow, tolerance: float) -> str:
    within = row.regret <= tolerance + 1e-9
    colour = "good" if within else "fair" if row.regret <= max(0.1, 5 * tolerance) else "bad"
    cells = (
        ("", printable(row.label or row.kernel, LONGEST_NAME)),
        ("", f"{row.measured} of {row.candidates}"),
        (f"line {colour}", sparkline(row.path, tolerance)),
        (colour, percent(row.regret)),
        ("", percent(row.stated_risk)),
        ("text", row.chosen),
        ("", milliseconds(row.chosen_ms)),
        ("", seconds(row.tune_s)),
        ("", seconds(row.exhaustive_s)),
        ("", row.evidence),
    )
    return (
        "<tr>"
        + "".join(f'<td class="{name}">{escape(printable(text))}</td>' for name, text in cells)
        + "</tr>"
    )
