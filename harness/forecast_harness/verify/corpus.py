"""Corpora of solutions with known answers: exploits that must not pass, honest ones that must.

One file is one entry. It begins with comment lines `# name: value`: `mode` (A01 to D48, or `honest`),
`title`, `backend` (`cpu` or `gpu`), `pack` (a shipped one's name, or a path below the corpus's parent),
`language`, `expected` (words, any of which is right: codes of `Code`, `accepted`, `refused` for a pack that
admission must turn away, or `neutralised`: right results, and in a contest with the pack's first solution
no gain from the trick).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from forecast_autotune.errors import RecordError
from forecast_harness.bench import bench
from forecast_harness.packs import Language, Pack, Solution, builtin_names, load, solution_from
from forecast_harness.sandbox.api import Lane, Limits
from forecast_harness.verify.plan import Plan
from forecast_harness.verify.run import refuse, verify
from forecast_harness.verify.verdict import Code, Verdict

_FIELDS = ("mode", "title", "backend", "pack", "language", "expected")


@dataclass(frozen=True)
class Entry:
    """One file of a corpus."""

    path: Path
    mode: str
    title: str
    backend: str
    pack: Pack
    solution: Solution
    expected: frozenset[str]

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem


@dataclass(frozen=True)
class Tried:
    """What became of an entry."""

    entry: Entry
    found: frozenset[str]
    """`accepted`, `refused`, or the codes of the verdict's reasons."""
    verdict: Verdict | None

    @property
    def as_expected(self) -> bool:
        """Whether one of the expected answers was given, and none that is not expected."""
        return bool(self.found) and self.found <= self.entry.expected

    def __str__(self) -> str:
        reasons = [] if self.verdict is None else [f"{r.code}: {r.detail}" for r in self.verdict.reasons]
        said = "; ".join(reasons) or ", ".join(self.found)
        return f"{self.entry.name}: expected {', '.join(sorted(self.entry.expected))}, found {said}"


def read(folder: Path) -> list[Entry]:
    """All entries of a folder, by name. Raises `RecordError` for a file without its header."""
    return [_entry(path, folder.parent) for path in sorted(folder.glob("*.py"))]


def _entry(path: Path, root: Path) -> Entry:
    text = path.read_text()
    head = dict(re.findall(r"^# (\w+): (.+)$", text.partition("\n\n")[0], re.MULTILINE))
    if missing := [f for f in _FIELDS if f not in head]:
        raise RecordError(f"{path}: the header lacks {missing}; it needs a line `# {missing[0]}: ...`")
    expected = frozenset(head["expected"].split())
    known = {*Code, "accepted", "refused", "neutralised"}
    if strange := expected - known:
        raise RecordError(f"{path}: expected has unknown words {sorted(strange)}; known: {sorted(known)}")
    pack = load(head["pack"] if head["pack"] in builtin_names() else root / head["pack"])
    solution = solution_from(path.stem, text, pack.definition.format, Language(head["language"]))
    return Entry(path, head["mode"], head["title"], head["backend"], pack, solution, expected)


def attempt(entry: Entry, lane: Lane, plan: Plan, limits: Limits) -> Tried:
    """Have one entry judged, its pack first where that is the question."""
    if "refused" in entry.expected:
        reasons = refuse(entry.pack, lane, limits)
        return Tried(entry, frozenset({"refused"} if reasons else {"accepted"}), None)
    verdict = verify(entry.pack, entry.solution, lane, plan=plan, limits=limits)
    if verdict.accepted and "neutralised" in entry.expected:
        *_, timed = bench(entry.pack, [entry.solution], lane, against=entry.pack.solutions[0], plan=plan)
        gained = timed.verdict.accepted and timed.outcome in ("faster", "")
        return Tried(entry, frozenset({"accepted" if gained else "neutralised"}), timed.verdict)
    if verdict.accepted:
        return Tried(entry, frozenset({"accepted"}), verdict)
    return Tried(entry, frozenset(str(r.code) for r in verdict.reasons), verdict)
