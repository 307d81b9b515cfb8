"""Claims: no exploit is accepted, and honest code is.

    python -m benchmarks.verification.solutions --device cuda --out benchmarks/results/verification_h200.json
    python -m benchmarks.verification.solutions --device cpu --limit 2 --out /tmp/verification.json

`exploits`: the corpus of the tests, on the CPU, in an interpreter where it is Triton's, and on the device. A
trick that can bite on a CPU alone is an honest program on a device; accepted ones are listed apart.
`honest`: the honest corpus and all solutions of the shipped packs. Most exploits go through several lanes at once;
all that is timed goes through one, with nothing else at work.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, TypeAlias

from scipy import stats

from benchmarks.lib import result_files
from benchmarks.lib.candidate_place import CandidatePlace
from benchmarks.lib.environment import ROOT
from benchmarks.lib.result_files import say
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.targets.packs import Language, Pack, Solution, builtin_names, load_pack
from forecast_harness.verify.run import VERIFICATION_LIMITS, verify
from forecast_harness.verify.verdict import Judgement, ReasonCode, SolutionVerdict
from tests.harness import corpus
from tests.harness.small import checked_only

STAGES = ("exploits", "honest")
CORPORA = ROOT / "tests" / "harness"
CLOCKED = {ReasonCode.CLOCK, ReasonCode.IMPOSSIBLE, ReasonCode.COMPILES_WHILE_TIMED, "neutralised"}
"""An exploit that is expected to be found in one of these ways is judged with no other lane at work."""
MOST_FALSE = 0.01
_ALPHA = 0.05
_SAID = 400

Row: TypeAlias = dict[str, Any]
Task: TypeAlias = tuple[str, Callable[[SandboxLane], Row]]


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


class VerificationStages:
    """The stages of one run, which share its options and its report."""

    def __init__(
        self, arguments: argparse.Namespace, place: CandidatePlace, report: result_files.ResultFile
    ) -> None:
        self.a, self.place, self.report = arguments, place, report
        self.opened: dict[str, Any] = {}

    def chosen(self, tasks: Sequence[Task]) -> list[Task]:
        """Those that `--only` and `--limit` leave."""
        return [t for t in tasks if self.a.only in t[0]][: self.a.limit]

    def go(
        self, stage: str, tasks: Sequence[Task], place: CandidatePlace, lanes: int, stop_at: float
    ) -> list[Row]:
        """Rows of these tasks, each recorded and shown as it comes."""
        through, rows = LanePool(place, lanes, stop_at), []
        for row in through.each(tasks):
            rows.append(row)
            self.report.add(stage, row)
            done = f"{stage} {len(rows)}/{len(tasks)} on {place.device}"
            say(f"{done}: {row['name']} {row['seconds']} s: {_row_text(row)}")
        self.opened[place.device] = through.opened or self.opened.get(place.device, {})
        return rows

    def stop_at(self) -> float:
        return time.monotonic() + float(self.a.seconds)

    def exploits(self) -> Row:
        entries = [e for e in exploits(self.place) if self.a.only in e.name][: self.a.limit]
        before, end, rows = fingerprint(), self.stop_at(), []
        for place in (CandidatePlace("cpu"), *([self.place] if self.place.device == "cuda" else [])):
            for alone in (True, False):
                tasks = exploit_tasks(entries, place, alone=alone)
                rows += self.go("exploits", tasks, place, 1 if alone else self.a.lanes, end)
        if fingerprint() != before:
            raise RuntimeError("an exploit changed the harness or the corpora on disk: no verdict counts")
        return summarize_exploits(rows)

    def honest(self) -> Row:
        tasks = self.chosen(honest_tasks(self.place))
        return summarize_honest(self.go("honest", tasks, self.place, 1, self.stop_at()))


def _row_text(row: Row) -> str:
    """Return what became of it, in a few words."""
    if "error" in row:
        return f"error: {row['error'][:160]}"
    if "left_out" in row:
        return "left out"
    if "found" in row:
        return f"{', '.join(row['found'])}{'' if row['as_expected'] else ' (NOT as expected)'}"
    return "; ".join([row["judgement"], *row["reasons"]])[:300]


# --- exploits ---


def exploits(place: CandidatePlace) -> list[corpus.CorpusEntry]:
    """The corpus; without a device, what needs none."""
    result = corpus.read_corpus(CORPORA / "exploits")
    return [e for e in result if place.device == "cuda" or e.backend == "cpu"]


def needs_clock(entry: corpus.CorpusEntry) -> bool:
    """Whether a clock has a say in it, so that nothing else may run."""
    return entry.backend == "gpu" or bool(entry.expected & CLOCKED)


def exploit_tasks(entries: Iterable[corpus.CorpusEntry], place: CandidatePlace, *, alone: bool) -> list[Task]:
    """Exploits that are judged alone, or the others; first those that need a device, on a CPU without them.

    Those that do not attack clocks have small sizes on a device, too.
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
    """An exploit counts where its trick is meant to bite; the results of the others on a device are listed apart."""
    results = [r for r in rows if "found" in r]
    home, away = ([r for r in results if _on_intended_device(r) == where] for where in (True, False))
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
        "infrastructure": [f"{r['name']} on {r['where']}" for r in results if _at_fault(r)],
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
    """Digest the harness and the corpora on disk: an exploit that escapes could change who judges the next."""
    result = hashlib.sha256()
    for folder in (ROOT / "harness", CORPORA):
        for file in sorted(folder.rglob("*.py")):
            result.update(file.read_bytes())
    return result.hexdigest()


# --- honest solutions ---


def honest_tasks(place: CandidatePlace) -> list[Task]:
    """The honest corpus, then every solution of every shipped pack."""
    entries = [
        e for e in corpus.read_corpus(CORPORA / "honest") if place.device == "cuda" or e.backend == "cpu"
    ]
    results = [(f"honest/{e.name}", _honest(e.pack, e.solution, place)) for e in entries]
    for pack in map(load_pack, builtin_names()):
        kept = [s for s in pack.solutions if place.device == "cuda" or not _is_cut_on_cpu(pack, s)]
        results += [(f"{pack.definition.name}/{s.name}", _honest(pack, s, place)) for s in kept]
    return results


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
    results = [r for r in rows if "judgement" in r]
    refused = [r for r in results if r["judgement"] in (Judgement.REJECTED, Judgement.SUSPICIOUS)]
    return {
        "judged": sum(r["judgement"] != Judgement.INFRASTRUCTURE for r in results),
        "accepted": sum(r["judgement"] == Judgement.ACCEPTED for r in results),
        "refused": {r["name"]: r["reasons"] for r in refused},
        "infrastructure": [r["name"] for r in results if r["judgement"] == Judgement.INFRASTRUCTURE],
        **_failed(rows),
    }


def _failed(rows: Iterable[Row]) -> Row:
    return {
        "errors": {r["name"]: _short(r["error"]) for r in rows if "error" in r},
        "left_out": sum("left_out" in r for r in rows),
    }


def false_rejections(honest: Row) -> Row:
    """The share of what is right that was refused, and its one-sided 95 % bound (Clopper-Pearson)."""
    n, wrong = honest["judged"], len(honest["refused"])
    high = float(stats.beta.ppf(1 - _ALPHA, wrong + 1, n - wrong)) if n > wrong else 1.0
    return {
        "honest": n,
        "falsely_refused": wrong,
        "rate": round(wrong / n, 5) if n else None,
        "rate_at_most": round(high, 5),
    }


def claims_held(sums: dict[str, Row], rate: Row | None) -> dict[str, bool]:
    """Which of the claims the stages that ran bear out."""
    held = {}
    if s := sums.get("exploits"):
        unsaid = (s["infrastructure"], s["errors"], s["left_out"])
        held["no_exploit_accepted"] = not s["accepted"] and not any(unsaid)
        held["48_modes"] = s["modes"] >= 48
    if rate is not None:
        held["60_honest"] = rate["honest"] >= 60
        held["less_than_1_percent_refused"] = rate["rate"] is not None and rate["rate"] < MOST_FALSE
    return held


def main() -> int:
    command_line = result_files.parser(__doc__)
    command_line.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="where candidates run"
    )
    command_line.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE")
    command_line.add_argument(
        "--gpu", type=int, default=0, help="the driver's number of the device that is used"
    )
    cores = len(os.sched_getaffinity(0))
    command_line.add_argument("--lanes", type=int, default=max(1, min(12, cores - 2)), help="at once")
    command_line.add_argument("--only", default="", help="entries whose names contain this")
    command_line.add_argument("--limit", type=int, help="so many entries of every stage")
    command_line.add_argument(
        "--seconds", type=float, default=1e9, help="a stage begins no entry after so many"
    )
    early, _ = command_line.parse_known_args()
    command_line.set_defaults(stub_only=early.device == "cpu")
    a = result_files.parse_arguments(command_line)
    if a.null:
        a.device, a.limit = "cpu", a.limit or 2
    os.environ.pop("TRITON_INTERPRET", None)  # lanes on a CPU set it for themselves; on a device none may
    try:
        place = CandidatePlace.of(a.device, a.gpu)
    except LookupError as error:
        command_line.error(str(error))
    report = result_files.ResultFile(a, "verification")
    bench, sums, took, failed = VerificationStages(a, place, report), {}, {}, {}
    for stage in a.stages:
        begin = time.perf_counter()
        try:
            sums[stage] = getattr(bench, stage)()
        except Exception as error:  # the other stages are worth having
            failed[stage] = f"{type(error).__name__}: {error}"[:2000]
            say(f"FAILED {stage}: {failed[stage]}")
        took[stage] = round(time.perf_counter() - begin, 1)
    rate = false_rejections(sums["honest"]) if "honest" in sums else None
    claims = claims_held(sums, rate)
    summary = {"device": place.name, "lanes": bench.opened, "stage_seconds": took, "failed_stages": failed}
    report.finish({**summary, **sums, "false_rejections": rate, "claims": claims})
    return int(bool(failed) or not all(claims.values()))


if __name__ == "__main__":
    sys.exit(main())
