"""Corpora of solutions with known answers: exploits that must not pass, honest ones that must.

One file is one entry. It begins with comment lines `# name: value`: `mode` (A01 to D48, or `honest`),
`title`, `backend` (`cpu` or `gpu`), `pack` (a shipped one's name, or a path below the corpus's parent),
`language`, `expected` (words, any of which is right: codes of `ReasonCode`, `accepted`, `refused` for a pack that
admission must turn away, or `neutralised`: right results, and not called faster by a contest with its
honest twin, the same code without the trick). What may be neutralised names that twin in a line `against`:
a file of any corpus beside this one, without its ending.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from forecast_harness.clocks.paired_comparison import ComparisonOutcome
from forecast_harness.sandbox.api import ResourceLimits, SandboxLane
from forecast_harness.targets.packs import Pack, Solution, builtin_names, load_pack, make_solution
from forecast_harness.trials.bench import compare_solutions
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import check_pack, verify
from forecast_harness.verify.verdict import Judgement, SolutionVerdict

_NEUTRALISED = "neutralised"


@dataclass(frozen=True)
class CorpusEntry:
    """One file of a corpus."""

    path: Path
    mode: str
    title: str
    backend: str
    pack: Pack
    solution: Solution
    expected: frozenset[str]
    against: Solution | None = None
    """Its honest twin."""

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem


@dataclass(frozen=True)
class CorpusResult:
    """What became of an entry."""

    entry: CorpusEntry
    found: frozenset[str]
    """`accepted`, `refused`, or the codes of the verdict's reasons."""
    verdict: SolutionVerdict | None

    @property
    def as_expected(self) -> bool:
        """Whether one of the expected answers was given, and none that is not expected."""
        return bool(self.found) and self.found <= self.entry.expected

    def __str__(self) -> str:
        reasons = [] if self.verdict is None else [f"{r.code}: {r.detail}" for r in self.verdict.reasons]
        problem = "; ".join(reasons) or ", ".join(self.found)
        return f"{self.entry.name}: expected {', '.join(sorted(self.entry.expected))}, found {problem}"


def read_corpus(folder: Path) -> list[CorpusEntry]:
    """All entries of a folder, by name. Raises `KeyError` for a line that a header lacks."""
    return [_entry(path, folder.parent) for path in sorted(folder.glob("*.py"))]


def _entry(path: Path, root: Path) -> CorpusEntry:
    text, head = _read_entry(path)
    expected = frozenset(head["expected"].split())
    pack = load_pack(head["pack"] if head["pack"] in builtin_names() else root / head["pack"])
    solution = make_solution(path.stem, text, pack.definition.format)
    against = _honest_twin(root, head["against"], pack) if "against" in head else None
    return CorpusEntry(path, head["mode"], head["title"], head["backend"], pack, solution, expected, against)


def _read_entry(path: Path) -> tuple[str, dict[str, str]]:
    """A file's text and header."""
    text = path.read_text()
    return text, dict(re.findall(r"^# (\w+): (.+)$", text.partition("\n\n")[0], re.MULTILINE))


def _honest_twin(root: Path, name: str, pack: Pack) -> Solution:
    """The solution that the header's `against` names."""
    (file,) = root.glob(f"*/{name}.py")
    return make_solution(name, file.read_text(), pack.definition.format)


def verify_entry(
    entry: CorpusEntry, lane: SandboxLane, plan: VerificationPlan, limits: ResourceLimits
) -> CorpusResult:
    """Have one entry judged, its pack first where that is the question."""
    if "refused" in entry.expected:
        reasons = check_pack(entry.pack, lane, limits)
        return CorpusResult(entry, frozenset({"refused"} if reasons else {"accepted"}), None)
    verdict = verify(entry.pack, entry.solution, lane, plan=plan, limits=limits)
    if verdict.accepted and entry.against is not None:
        return _contest_entry(entry, entry.against, lane, plan)
    if verdict.accepted:
        return CorpusResult(entry, frozenset({"accepted"}), verdict)
    return CorpusResult(entry, frozenset(str(r.code) for r in verdict.reasons), verdict)


def _contest_entry(
    entry: CorpusEntry, against: Solution, lane: SandboxLane, plan: VerificationPlan
) -> CorpusResult:
    """Whether an accepted entry gains anything over its honest twin."""
    twin, timed = compare_solutions(entry.pack, [entry.solution], lane, against=against, plan=plan)
    if not twin.verdict.accepted:  # the corpus is wrong, or the machine: nothing was shown
        return CorpusResult(entry, frozenset({f"{against.name} refused"}), twin.verdict)
    if timed.verdict.judgement is Judgement.INFRASTRUCTURE:
        return CorpusResult(entry, frozenset(str(r.code) for r in timed.verdict.reasons), timed.verdict)
    gained = timed.verdict.accepted and timed.outcome == ComparisonOutcome.FASTER
    return CorpusResult(entry, frozenset({"accepted" if gained else _NEUTRALISED}), timed.verdict)
