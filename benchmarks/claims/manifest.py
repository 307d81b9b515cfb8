"""Claims and their figures, read from `benchmarks/claims.toml` and from the result files it names.

Figures are computed from the results and never written by hand, so that a sentence cannot disagree with its
measurement. The notation is described at the head of the manifest.
"""

from __future__ import annotations

import json
import re
import statistics
import string
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = Path("benchmarks/claims.toml")
RESULTS = Path("benchmarks/results")

COMMIT = re.compile(r"([0-9a-f]{7,40})(\+.*)?")
"""A commit as results record it; a suffix after a plus marks uncommitted changes."""

_ALLOWED = {
    "claim", "headline", "script", "arguments", "result", "sources", "figures", "note", "commit", "date", "device",
}  # fmt: skip
_REQUIRED = ("claim", "script", "result", "sources")


def _geometric_mean(values: list[float]) -> float:
    return statistics.geometric_mean(values)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "geometric_mean": _geometric_mean,
    "len": len,
    "max": max,
    "mean": statistics.mean,
    "median": statistics.median,
    "min": min,
    "set": set,
    "sum": sum,
}
"""Functions that an expression of the manifest may call."""


class ManifestError(Exception):
    """The manifest, or a result that it names, breaks a rule; the message says which and what to do."""


@dataclass(frozen=True)
class Origin:
    """The place and time of a measurement, as its file says; empty where it does not."""

    commit: str
    date: str
    device: str
    versions: str

    @property
    def base_commit(self) -> str:
        """The commit without the mark of uncommitted changes; empty if there is none."""
        result = COMMIT.fullmatch(self.commit)
        return result[1] if result else ""


@dataclass(frozen=True)
class Claim:
    """One measured claim; `figures` are already computed and formatted."""

    id: str
    area: str
    sentence: str
    """With figures filled in."""
    headline: tuple[str, ...]
    """A figure and a short sentence for the page of results; empty for a claim that is not on it."""
    script: str
    """A module: `benchmarks.area.name`."""
    arguments: str
    results: tuple[str, ...]
    """File names below `benchmarks/results`; the first gives the origin."""
    sources: tuple[str, ...]
    """Paths from the repository's root, files or folders."""
    figures: Mapping[str, str]
    note: str
    origin: Origin


def load_claims(root: Path = ROOT) -> tuple[list[Claim], list[str]]:
    """All claims that can be read, in the manifest's order, and what is wrong with the others."""
    document = tomllib.loads((root / MANIFEST).read_text(encoding="utf-8"))
    groups: dict[str, list[str]] = document.pop("sources", {})
    claims: list[Claim] = []
    problems: list[str] = []
    for area, tables in document.items():
        for name, table in tables.items():
            try:
                claims.append(_claim(root, area, name, table, groups))
            except ManifestError as error:
                problems.append(f"{area}.{name}: {error}")
    ids = [c.id for c in claims]
    problems += [
        f"{i}: two claims have this id; an id is an anchor" for i in sorted(set(ids)) if ids.count(i) > 1
    ]
    return claims, problems


def _claim(
    root: Path, area: str, name: str, table: Mapping[str, Any], groups: Mapping[str, list[str]]
) -> Claim:
    if unknown := set(table) - _ALLOWED:
        raise ManifestError(f"unknown keys {sorted(unknown)}; allowed are {sorted(_ALLOWED)}")
    if missing := [key for key in _REQUIRED if not table.get(key)]:
        raise ManifestError(f"{missing} must be given")
    results = table["result"] if isinstance(table["result"], list) else [table["result"]]
    files = {Path(file).stem: _read_result(root, file) for file in results}
    figures = {key: _figure(key, text, files) for key, text in table.get("figures", {}).items()}
    return Claim(
        id=name,
        area=area,
        sentence=_fill(table["claim"], figures),
        headline=tuple(_fill(part, figures) for part in table.get("headline", ())),
        script=table["script"],
        arguments=table.get("arguments", ""),
        results=tuple(results),
        sources=tuple(_expand_sources(table["sources"], groups)),
        figures=figures,
        note=table.get("note", ""),
        origin=_origin(next(iter(files.values())), table),
    )


def _read_result(root: Path, file: str) -> Mapping[str, Any]:
    path = root / RESULTS / file
    if not path.is_file():
        raise ManifestError(f"no result file {RESULTS / file}; run the script, or remove the claim")
    content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _expand_sources(listed: list[str], groups: Mapping[str, list[str]]) -> list[str]:
    paths: list[str] = []
    for source in listed:
        if not source.startswith("@"):
            paths.append(source)
        elif (group := groups.get(source[1:])) is None:
            raise ManifestError(f"no list [sources] {source[1:]!r}; there are {sorted(groups)}")
        else:
            paths += _expand_sources(group, groups)
    return list(dict.fromkeys(paths))


def _figure(name: str, text: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    """Evaluate `EXPRESSION -> FORMAT`. A tuple fills as many fields of the format as it has members."""
    expression, arrow, shape = text.rpartition(" -> ")
    if not arrow:
        raise ManifestError(f"figure {name!r} is {text!r}; write EXPRESSION -> FORMAT")
    names = {**next(iter(files.values())), "files": files}
    try:
        # The manifest belongs to the repository and is trusted as its scripts are.
        value = eval(expression, {"__builtins__": {}, **_FUNCTIONS, **names})
        return shape.format(*value) if isinstance(value, tuple) else shape.format(value)
    except Exception as error:
        raise ManifestError(
            f"figure {name!r}: {expression!r} gives {type(error).__name__}: {error}"
        ) from error


def _fill(sentence: str, figures: Mapping[str, str]) -> str:
    wanted = {field for _, field, _, _ in string.Formatter().parse(sentence) if field is not None}
    if missing := wanted - set(figures):
        raise ManifestError(f"the sentence shows {sorted(missing)}, which `figures` does not define")
    return sentence.format(**figures)


def _origin(result: Mapping[str, Any], table: Mapping[str, Any]) -> Origin:
    answer: Mapping[str, Any] = result.get("environment") or {}
    versions = [f"{name} {answer[name]}" for name in ("triton", "torch", "python") if answer.get(name)]
    return Origin(
        commit=str(table.get("commit") or answer.get("commit") or ""),
        date=str(table.get("date") or answer.get("date") or "")[:10],
        device=str(table.get("device") or answer.get("device") or ""),
        versions=", ".join(versions),
    )
