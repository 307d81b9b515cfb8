"""The results page: every claim with its figures, how it was measured, and whether its sources have changed since."""

from __future__ import annotations

import re
from collections.abc import Mapping

from benchmarks.claims.history import Staleness
from benchmarks.claims.manifest import Claim

AREAS = {
    "tuning": "Tuning a kernel",
    "forecasting": "Forecasts",
    "inductor": "torch.compile",
    "llm": "Language models",
    "variants": "Other sources of a kernel",
    "search": "Search",
    "verification": "Verification and comparison",
    "store": "The store",
    "fleet": "A fleet",
    "devices": "Other devices",
    "bridges": "Other tools",
    "corpus": "Recorded data",
}
"""Heading by area, in the order of the page."""

_HEAD = """<!-- Written by `python -m benchmarks page` from benchmarks/claims.toml. Do not edit. -->

# Results

Every figure that the README and these pages show is here, computed from a result file in `benchmarks/results/`, which
holds the raw output of the run. Each claim names the script that measures it, to be run from the repository's root as
`python -m SCRIPT ARGUMENTS --out FILE`, the device and versions, and the commit that was measured.

*Sources since* compares the code that a claim depends on, as `benchmarks/claims.toml` lists it, with what it was at
that commit. Renamed files are followed as far as git finds them. A Python file counts as changed if its syntax tree
has changed, docstrings and imports left out; any other file, if its bytes have. *Changed* does not mean that the
figure is wrong: it has not been measured on the present code. The number says how many commits touched those files.
*With uncommitted changes* stands where the working tree differed from the commit.
`python -m benchmarks stale` lists the claims to be measured again, oldest first, with the files.
"""
_COUNT = re.compile(r"(changed), \d+ commits?")


def render_page(claims: list[Claim], staleness: Mapping[str, Staleness | None]) -> str:
    """The page's Markdown. `staleness` is by claim; None where the history is not there."""
    stale = [c for c in claims if (s := staleness.get(c.id)) and s.stale]
    parts = [
        _HEAD,
        f"Of {len(claims)} claims, {len(stale)} were measured on sources that have changed since.\n",
    ]
    for area, title in AREAS.items():
        rows = [_row(c, staleness.get(c.id)) for c in claims if c.area == area]
        if rows:
            head = "| Claim | Device and versions | Measured | Sources since |\n|---|---|---|---|\n"
            parts.append(f"## {title}\n\n{head}" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def comparable(page: str, marks: bool) -> str:
    """A page without what may differ from commit to commit: counts of commits; without `marks`, the marks, too."""
    page = _COUNT.sub(r"\1", page)
    if marks:
        return page
    page = re.sub(r"^Of \d+ claims, .*$", "", page, flags=re.MULTILINE)
    return re.sub(r"\| (changed|same|unknown) \|$", "|", page, flags=re.MULTILINE)


def _row(claim: Claim, staleness: Staleness | None) -> str:
    command = f"python -m {claim.script} {claim.arguments}".strip()
    files = ", ".join(f"`{f}`" for f in claim.results)
    note = f" {claim.note}" if claim.note else ""
    text = f'<a id="{claim.id}"></a>{claim.sentence}{note}<br>`{command}`<br>{files}'
    origin = claim.origin
    device = "<br>".join(part for part in (origin.device, origin.versions) if part)
    base = origin.base_commit
    dirty = " with uncommitted changes" if origin.commit != base else ""
    cells = (text, device, f"{origin.date}<br>`{base}`{dirty}", _mark(staleness))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _mark(staleness: Staleness | None) -> str:
    if staleness is None:
        return "unknown"
    if not staleness.stale:
        return "same"
    number = len(staleness.commits)
    return f"changed, {number} commit{'' if number == 1 else 's'}"
