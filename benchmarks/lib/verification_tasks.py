"""Corpora of verification: exploits, honest solutions, and kernels whose variants are right by construction.

Every function here makes the tasks of one stage of `solutions.py` and sums their rows up; a task takes a
lane and returns its row. Tasks go through several lanes at once, but for those in which a clock has a say.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any, TypeAlias

from scipy import stats

from benchmarks import kernels
from benchmarks.lib.environment import ROOT
from benchmarks.lib.variants.rewrite_cases import first_cases
from forecast_autotune.errors import RecordError, VariantError
from forecast_autotune.store import Store
from forecast_autotune.variants import Origin, Provenance, Variant
from forecast_autotune.variants.signature import INTERPRETER
from forecast_harness.clocks import devices as device
from forecast_harness.clocks.times import HOST_PEAKS, DevicePeaks
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.targets.kernels.user_kernel import UserKernel
from forecast_harness.targets.packs import Language, Pack, Solution, builtin_names, load_pack
from forecast_harness.trials import corpus
from forecast_harness.trials.variants import verify as variants
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import VERIFICATION_LIMITS, verify
from forecast_harness.verify.verdict import Judgement, ReasonCode, SolutionVerdict
from forecast_integrations.triton.problem.describe import kernel_record
from forecast_integrations.triton.problem.source import innermost, standalone_source
from tests.harness.small import checked_only

CORPORA = ROOT / "tests" / "harness"
CLOCKED = {ReasonCode.CLOCK, ReasonCode.IMPOSSIBLE, ReasonCode.COMPILES_WHILE_TIMED, "neutralised"}
"""An exploit that is expected to be found in one of these ways is judged with no other lane at work."""
KERNEL_LIMITS = replace(variants.VARIANT_LIMITS, wall_s=300.0, cpu_s=300.0, trusted_s=300.0)
_ALPHA = 0.05
_SAID = 400

Row: TypeAlias = dict[str, Any]
Task: TypeAlias = tuple[str, Callable[[SandboxLane], Row]]


@dataclass(frozen=True)
class CandidatePlace:
    """Where candidates run."""

    device: str
    """`cpu` or `cuda`."""
    name: str = "cpu"
    peaks: DevicePeaks = HOST_PEAKS
    uuid: str = ""
    index: int = 0
    """The driver's number of the device."""

    @classmethod
    def of(cls, asked: str, index: int = 0) -> CandidatePlace:
        """Raises `LookupError` for a device that the driver does not know."""
        if asked == "cpu":
            return cls(asked)
        name, uuid = device.identity(index)
        if not uuid:
            raise LookupError(f"the driver knows no device {index}")
        return cls(asked, name, device.device_peaks(name), uuid, index)

    def lane(self) -> SandboxLane:
        """A lane, not yet open; without a device Triton kernels can only be interpreted there."""
        if self.device == "cpu":
            return SandboxLane(environment={"TRITON_INTERPRET": "1"})
        return SandboxLane(device=str(self.index))

    def plan(self, language: Language) -> VerificationPlan:
        """The shipped plan; on a CPU that of the tests, as interpreted launches take so much longer."""
        if self.device == "cuda":
            return VerificationPlan(device="cuda", peaks=self.peaks, index=self.index, uuid=self.uuid)
        return (
            VerificationPlan(cases=6, timed=4)
            if language is Language.TRITON
            else VerificationPlan(cases=12, timed=30)
        )

    def sized(self, pack: Pack) -> Pack:
        """At all of its sizes on a device, at the small ones on a CPU."""
        return checked_only(pack) if self.device == "cpu" else pack


@dataclass
class LanePool:
    """Lanes of one place, a thread each, until the tasks or the seconds are used up."""

    place: CandidatePlace
    most: int
    stop_at: float = math.inf
    """By `time.monotonic`; no task begins later."""
    opened: dict[str, Any] = field(default_factory=dict)
    """Level of containment of the lanes, and why stronger ones do not work."""

    def each(self, tasks: Sequence[Task]) -> Iterator[Row]:
        """Rows as they come. A task that raises has a row with `error`; the next one gets a fresh lane."""
        left, done = deque(tasks), SimpleQueue[Row | None]()
        threads = min(self.most, len(left))
        for _ in range(threads):
            threading.Thread(target=self._work, args=(left, done), daemon=True).start()
        while threads:
            if (row := done.get()) is None:
                threads -= 1
            else:
                yield row

    def _work(self, left: deque[Task], done: SimpleQueue[Row | None]) -> None:
        lane: SandboxLane | None = None
        try:
            with contextlib.suppress(IndexError):
                while True:
                    name, task = left.popleft()
                    if time.monotonic() > self.stop_at:
                        done.put({"name": name, "left_out": True, "seconds": 0.0})
                        continue
                    begin = time.perf_counter()
                    lane, row = self._one(lane, task)
                    done.put({"name": name, **row, "seconds": round(time.perf_counter() - begin, 3)})
        finally:
            if lane is not None:
                lane.close()
            done.put(None)

    def _one(
        self, lane: SandboxLane | None, task: Callable[[SandboxLane], Row]
    ) -> tuple[SandboxLane | None, Row]:
        """The lane for the next task, None for a fresh one, and the row."""
        try:
            if lane is None:
                lane = self.place.lane().__enter__()
                self.opened = {"level": lane.level.name, "apart": lane.apart, "refused": dict(lane.refused)}
            row = task(lane)
            healthy = lane.healthy
        except Exception as error:  # one entry less is worth less than all of the others
            row, healthy = {"error": _short(f"{type(error).__name__}: {error}")}, False
        if not healthy and lane is not None:
            lane.close()
            lane = None
        return lane, row


# --- exploits ---


def exploits(place: CandidatePlace) -> list[corpus.CorpusEntry]:
    """The corpus; without a device, what needs none."""
    found = corpus.read_corpus(CORPORA / "exploits")
    return [e for e in found if place.device == "cuda" or e.backend == "cpu"]


def needs_clock(entry: corpus.CorpusEntry) -> bool:
    """Whether a clock has a say in it, so that nothing else may run."""
    return entry.backend == "gpu" or bool(entry.expected & CLOCKED)


def exploit_tasks(entries: Iterable[corpus.CorpusEntry], place: CandidatePlace, *, alone: bool) -> list[Task]:
    """Those that are judged alone, or the others; what needs a device first, and on a CPU not at all.

    What is no question of clocks is asked at small sizes on a device, too.
    """
    chosen = [
        e for e in entries if needs_clock(e) == alone and (place.device == "cuda" or e.backend == "cpu")
    ]
    sized = [e if alone and place.device == "cuda" else replace(e, pack=checked_only(e.pack)) for e in chosen]
    return [(e.name, _exploit(e, place)) for e in sorted(sized, key=lambda e: e.backend != "gpu")]


def _exploit(entry: corpus.CorpusEntry, place: CandidatePlace) -> Callable[[SandboxLane], Row]:
    def task(lane: SandboxLane) -> Row:
        tried = corpus.verify_entry(entry, lane, place.plan(entry.solution.language), VERIFICATION_LIMITS)
        return {
            "mode": entry.mode,
            "backend": entry.backend,
            "where": place.device,
            "expected": sorted(entry.expected),
            "found": sorted(tried.found),
            "as_expected": tried.as_expected,
            "accepted": "accepted" in tried.found,
            **(_verdict_row(tried.verdict) if tried.verdict else {}),
        }

    return task


def summarize_exploits(rows: Sequence[Row]) -> Row:
    """An exploit counts where its trick is meant to bite; what a device makes of the others is told apart."""
    told = [r for r in rows if "found" in r]
    home, away = ([r for r in told if _on_intended_device(r) == where] for where in (True, False))
    accepted = [r for r in home if r["accepted"]]
    return {
        "exploits": len(home),
        "modes": len({r["mode"] for r in home}),
        "modes_accepted": sorted({r["mode"] for r in accepted}),
        "accepted": [f"{r['name']} on {r['where']}" for r in accepted],
        "as_expected": sum(r["as_expected"] for r in home),
        "refused_otherwise": _unintended_rows(home),
        "rows_on_a_device_of_others": len(away),
        "accepted_on_device": [r["name"] for r in away if r["accepted"]],
        "as_expected_on_device": sum(r["as_expected"] for r in away),
        "refused_otherwise_on_device": _unintended_rows(away),
        "infrastructure": [f"{r['name']} on {r['where']}" for r in told if _at_fault(r)],
        **_failed(rows),
    }


def _on_intended_device(row: Row) -> bool:
    return bool((row["backend"] == "gpu") == (row["where"] == "cuda"))


def _unintended_rows(rows: Iterable[Row]) -> dict[str, list[str]]:
    return {r["name"]: r["found"] for r in rows if not r["as_expected"] and not r["accepted"]}


def _at_fault(row: Row) -> bool:
    """Whether the harness failed, or the honest twin did: nothing was shown."""
    return str(ReasonCode.HARNESS) in row["found"] or any(f.endswith(" refused") for f in row["found"])


def fingerprint() -> str:
    """Of the harness and the corpora on disk: an exploit that escapes could change who judges the next."""
    found = hashlib.sha256()
    for folder in (ROOT / "harness", CORPORA):
        for file in sorted(folder.rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()


# --- honest solutions ---


def honest_tasks(place: CandidatePlace) -> list[Task]:
    """The honest corpus, then every solution of every shipped pack."""
    entries = [
        e for e in corpus.read_corpus(CORPORA / "honest") if place.device == "cuda" or e.backend == "cpu"
    ]
    found = [(f"honest/{e.name}", _honest(e.pack, e.solution, place)) for e in entries]
    for pack in map(load_pack, builtin_names()):
        kept = [s for s in pack.solutions if place.device == "cuda" or not _is_cut_on_cpu(pack, s)]
        found += [(f"{pack.definition.name}/{s.name}", _honest(pack, s, place)) for s in kept]
    return found


def _is_cut_on_cpu(pack: Pack, solution: Solution) -> bool:
    """Whether no CPU can find it right: Triton's interpreter cuts to bfloat16, compiled code rounds."""
    written = {t.dtype for t in pack.definition.outputs.values()}
    return solution.language is Language.TRITON and "bfloat16" in written


def _honest(pack: Pack, solution: Solution, place: CandidatePlace) -> Callable[[SandboxLane], Row]:
    def task(lane: SandboxLane) -> Row:
        verdict = verify(
            place.sized(pack), solution, lane, plan=place.plan(solution.language), limits=VERIFICATION_LIMITS
        )
        return {"pack": pack.definition.name, "language": str(solution.language), **_verdict_row(verdict)}

    return task


def _verdict_row(verdict: SolutionVerdict) -> Row:
    return {
        "judgement": str(verdict.judgement),
        "reasons": [_short(f"{r.code}: {r.detail} ({r.trial})") for r in verdict.reasons],
        "trials": verdict.trials,
        "verdict_s": round(verdict.seconds, 3),
        "spent": verdict.facts.get("seconds", {}),
        "steps": verdict.facts.get("steps", {}),
        "error_over_limit": verdict.facts.get("error_over_limit"),
    }


def _short(text: str) -> str:
    """Both ends of it: a traceback says at its end what was wrong."""
    return text if len(text) <= 2 * _SAID else f"{text[:_SAID]} ... {text[-_SAID:]}"


def summarize_honest(rows: Sequence[Row]) -> Row:
    """Counts by judgement, and who was refused."""
    told = [r for r in rows if "judgement" in r]
    refused = [r for r in told if r["judgement"] in (Judgement.REJECTED, Judgement.SUSPICIOUS)]
    return {
        "judged": sum(r["judgement"] != Judgement.INFRASTRUCTURE for r in told),
        "accepted": sum(r["judgement"] == Judgement.ACCEPTED for r in told),
        "refused": {r["name"]: r["reasons"] for r in refused},
        "infrastructure": [r["name"] for r in told if r["judgement"] == Judgement.INFRASTRUCTURE],
        **_failed(rows),
    }


def _failed(rows: Iterable[Row]) -> Row:
    return {
        "errors": {r["name"]: _short(r["error"]) for r in rows if "error" in r},
        "left_out": sum("left_out" in r for r in rows),
    }


def false_rejections(sums: Iterable[Mapping[str, Any]]) -> Row:
    """Over all that is right: the share that was refused, and its one-sided 95 % bound (Clopper-Pearson)."""
    listed = list(sums)
    n, wrong = sum(s["judged"] for s in listed), sum(len(s["refused"]) for s in listed)
    high = float(stats.beta.ppf(1 - _ALPHA, wrong + 1, n - wrong)) if n > wrong else 1.0
    return {
        "honest": n,
        "falsely_refused": wrong,
        "rate": round(wrong / n, 5) if n else None,
        "rate_at_most": round(high, 5),
    }


# --- kernels ---


def kernel_tasks(place: CandidatePlace, configs: int) -> list[Task]:
    """Every benchmark kernel, against itself under another text that is launched with so many configs."""
    found = first_cases(len(kernels.every()))
    return [(case.name.partition("/")[0], _kernel(case, place, configs)) for case in found]


def _kernel(case: kernels.Case, place: CandidatePlace, configs: int) -> Callable[[SandboxLane], Row]:
    usual = variants.VARIANT_PLAN
    cases = 4 if place.device == "cpu" else usual.cases
    where = {"device": place.device, "peaks": place.peaks, "index": place.index, "uuid": place.uuid}
    plan = replace(usual, cases=cases, **where)
    slug = INTERPRETER if place.device == "cpu" else place.name

    def task(lane: SandboxLane) -> Row:
        row: Row = {"family": case.family, "hand": case.hand}
        begin = time.perf_counter()
        try:
            subject, variant = twin_of(case, configs)
            known = variants.survey(subject, lane, plan=plan, limits=KERNEL_LIMITS)
        except (VariantError, RecordError) as error:
            return {**row, "not_verifiable": str(error)[:2000]}
        row["survey_s"] = round(time.perf_counter() - begin, 3)
        found = variants.verify_variant(
            variant, subject, known, lane, device=slug, plan=plan, limits=KERNEL_LIMITS
        )
        return {**row, **_verdict_row(found.verdict), **_survey_facts(found.verdict, known)}

    return task


def _survey_facts(verdict: SolutionVerdict, known: KernelSurvey) -> Row:
    facts = {n: verdict.facts.get(n) for n in ("configs", "unable")}
    found = {"deterministic": known.deterministic, "updates": list(known.updates)}
    return {**facts, "words": dict(known.words), "grid": known.grid, **found}


def twin_of(case: kernels.Case, configs: int) -> tuple[BaseKernel, Variant]:
    """A kernel as the command `variants` takes it, and its twin: the same text below a comment.

    The call to be covered is the small one of the first case, so that its memory can always be sent to a
    cell; all other calls of its cases tell its sizes apart. Raises `RecordError` where the kernel is no
    self-contained module.
    """
    name = case.name.partition("/")[0]
    below = innermost(case.kernel)
    module = inspect.getmodule(below.fn)
    if module is None or module.__file__ is None:
        raise RecordError(f"{name} is in no file")
    named = next((n for n, value in vars(module).items() if value is case.kernel), name)
    text = standalone_source(case.kernel)
    holder = ModuleType(name)
    vars(holder)["CASES"] = kernels.cases([name])
    kernel = kernel_record(below)
    target = UserKernel(Path(module.__file__), named, holder, case.kernel, kernel, text, ())
    first = target.subjects(Store(None))[0]
    real, small, *others = first.calls
    subject = replace(first, calls=(small, real, *others))
    step = max(1.0, len(first.configs) / configs)
    few = tuple(first.configs[int(i * step)] for i in range(min(configs, len(first.configs))))
    made = Variant.of(
        kernel.name,
        kernel.source_sha256,
        f"# The same kernel under another text.\n{text}",
        Provenance(Origin.HAND, note="right by construction"),
        title="same",
        configs=few,
    )
    return subject, made


def summarize_kernels(rows: Sequence[Row]) -> Row:
    """As `summarize_honest`; kernels that nothing can be verified against are counted apart, by reasons."""
    unable = {r["name"]: r["not_verifiable"] for r in rows if "not_verifiable" in r}
    return {
        "kernels": len(rows),
        **summarize_honest(rows),
        "not_verifiable": len(unable),
        "why_not": dict(Counter(_in_short(text) for text in unable.values()).most_common()),
        "not_verifiable_kernels": sorted(unable),
    }


def _in_short(text: str) -> str:
    """What a refusal says, without the kernel's name and numbers."""
    return " ".join("N" if any(c.isdigit() for c in w) else w for w in text.split()[1:24])[:160]
