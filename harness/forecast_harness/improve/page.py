"""The result of an improvement, as a table for people and as one HTML page."""

from __future__ import annotations

import difflib
from contextlib import suppress
from html import escape
from pathlib import Path

from forecast_autotune.errors import RecordError
from forecast_autotune.printable import count_text, printable
from forecast_autotune.records.named_lines import read_document
from forecast_harness.improve.parts import Part
from forecast_harness.improve.session import Improvement
from forecast_harness.targets.packs.load import load_pack

_NAME = 48
_SMALL_SHARE = 0.05
"""Share of a step; libraries' kernels below it are summed up."""


def time_text(seconds: float) -> str:
    """A time with a unit that fits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us" if seconds else "-"


def rows(work: Improvement) -> list[tuple[str, ...]]:
    """Kernel, kind, share of a step, calls per step, median time, roofline, and what came of it.

    Small parts that are left and alike stand in one row.
    """
    small = [
        p for p in work.parts if not p.can_be_searched and p.kind == "library" and p.share < _SMALL_SHARE
    ]
    small = small if len(small) > 1 else []
    table: list[tuple[str, ...]] = [
        (
            printable(_short_name(p.name), _NAME),
            p.kind,
            f"{p.share:.1%}",
            f"{p.calls:.3g}",
            time_text(p.median_s),
            time_text(p.roofline_s),
            _outcome(work, p.name)
            or p.reason
            or ("below 1 % of a step" if p.share < 0.01 else "left: others promise more"),
        )
        for p in work.parts
        if p not in small
    ]
    if small:
        share = sum(p.share for p in small)
        table.append((f"{len(small)} others", "library", f"{share:.1%}", "", "", "", small[0].reason))
    return table


def _short_name(name: str) -> str:
    """The innermost function of a C++ name, and a name of Python's without `__main__`."""
    bare = name.replace("(anonymous namespace)", "").partition("(")[0].partition("<")[0].split()
    return bare[-1].rpartition("::")[2] if bare and "::" in name else name.removeprefix("__main__:")


HEADS = ("kernel", "kind", "share", "calls", "median", "roofline", "result")


def _outcome(work: Improvement, name: str) -> str:
    end = work.searches.get(name)
    if end is None:
        return ""
    if work.proof is not None and (gain := work.proof.parts.get(name)) is not None:
        return f"{gain.text} in the program"
    if work.proof is not None and name in work.proof.refused:
        return f"not kept: {work.proof.refused[name]}"
    if end.problem:
        return f"not searched: {end.problem}"
    if end.source:
        return f"{end.speedup:.2f}x where it was searched, not yet proved in the program"
    text = f"nothing faster was confirmed, {count_text(end.measured, 'source')} measured"
    return f"{text}; {end.silence}" if end.silence else text


def step_text(work: Improvement) -> str:
    """The step, before and after."""
    proof = work.proof
    if proof is None or proof.step is None:
        return f"step {time_text(work.step_s)} ({work.step_how})"
    return (
        f"step {time_text(proof.before_s)} before, {time_text(proof.after_s)} after: {proof.step.text} "
        f"({proof.how}); memory {proof.peak_before / 2**20:.0f} MiB before, {proof.peak_after / 2**20:.0f} after"
    )


def _own_source(part: Part) -> str:
    """The source that a search began with; empty where the folder has been moved since."""
    with suppress(OSError, RecordError):
        if part.function is not None:
            return load_pack(part.target).solutions[0].source
        return read_document(Path(part.target.rpartition(":")[0]))
    return ""


def page(work: Improvement) -> str:
    """The page: table, then what each search did and the difference of its source."""
    body = [f"<h1>{escape(' '.join(work.words))}</h1><p>{escape(step_text(work))}</p><table><tr>"]
    body += [f"<th>{h}</th>" for h in HEADS] + ["</tr>"]
    for row in rows(work):
        body.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>")
    body.append("</table>")
    for part in work.parts:
        end = work.searches.get(part.name)
        if end is None:
            continue
        body.append(f"<h2>{escape(part.name)}</h2><p>{escape(_outcome(work, part.name))}</p>")
        if end.folder:
            link = f"{escape(end.folder)}/report.html"
            body.append(
                f'<p><a href="{link}">its search</a>: lineage, forecasts against measurements, costs</p>'
            )
        if end.source:
            own = _own_source(part)
            lines = difflib.unified_diff(
                own.splitlines(), end.source.splitlines(), "before", "after", lineterm=""
            )
            body.append(f"<pre>{escape(chr(10).join(lines))}</pre>")
    style = (
        "body{font:15px sans-serif;margin:2em auto;max-width:70em}td,th{text-align:left;padding:.2em .8em}"
        "pre{background:#f4f4f4;padding:1em}"
    )
    return f"<!doctype html><meta charset=utf-8><title>improve</title><style>{style}</style>{''.join(body)}\n"
