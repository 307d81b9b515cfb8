"""Claims: no exploit is accepted, honest code is, faults are their candidates' own, and it costs 3 s at most.

    python -m benchmarks.verification.solutions --device cuda --out benchmarks/results/verification_h200.json
    python -m benchmarks.verification.solutions --device cpu --limit 2 --out /tmp/verification.json

`exploits`: the corpus of the tests, on the CPU, in an interpreter where it is Triton's, and on the device. A
trick that can bite on a CPU alone is an honest program on a device; what was accepted there is listed apart.
`honest`: the honest corpus and all solutions of the shipped packs. `kernels`: every benchmark kernel as a
variant of itself under another text; those that nothing can be verified against count neither way.
`overhead`: seconds of a verdict on a warm lane, less those of bare timing: a new source's first call, which
compiles it, and then the timed launches and one more, in this process. The compilation is stated apart, and
the difference with it left out of the bare side as well. `faults`: poisoned contexts (on a CPU: crashes),
then hangs, in a row in one lane, with an honest job after every fifth. `kernels` and most exploits go through
several lanes at once; all that is timed goes through one, with nothing else at work.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lib import result_files
from benchmarks.lib import verification_tasks as corpora
from benchmarks.lib.result_files import say
from benchmarks.lib.verification_tasks import CandidatePlace, LanePool, Row, Task
from forecast_harness.clocks.devices import DeviceTimer
from forecast_harness.sandbox.api import Fault, JobResult, JobStatus, ResourceLimits, SandboxJob, SandboxLane
from forecast_harness.sandbox.toolchain import environment_variable
from forecast_harness.targets.packs import Language, Pack, Solution, load_pack
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problems.argument_codec import decode_arguments
from forecast_harness.verify.problems.external_tasks import problem_of
from forecast_harness.verify.problems.module_loading import load_module
from forecast_harness.verify.problems.problem import DrawSpec
from forecast_harness.verify.run import verify

STAGES = ("exploits", "honest", "kernels", "overhead", "faults")
PACKS = ("softmax", "rms_norm", "swiglu", "layer_norm", "cross_entropy", "matmul", "attention")
"""Of `overhead`."""
MOST_OVERHEAD_S, MOST_LOST_S, MOST_FALSE = 3.0, 10.0, 0.01
_RUN = "forecast_harness.sandbox.judge_process:run_file"
_FAULTS_PER_HONEST_JOB = 5
"""Faults to an honest job."""


class VerificationStages:
    """The stages of one run, which share its options and its report."""

    def __init__(
        self, arguments: argparse.Namespace, place: CandidatePlace, report: result_files.ResultFile
    ) -> None:
        self.a, self.place, self.report = arguments, place, report
        self.opened: dict[str, Any] = {}

    def chosen(self, tasks: Sequence[Task]) -> list[Task]:
        """Those that `--only`, `--part` and `--limit` leave."""
        part, parts = self.a.part
        return [t for t in tasks if self.a.only in t[0]][part - 1 :: parts][: self.a.limit]

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
        entries = [e for e in corpora.exploits(self.place) if self.a.only in e.name][: self.a.limit]
        before, end, rows = corpora.fingerprint(), self.stop_at(), []
        for place in (CandidatePlace("cpu"), *([self.place] if self.place.device == "cuda" else [])):
            for alone in (True, False):
                tasks = corpora.exploit_tasks(entries, place, alone=alone)
                rows += self.go("exploits", tasks, place, 1 if alone else self.a.lanes, end)
        if corpora.fingerprint() != before:
            raise RuntimeError("an exploit changed the harness or the corpora on disk: no verdict counts")
        return corpora.summarize_exploits(rows)

    def honest(self) -> Row:
        tasks = self.chosen(corpora.honest_tasks(self.place))
        return corpora.summarize_honest(self.go("honest", tasks, self.place, 1, self.stop_at()))

    def kernels(self) -> Row:
        tasks = self.chosen(corpora.kernel_tasks(self.place, self.a.configs))
        return corpora.summarize_kernels(self.go("kernels", tasks, self.place, self.a.lanes, self.stop_at()))

    def overhead(self) -> Row:
        tasks = self.chosen(
            [(name, partial(verification_cost, self.place, name, self.a.repeats)) for name in PACKS]
        )
        rows = self.go("overhead", tasks, self.place, 1, self.stop_at())
        told = [r for r in rows if "difference_s" in r]
        fields = ("judged_s", "bare_s", "compile_s", "difference_s", "difference_less_compile_s")
        return {
            "packs": {r["name"]: {f: r[f] for f in ("solution", "accepted", *fields)} for r in told},
            "median": {f: _median([r[f] for r in told]) for f in fields},
            "worst": max((r["difference_less_compile_s"] for r in told), default=None),
            "worst_if_compiled_before": max((r["difference_s"] for r in told), default=None),
            "errors": {r["name"]: r["error"] for r in rows if "error" in r},
        }

    def faults(self) -> Row:
        a, most = self.a, self.a.limit
        poisons, hangs = (n if most is None else min(n, most) for n in (a.poisons, a.hangs))
        with self.place.lane() as lane:
            rows = []
            for row in run_faults(lane, self.place, poisons, hangs, a.hang_seconds):
                rows.append(row)
                self.report.add("faults", row)
                done = f"faults {len(rows)}/{poisons + hangs} {row['name']}: {row['fault']}"
                say(f"{done}{'' if row['right'] else ' (NOT right)'}, lost {row['lost_s']} s")
            restarts = lane.restarts
        return {**faults_summed(rows), "restarts": restarts}


def _row_text(row: Row) -> str:
    """What became of it, in a few words."""
    for name in ("error", "not_verifiable"):
        if name in row:
            return f"{name}: {row[name][:160]}"
    if "left_out" in row:
        return "left out"
    if "found" in row:
        return f"{', '.join(row['found'])}{'' if row['as_expected'] else ' (NOT as expected)'}"
    if "difference_s" in row:
        told = "{solution}: {judged_s} s judged, {compile_s} s compiling and {bare_s} s timing alone"
        return told.format_map(row)
    return "; ".join([row["judgement"], *row["reasons"]])[:300]


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


# --- overhead ---


def verification_cost(place: CandidatePlace, name: str, repeats: int, lane: SandboxLane) -> Row:
    """One pack's verdicts, after one that does not count, and bare timing of the same solution."""
    pack = place.sized(load_pack(name))
    wanted = Language.TRITON if place.device == "cuda" else Language.TORCH
    solution = next((s for s in pack.solutions if s.language is wanted), pack.solutions[0])
    plan = place.plan(solution.language)
    taken, verdict = [], None
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        verdict = verify(pack, solution, lane, plan=plan)
        taken.append(round(time.perf_counter() - begin, 4))
    assert verdict is not None
    found = bare_seconds(pack, solution, plan)
    judged = statistics.median(taken[1:])
    return {
        "solution": solution.name,
        "accepted": verdict.accepted,
        "reasons": [str(r.detail)[:300] for r in verdict.reasons],
        "all_judged_s": taken,
        "trials": verdict.trials,
        "spent": verdict.facts.get("seconds", {}),
        "steps": verdict.facts.get("steps", {}),
        "judged_s": round(judged, 3),
        **found,
        "difference_s": round(judged - found["bare_s"], 3),
        "difference_less_compile_s": round(judged - found["bare_s"] - found["compile_s"], 3),
    }


def bare_seconds(pack: Pack, solution: Solution, plan: VerificationPlan) -> dict[str, float]:
    """Seconds of the plan's timed launches and a warm-up, in this process: our own solution, so trusted.

    `compile_s` is the first call's, with no binary on disk; the launches that follow find everything warm.
    """
    import torch

    work = pack.timed_workloads(plan.device, solution.language)[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        environment_variable("TRITON_CACHE_DIR", f"{folder}/triton"),
    ):
        entry = getattr(load_module(solution.source, Path(folder), "bare_solution"), solution.entry)
        draw = DrawSpec("normal", "contiguous", torch.Generator().manual_seed(0))
        case = problem_of(pack, Path(folder)).case(work.axes, draw)
        views = {n: t.to(plan.device) for n, t in (*case.tensors.items(), *case.outputs.items())}
        call = partial(
            entry,
            *(decode_arguments(s, views) for s in case.call["args"]),
            **{n: decode_arguments(s, views) for n, s in case.call["kwargs"].items()},
        )
        on_device = plan.device == "cuda"
        timed: Callable[[Callable[[], Any]], Any] = DeviceTimer(torch).time if on_device else _called
        begin = time.perf_counter()
        timed(call)
        compiled = time.perf_counter()
        for _ in range(1 + plan.timed):
            timed(call)
        end = time.perf_counter()
    found = {"compile_s": compiled - begin, "bare_s": end - compiled}
    return {"bare_launches": 1 + plan.timed, **{n: round(s, 4) for n, s in found.items()}}


def _called(call: Callable[[], Any]) -> Any:
    return call()


# --- faults ---

POISONED = {
    "cuda": {"illegal_address": Fault.EXCEPTION, "device_assert": Fault.EXCEPTION},
    "cpu": {
        "crashes": Fault.CRASH,
        "aborts": Fault.CRASH,
        "leaves": Fault.EXIT,
        "raises": Fault.EXCEPTION,
        "recurses": Fault.EXCEPTION,
    },
}
HANGING = {"cuda": ("hangs",), "cpu": ("hangs", "hangs_deaf", "stops_itself")}
EXPECTED_RESULTS = {"cuda": 64.0, "cpu": 40}
"""What the honest function returns."""
FAULT_LIMITS = ResourceLimits(wall_s=60, cpu_s=120, memory_bytes=8 << 30, processes=512)


def run_faults(
    lane: SandboxLane, place: CandidatePlace, poisons: int, hangs: int, hang_s: float
) -> Iterator[Row]:
    """Poisons, then hangs; `lost_s` is what a fault cost the lane beyond the time that it was allowed."""
    file = "device_faults.py" if place.device == "cuda" else "attacks.py"
    text = (corpora.CORPORA / file).read_text(encoding="utf-8")

    def run(function: str, limits: ResourceLimits = FAULT_LIMITS) -> JobResult:
        return lane.run(SandboxJob(_RUN, {"file": "s.py", "function": function}, {"s.py": text}), limits)

    if (first := run("honest")).status is not JobStatus.OK:
        raise RuntimeError(f"the lane does no honest job before any fault: {first.detail}")
    listed, stuck = list(POISONED[place.device].items()), HANGING[place.device]
    asked = [(*listed[i % len(listed)], 0.0) for i in range(poisons)]
    asked += [(stuck[i % len(stuck)], Fault.TIMEOUT, hang_s) for i in range(hangs)]
    for number, (function, expected, allowed) in enumerate(asked):
        found = run(function, replace(FAULT_LIMITS, wall_s=allowed) if allowed else FAULT_LIMITS)
        row = {
            "name": function,
            "expected": str(expected),
            "fault": str(found.fault),
            "status": str(found.status),
            "label": found.is_label,
            "right": found.is_label and found.fault is expected,
            "canary": found.canary,
            "detail": found.detail[:200],
            "result_s": round(found.seconds, 3),
            "lost_s": round(found.seconds - allowed, 3),
        }
        if (number + 1) % _FAULTS_PER_HONEST_JOB == 0 or number + 1 == len(asked):
            after = run("honest")
            right = after.status is JobStatus.OK and after.value["returned"] == EXPECTED_RESULTS[place.device]
            row |= {"next_right": right, "next_s": round(found.seconds - allowed + after.seconds, 3)}
        yield row


def faults_summed(rows: Sequence[Row]) -> Row:
    """Over all faults, and by kind."""
    lost = {name: [r["lost_s"] for r in rows if r["name"] == name] for name in {r["name"] for r in rows}}
    after = [r for r in rows if "next_s" in r]
    return {
        "faults": dict(Counter(r["name"] for r in rows)),
        "labels_lost": sum(not r["label"] for r in rows),
        "misattributed": sum(r["label"] and not r["right"] for r in rows),
        "canary_not_ok": sum(r["canary"] != "ok" for r in rows),
        "honest_after": len(after),
        "honest_after_right": sum(r["next_right"] for r in after),
        "median_lost_s": {name: _median(values) for name, values in sorted(lost.items())},
        "worst_lost_s": max((r["lost_s"] for r in rows), default=None),
        "worst_until_next_answer_s": max((r["next_s"] for r in after), default=None),
    }


def claims_held(sums: dict[str, Row], rate: Row | None) -> dict[str, bool]:
    """Which of the claims the stages that ran bear out."""
    found = {}
    if s := sums.get("exploits"):
        unsaid = (s["infrastructure"], s["errors"], s["left_out"])
        found["no_exploit_accepted"] = not s["accepted"] and not any(unsaid)
        found["48_modes"] = s["modes"] >= 48
    if rate is not None:
        found["60_honest"] = rate["honest"] >= 60
        found["less_than_1_percent_refused"] = rate["rate"] is not None and rate["rate"] < MOST_FALSE
    if s := sums.get("overhead"):
        worst = s["worst"]
        found["at_most_3_s_more"] = worst is not None and worst <= MOST_OVERHEAD_S and not s["errors"]
    if s := sums.get("faults"):
        wrong = s["labels_lost"] + s["misattributed"] + s["honest_after"] - s["honest_after_right"]
        found["no_label_lost_or_wrong"] = wrong == 0
        found["no_lane_lost_for_10_s"] = (s["worst_until_next_answer_s"] or 0.0) <= MOST_LOST_S
    return found


def _part(text: str) -> tuple[int, int]:
    """`2/3` as numbers. Raises `ValueError`."""
    part, _, parts = text.partition("/")
    if not 1 <= int(part) <= int(parts):
        raise ValueError(f"a part is I/N with I from 1 to N, got {text}")
    return int(part), int(parts)


def main() -> int:
    made = result_files.parser(__doc__)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="where candidates run")
    made.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE")
    made.add_argument("--gpu", type=int, default=0, help="the driver's number of the device that is used")
    cores = len(os.sched_getaffinity(0))
    made.add_argument("--lanes", type=int, default=max(1, min(12, cores - 2)), help="at once")
    made.add_argument("--only", default="", help="entries whose names contain this")
    made.add_argument(
        "--part", type=_part, default=(1, 1), metavar="I/N", help="the I-th of N parts of a stage's entries"
    )
    made.add_argument("--limit", type=int, help="so many entries of every stage (of faults: of either kind)")
    made.add_argument("--seconds", type=float, default=1e9, help="a stage begins no entry after so many")
    made.add_argument("--configs", type=int, default=6, help="configs of every kernel's twin")
    made.add_argument("--repeats", type=int, default=3, help="verdicts of each pack in `overhead`")
    made.add_argument("--poisons", type=int, default=100)
    made.add_argument("--hangs", type=int, default=20)
    made.add_argument("--hang-seconds", type=float, default=3.0, help="limit of one that hangs")
    early, _ = made.parse_known_args()
    made.set_defaults(stub_only=early.device == "cpu")
    a = result_files.parse_arguments(made)
    if a.null:
        a.device, a.limit = "cpu", a.limit or 2
    os.environ.pop("TRITON_INTERPRET", None)  # lanes on a CPU set it for themselves; on a device none may
    try:
        place = CandidatePlace.of(a.device, a.gpu)
    except LookupError as error:
        made.error(str(error))
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
    right = [sums[s] for s in ("honest", "kernels") if s in sums]
    rate = corpora.false_rejections(right) if right else None
    claims = claims_held(sums, rate)
    summary = {"device": place.name, "lanes": bench.opened, "stage_seconds": took, "failed_stages": failed}
    report.finish({**summary, **sums, "false_rejections": rate, "claims": claims})
    return int(bool(failed) or not all(claims.values()))


if __name__ == "__main__":
    sys.exit(main())
