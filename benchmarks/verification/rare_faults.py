"""Claim: faults that show seldom, late or in turns are found as often as the number of checked launches says.

    python -m benchmarks.verification.rare_faults --device cpu --out benchmarks/results/rare_faults_cpu.json

Each family is the pack's plain softmax with one fault: a share of results is the one before, results are wrong
after so many seconds, in every nth launch, in bursts, at one size only, after a pause. Every family is verified
`--runs` times, and those that a verification may miss are timed beside an honest solution that is slower,
`--benches` times: what is called faster in spite of its fault was missed. `honest` has to be accepted each time.
`arithmetic`: the share of 2,000 simulated verifications with the median number of checked launches that meet a
fault in 1, 3 and 10 % of launches. What comes on one day of the week alone is stated, not found.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.lib import result_files
from benchmarks.lib.result_files import say
from benchmarks.lib.verification_tasks import CandidatePlace
from forecast_harness.bench import compare_solutions
from forecast_harness.packs import Language, Solution, load_pack, make_solution
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.timing.paired_comparison import ComparisonOutcome, StoppingRules
from forecast_harness.verify.checked_launches import found_share
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import verify

SHARES = (0.01, 0.03, 0.10)
SIMULATIONS = 2000
CONTEST_S = 10.0
"""Seconds of launches of one contest, both contestants together."""

_TEMPLATE = """import random
import time

import torch

BEGIN, LAST, STATE = time.monotonic(), {{}}, {{"n": 0, "left": 0, "seen": [], "before": time.monotonic()}}


def faulty(x):
    STATE["n"] += 1
    now, before = time.monotonic(), STATE["before"]
    STATE["before"] = now
    shape = tuple(x.shape)
    if shape not in STATE["seen"]:
        STATE["seen"].append(shape)
    return {when}


def run(x):
    stale = LAST.get(x.shape)
    if faulty(x):
        return torch.zeros_like(x) if stale is None else stale.clone()
    LAST[x.shape] = torch.softmax(x, -1)
    return LAST[x.shape].clone()
"""
_HONEST = "False"
_CONDITIONS: dict[str, str] = {
    "honest": _HONEST,
    "stale in 1 %": "random.random() < 0.01",
    "stale in 3 %": "random.random() < 0.03",
    "stale in 10 %": "random.random() < 0.10",
    "from 0.7 s on": "now - BEGIN > 0.7",
    "from 5 s on": "now - BEGIN > 5",
    "every 50th launch": "STATE['n'] % 50 == 0",
    "from the 300th launch on": "STATE['n'] >= 300",
    "in bursts of 10": "STATE.update(left=10 if random.random() < 0.005 else STATE['left'] - 1) or STATE['left'] > 0",
    "at the third size": "len(STATE['seen']) > 2 and shape == STATE['seen'][2]",
    "at the timed size, stale in 3 %": "x.numel() > 100_000 and random.random() < 0.03",
    "after a pause": "now - before > 0.04",
    "on one day of the week": "time.localtime().tm_wday == {another}",
}
MAY_BE_MISSED = ("from 5 s on", "from the 300th launch on", "at the timed size, stale in 3 %", "stale in 1 %")
"""By one verification; they are timed as well."""
_SLOWER = """import torch


def run(x):
    for _ in range(4):
        y = torch.softmax(x, -1)
    return y
"""


def families() -> dict[str, Solution]:
    """The faulty solutions by what is wrong with them."""
    another = (time.localtime().tm_wday + 3) % 7
    return {
        name: make_solution("faulty", _TEMPLATE.format(when=when.format(another=another)))
        for name, when in _CONDITIONS.items()
    }


def plan_of(place: CandidatePlace) -> VerificationPlan:
    """The shipped plan."""
    return place.plan(Language.TORCH) if place.device == "cuda" else VerificationPlan()


def verified(place: CandidatePlace, lane: SandboxLane, solution: Solution) -> dict[str, Any]:
    """One verification."""
    verdict = verify(load_pack("softmax"), solution, lane, plan=plan_of(place))
    return {
        "judgement": str(verdict.judgement),
        "reasons": [f"{r.code}: {r.detail}"[:200] for r in verdict.reasons],
        "checked": verdict.checked.to_json(),
        "launches": verdict.trials,
        "seconds": round(verdict.seconds, 2),
    }


def contested(place: CandidatePlace, lane: SandboxLane, solution: Solution) -> dict[str, Any]:
    """One bench beside an honest solution that takes four times as long."""
    began = time.perf_counter()
    slower = make_solution("slower", _SLOWER)
    rules = StoppingRules(seconds=CONTEST_S)
    _, entry = compare_solutions(
        load_pack("softmax"), [solution], lane, against=slower, plan=plan_of(place), rules=rules
    )
    return {
        "judgement": str(entry.verdict.judgement),
        "outcome": entry.outcome,
        "reasons": [f"{r.code}: {r.detail}"[:200] for r in entry.verdict.reasons],
        "checked": entry.checked.to_json(),
        "blocks": [d["blocks"] for d in entry.duels],
        "seconds": round(time.perf_counter() - began, 2),
    }


def simulated_power(launches: int, share: float, seed: int) -> float:
    """How many of the simulated verifications meet the fault."""
    rng = random.Random(seed)
    met = sum(any(rng.random() < share for _ in range(launches)) for _ in range(SIMULATIONS))
    return met / SIMULATIONS


def summary(
    verdicts: Mapping[str, list[dict[str, Any]]], benches: Mapping[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Per family how many were refused, and what the number of checked launches promises."""
    usual = verdicts.get("honest") or [row for rows in verdicts.values() for row in rows]
    launches = round(statistics.median(r["checked"]["launches"] for r in usual))
    return {
        "verified": {
            name: {
                "runs": len(rows),
                "refused": sum(r["judgement"] in ("rejected", "suspicious") for r in rows),
                "failures_of_the_harness": sum(r["judgement"] == "infrastructure" for r in rows),
            }
            for name, rows in verdicts.items()
        },
        "benched": {
            name: {
                "runs": len(rows),
                "refused": sum(r["judgement"] in ("rejected", "suspicious") for r in rows),
                "called_faster": sum(r["outcome"] == ComparisonOutcome.FASTER for r in rows),
                "checked": sorted(r["checked"]["launches"] for r in rows),
                "checked_timed": sorted(r["checked"]["timed"] for r in rows),
            }
            for name, rows in benches.items()
        },
        "median_checked_launches": launches,
        "median_seconds": round(statistics.median(r["seconds"] for r in usual), 2),
        "found_share": round(found_share(launches), 5),
        "arithmetic": {
            f"{100 * share:g} %": {
                "expected": round(1 - (1 - share) ** launches, 4),
                "simulated": simulated_power(launches, share, n),
            }
            for n, share in enumerate(SHARES)
        },
    }


def main() -> int:
    """Run the benchmark."""
    made = result_files.parser(__doc__)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="where candidates run")
    made.add_argument("--gpu", type=int, default=0, help="the driver's number of the device that is used")
    made.add_argument("--runs", type=int, default=15, help="verifications of each family")
    made.add_argument("--benches", type=int, default=3, help="benches of those a verification may miss")
    made.add_argument("--only", default="", help="families whose names contain this")
    arguments = result_files.parse_arguments(made, on_host=True)
    report = result_files.ResultFile(arguments, "rare faults are found as often as stated", seed=0)
    place = CandidatePlace.of(arguments.device, arguments.gpu)
    chosen = {name: one for name, one in families().items() if arguments.only in name}
    verdicts: dict[str, list[dict[str, Any]]] = {}
    benches: dict[str, list[dict[str, Any]]] = {}
    with place.lane() as lane:
        for name, solution in chosen.items():
            for _ in range(arguments.runs):
                row = verified(place, lane, solution)
                verdicts.setdefault(name, []).append(row)
                report.add("verified", {"family": name, **row})
            refused = sum(r["judgement"] != "accepted" for r in verdicts[name])
            say(f"{name}: {refused} of {arguments.runs} refused")
        for name in [n for n in ("honest", *MAY_BE_MISSED) if n in chosen]:
            for _ in range(arguments.benches):
                row = contested(place, lane, chosen[name])
                benches.setdefault(name, []).append(row)
                report.add("benched", {"family": name, **row})
                say(f"{name}, benched: {row['judgement']} {row['outcome']} {row['seconds']} s")
    report.finish(summary(verdicts, benches))
    return 0


if __name__ == "__main__":
    sys.exit(main())
