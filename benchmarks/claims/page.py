"""The pages written from the manifest: one row for what a user asks first, and every claim behind it."""

from __future__ import annotations

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
    "devices": "Other devices",
}
"""Heading by area, in the order of the page."""

_HEAD = "<!-- Written by `python -m benchmarks page` from benchmarks/claims.toml. Do not edit. -->\n\n"
_RESULTS = """# Results

These figures answer a user's first questions. Each links to its claim: the whole sentence, with the script that
measures it, its raw result, versions and commit. [Claims](claims.md) has all of them.

| | | Device | Date |
|---|---|---|---|
"""
_PICTURES = """
![Seconds of first calls, with and without forecasts](assets/first_calls.svg)

![How much faster than the kernel the source is that a search of two minutes finds, by kernel](assets/searches.svg)

![Slowdown of the best config so far, by share of configs timed: with forecasts, and in random order](assets/replay.svg)

`python -m benchmarks.plots.results` and `benchmarks.plots.replay_curve` draw the pictures from the same results.
"""
_CLAIMS = """# Claims

Every figure that the README and these pages show is computed from a result file in `benchmarks/results/`: the raw
output of the run, with versions and arguments. A claim names the script below `benchmarks/` that measures it, its
result, the device, the date and the commit; `*` marks a working tree that differed from it. `python -m benchmarks
stale` lists the claims whose sources have changed since.
"""


def render_results(claims: list[Claim]) -> str:
    """The page of headlines."""
    rows = [
        _cells(f"[{c.headline[0]}](claims.md#{c.id})", c.headline[1], c.origin.device, c.origin.date)
        for c in claims
        if c.headline
    ]
    return _HEAD + _RESULTS + "\n".join(rows) + "\n" + _PICTURES


def render_claims(claims: list[Claim]) -> str:
    """The page of all claims, with an anchor each."""
    parts = [_HEAD + _CLAIMS]
    for area, title in AREAS.items():
        if items := [_item(c) for c in claims if c.area == area]:
            parts.append(f"## {title}\n\n" + "\n".join(items) + "\n")
    return "\n".join(parts)


def _item(claim: Claim) -> str:
    note = f" {claim.note}" if claim.note else ""
    script = claim.script.removeprefix("benchmarks.")
    files = ",".join(claim.results) if len(claim.results) < 3 else f"{claim.results[0]},..."
    origin = claim.origin
    dirty = "*" if origin.commit != origin.base_commit else ""
    place = f"`{script}` `{files}` {origin.device} {origin.date} `{origin.base_commit}{dirty}`"
    return f'- <a id="{claim.id}"></a>{claim.sentence}{note}<br>{place}'


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
