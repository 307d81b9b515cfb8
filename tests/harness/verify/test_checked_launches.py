"""How rare a fault checked launches find: by arithmetic, by quick checks that are never wrong, and for real."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.targets.packs import load_pack, make_solution
from forecast_harness.targets.packs.load import builtin_names
from forecast_harness.trials.bench import compare_solutions
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problem import DrawSpec, problem_of
from forecast_harness.verify.run import verify
from forecast_harness.verify.verdict import (
    CheckedLaunches,
    Judgement,
    ReasonCode,
    SolutionVerdict,
    fault_power,
    found_share,
)
from tests.harness.small import checked_only

ROOT = Path(__file__).parents[3]


def launches_needed(share: float, confidence: float = 0.99) -> int:
    """How many launches find a fault in this share of them with this probability."""
    return math.ceil(math.log(1.0 - confidence) / math.log(1.0 - share))


def test_a_verdict_states_the_counts_that_were_measured() -> None:
    summary = json.loads((ROOT / "benchmarks/results/mutants_cpu.json").read_text())["summary"]
    measured = summary["mutants"]["families"]
    for family in (f for f in measured if f != "all"):
        one = measured[family]
        assert f"{family} {one['killed']['verify']} of {one['witnessed']}" in fault_power().split(", ")


def test_as_many_launches_as_a_share_needs() -> None:
    plan = VerificationPlan()
    assert launches_needed(0.01) == plan.contest_launches == 459
    assert plan.launches >= launches_needed(0.02)
    for share in (0.001, 0.01, 0.03, 0.1, 0.5):
        n = launches_needed(share)
        assert 1 - (1 - share) ** n >= 0.99 > 1 - (1 - share) ** (n - 1)
        assert found_share(n) <= share < found_share(n - 1)
    assert found_share(0) == 1.0
    assert found_share(1) == pytest.approx(0.99)


def test_what_was_checked_is_said() -> None:
    checked = CheckedLaunches(400, 0, 2.0) + CheckedLaunches(60, 58, 6.25)
    assert checked == CheckedLaunches(460, 58, 6.25)
    assert str(checked) == (
        "checked 460 launches up to 6.2 s after the import: a fault in 1 % of launches would have been found with "
        "99%; of timed launches, 58 of them, in 7.6 %"
    )
    assert "timed" not in str(CheckedLaunches(10, 0, 1.0))
    assert str(CheckedLaunches()) == "checked no launch"
    assert CheckedLaunches.from_json(checked.to_json()) == checked
    assert checked.to_json()["found_share"] == pytest.approx(0.00996, abs=1e-5)
    verdict = SolutionVerdict("p", "s", checked=checked)
    assert SolutionVerdict.from_json(verdict.to_json()).checked == checked


Change = Callable[[Any, Any], Any]
WRONG: dict[str, Change] = {
    "stale": lambda right, stale: stale,
    "zeros": lambda right, stale: torch.zeros_like(right),
    "a NaN": lambda right, stale: one_changed(right, math.nan),
    "an infinity": lambda right, stale: one_changed(right, math.inf),
    "one element": lambda right, stale: one_changed(right, 7.0),
    "a hundredth": lambda right, stale: (right.double() * 1.02).to(right.dtype),
}


def one_changed(right: Any, value: float) -> Any:
    changed = right.double().clone().reshape(-1)
    changed[changed.numel() // 3] = value
    return changed.reshape(right.shape).to(right.dtype)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", sorted(builtin_names()))
def test_what_is_surely_right_keeps_the_full_limits(name: str, tmp_path: Path) -> None:
    """Errors of every size, around the limits: a quick check never takes what the full one refuses."""
    pack = load_pack(name)
    problem, draws = problem_of(pack, tmp_path), torch.Generator().manual_seed(0)
    axes = pack.checked_workloads[0].axes
    assert not problem.case(axes, DrawSpec("normal", "contiguous", draws)).is_surely_right([])
    taken = 0
    for n in range(6):
        case, other = (problem.case(axes, DrawSpec("normal", "contiguous", draws)) for _ in range(2))
        assert case.right is not None
        assert other.right is not None
        right, stale = list(case.right()), list(other.right())
        if n == 0:
            assert not case.is_surely_right(right), "before a full check nothing is known of the limits"
            assert case.check(right)[0] is None
        taken += case.is_surely_right(right)
        for size in (0.1, 0.5, 1.0, 2.0, 8.0):
            got = [noisy(t, size, draws) for t in right]
            if case.is_surely_right(got):
                assert case.check(got)[0] is None
        for message, change in WRONG.items():
            wrong = [change(a, b) for a, b in zip(right, stale, strict=True)]
            if case.check(wrong)[0] is not None:
                assert not case.is_surely_right(wrong), message
    assert taken >= 5, "exact results are found right without the full limits"


def noisy(right: Any, size: float, draws: Any) -> Any:
    """Every element off by so many roundings, to either side."""
    if not right.is_floating_point():
        return right
    signs = torch.randint(0, 2, right.shape, generator=draws).double() * 2 - 1
    return (right.double() * (1 + size * torch.finfo(right.dtype).eps * signs)).to(right.dtype)


STALE = """import random

import torch

LAST = {{}}


def run(x):
    if x.shape in LAST and random.random() < {share}:
        return LAST[x.shape].clone()
    y = torch.softmax(x, -1)
    LAST[x.shape] = y.clone()
    return y
"""
LATE = """import time

import torch

BEGIN = time.monotonic()


def run(x):
    y = torch.softmax(x, -1)
    return y * 0 if {when} else y
"""


def test_results_that_are_seldom_stale_are_found(judging: SandboxLane) -> None:
    pack, share = checked_only(load_pack("softmax")), 0.1
    plan = VerificationPlan(cases=6, timed=4, launches=launches_needed(share, 1 - 1e-9), longer_s=60)
    verdict = verify(pack, make_solution("stale", STALE.format(share=share)), judging, plan=plan)
    assert verdict.judgement is Judgement.REJECTED
    assert {r.code for r in verdict.reasons} <= {ReasonCode.WRONG_VALUES, ReasonCode.NONDETERMINISTIC}


@pytest.mark.parametrize(
    "when", ["time.monotonic() - BEGIN > 0.7", "x.numel() and (COUNT.append(0) or len(COUNT)) % 50 == 0"]
)
def test_faults_that_begin_late_or_come_now_and_then_are_found(judging: SandboxLane, when: str) -> None:
    pack = checked_only(load_pack("softmax"))
    plan = VerificationPlan(cases=6, timed=4, launches=10_000, longer_s=20)
    source = LATE.format(when=when) + "\n\nCOUNT = []\n"
    verdict = verify(pack, make_solution("late", source), judging, plan=plan)
    assert verdict.judgement is Judgement.REJECTED
    assert verdict.reasons[0].code is ReasonCode.WRONG_VALUES


def test_an_honest_solution_is_checked_as_often_as_planned(judging: SandboxLane) -> None:
    pack = checked_only(load_pack("softmax"))
    plan = VerificationPlan(cases=3, timed=2, launches=60, longer_s=60)
    verdict = verify(pack, pack.solution("torch_plain"), judging, plan=plan)
    assert verdict.accepted, verdict.reasons
    assert verdict.checked.launches == 60
    assert 0 < verdict.checked.timed <= 6
    assert verdict.checked.seconds > 0
    shorter = verify(pack, pack.solution("torch_plain"), judging, plan=replace(plan, launches=1))
    assert shorter.checked.launches < 60


def test_a_contest_adds_launches_that_were_timed(judging: SandboxLane) -> None:
    pack = checked_only(load_pack("softmax"))
    slow = make_solution(
        "slow",
        "import time\nimport torch\n\n\ndef run(x):\n    time.sleep(0.01)\n    return torch.softmax(x, -1)\n",
    )
    plan = VerificationPlan(
        cases=3, timed=2, launches=60, contest_launches=300, longer_s=60, longer_timed_s=60
    )
    first, faster = compare_solutions(pack, [pack.solution("torch_plain")], judging, against=slow, plan=plan)
    assert (first.outcome, faster.outcome) == ("incumbent", "faster"), faster.verdict.reasons
    assert len(faster.duels) == 2
    assert 0.2 < faster.gain == faster.duels[1]["gain"]
    assert set(faster.labels) == set(first.labels) == {"small", "ragged"}
    assert all(label.n >= 40 and label.harness for label in faster.labels.values())
    assert faster.checked.launches >= faster.verdict.checked.launches + 300
    assert faster.checked.timed > faster.verdict.checked.timed + 30
    assert first.checked == first.verdict.checked
