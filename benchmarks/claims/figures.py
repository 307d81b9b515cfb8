"""Figures in Markdown pages, and whether a claim backs each.

A figure is a number with a measured unit outside of code. A unit of text, which is a table row, a list item, a heading
or a paragraph, names claims by links to the page of claims or by a comment; each of its figures must be one that
a claim it names displays, in the same digits. A link on a number alone, with a unit or without, shows an estimate of
its claim and no end of an interval.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.claims.manifest import ROOT, Claim

CLAIMS_PAGE, RESULTS_PAGE = Path("docs/claims.md"), Path("docs/results.md")
REFERENCE = Path("docs/reference")
"""Pages written from the code's settings and options, which are definitions and no measurements."""

_UNITS = {
    "%": "%", "ns": "ns", "µs": "µs", "μs": "µs", "us": "µs", "ms": "ms", "s": "s", "second": "s", "seconds": "s",
    "minute": "min", "minutes": "min", "min": "min", "hour": "h", "hours": "h", "x": "x", "×": "x", "times": "x",
}  # fmt: skip
_NUMBER = r"[-+−]?\d[\d,]*(?:\.\d+)?"
_UNIT = "|".join(sorted(map(re.escape, _UNITS), key=len, reverse=True))
_FIGURE = re.compile(
    rf"(?<![\w.,])(?:(?P<low>{_NUMBER})\s?(?:to|–)\s)?(?P<number>{_NUMBER})\s?(?P<unit>{_UNIT})(?!\w)(?!\s\d)"
)
_QUOTE = re.compile(rf"\[({_NUMBER})(?:\s?({_UNIT}))?\]\([^)\s]*claims\.md#([\w.-]+)\)")
_INTERVAL_ENDS = ("_low", "_high", "_ends")
"""How names of figures end that are ends of an interval."""
_LINKED = re.compile(r"claims\.md#([\w.-]+)")
_NAMED = re.compile(r"<!--\s*claim:\s*([^>]*?)\s*-->")
_FREE = re.compile(r"<!--\s*no claim:\s*\S[^>]*-->")
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_TARGET = re.compile(r"\]\([^)\s]*\)|<[a-zA-Z/][^>]*>")
_FENCE = re.compile(r"^\s*(```+|~~~+)")
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s")


@dataclass(frozen=True)
class Figure:
    """A number and its unit, both in normal form: `1,000 us` and `1000 µs` are one figure."""

    number: str
    unit: str

    def __str__(self) -> str:
        return f"{self.number} {self.unit}"


@dataclass(frozen=True)
class Unit:
    """A table row, list item, heading or paragraph of a page, and the line that it begins on."""

    line: int
    text: str


def find_figures(text: str) -> list[Figure]:
    """All figures of a text, in order; of `1.3 to 2.3 s` both ends."""
    plain = text.replace("&nbsp;", " ")
    results = []
    for match in _FIGURE.finditer(plain):
        unit = _UNITS[match["unit"]]
        numbers = [n for n in (match["low"], match["number"]) if n]
        results += [Figure(n.replace(",", "").replace("−", "-").lstrip("+"), unit) for n in numbers]
    return results


def split_units(markdown: str) -> Iterator[Unit]:
    """The units of text of a page, fenced code left out."""
    fence, begin, lines = "", 0, list[str]()
    for number, line in enumerate(markdown.splitlines(), 1):
        mark = _FENCE.match(line)
        if mark and (not fence or line.strip().startswith(fence)):
            fence = "" if fence else mark[1]
            own, text = True, ""
        else:
            own = line.lstrip().startswith(("|", "#")) or not line.strip()
            text = "" if fence else line
        if (own or _ITEM.match(line)) and lines:
            yield Unit(begin, "\n".join(lines))
            lines = []
        if text.strip():
            begin = begin if lines else number
            lines.append(text)
            if own:
                yield Unit(begin, text)
                lines = []
    if lines:
        yield Unit(begin, "\n".join(lines))


def check_page(markdown: str, name: str, claims: Mapping[str, Claim]) -> list[str]:
    """Return what is wrong with the figures of one page."""
    problems = []
    for unit in split_units(markdown):
        where = f"{name}:{unit.line}"
        code_free = _CODE.sub(" ", unit.text)
        named = _LINKED.findall(code_free)
        named += [word for names in _NAMED.findall(code_free) for word in re.split(r"[\s,]+", names)]
        known = [claims[n] for n in named if n in claims]
        if unknown := sorted({n for n in named if n not in claims}):
            problems.append(f"{where}: no claim {', '.join(unknown)} in benchmarks/claims.toml")
        if _FREE.search(code_free):
            continue
        problems += [f"{where}: {message}" for message in _wrong_quotes(code_free, claims)]
        figures = find_figures(_TARGET.sub(" ", _COMMENT.sub(" ", code_free)))
        displayed = {f for c in known for text in c.figures.values() for f in find_figures(text)}
        for figure in dict.fromkeys(figures):
            if figure in displayed:
                continue
            shown = f"; {', '.join(c.id for c in known)} displays {', '.join(map(str, sorted(displayed, key=str)))}"
            problems.append(
                f"{where}: no claim backs the figure {figure}"
                + (shown if known else "; link to one, or mark it")
            )
    return problems


def _wrong_quotes(text: str, claims: Mapping[str, Claim]) -> Iterator[str]:
    """Return what is wrong with numbers that are links; figures that no claim displays are told elsewhere."""
    for number, unit, name in _QUOTE.findall(text):
        figures = claims[name].figures if name in claims else {}
        numbers = {label: re.findall(_NUMBER, text) for label, text in figures.items()}
        estimates = [n for label, ns in numbers.items() if not label.endswith(_INTERVAL_ENDS) for n in ns]
        displayed = any(number in ns for ns in numbers.values())
        if figures and number not in estimates and (displayed or not unit):
            yield f"a link shows an estimate of its claim, and {number} is none of {name}: {', '.join(estimates)}"


def check_pages(claims: list[Claim], root: Path = ROOT) -> list[str]:
    """Return what is wrong with the figures of README.md and of the pages below docs/, but those written from code."""
    by_id = {c.id: c for c in claims}
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    problems = []
    for page in pages:
        name = page.relative_to(root)
        if page.is_file() and name != CLAIMS_PAGE and REFERENCE not in name.parents:
            problems += check_page(page.read_text(encoding="utf-8"), str(name), by_id)
    return problems
