"""Nobody is called faster for having cheated the clock: one or two variants of each family, in real contests.

All of them, on several packs, are run by `benchmarks.verification.timing_attacks`.
"""

from __future__ import annotations

from math import log

import pytest

pytest.importorskip("torch")

from forecast_harness.clocks.paired_comparison import (
    ComparisonOutcome,
    ComparisonResult,
    StoppingRules,
)
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.targets.packs import Workload, load_pack, make_solution
from forecast_harness.trials.bench import BenchResult, compare_solutions
from forecast_harness.verify.plan import VerificationPlan
from tests.harness.timing_attacks.families import FAMILIES, sources

PACK = load_pack("softmax").with_(
    workloads=(Workload("few", {"M": 9, "N": 64}), Workload("host", {"M": 256, "N": 512}, host=True))
)
PLAN = VerificationPlan(cases=3, timed=4)
RULES = StoppingRules(most=20)
CHEAP = {
    "lighter serving code": ["a_lean_window_that_flatters"],
    "work before the clock": ["while_binding"],
    "work in the idle phase": ["before_the_question_is_read"],
    "wakes itself while stopped": ["by_a_slow_timer"],
    "more processors": ["a_wider_affinity"],
    "inflated cost of asking": ["slow_when_nothing_is_asked"],
    "smaller times reported": ["half_a_clock"],
    "forged outputs and digests": ["computes_when_it_is_read"],
    "incremental recomputation": ["rows_that_changed"],
    "finishes after the answer": ["the_answer_comes_first_and_the_copy_after"],
    "odd forms of outputs": ["huge_strides_are_claimed"],
    "noise in the other's turns": ["spinning_daemons"],
    "memory and cache pressure": ["holds_much_memory"],
    "children that compute": ["a_child_that_watches_the_memory"],
}


def test_every_family_is_tried() -> None:
    assert set(CHEAP) == set(FAMILIES)
    assert all(len(variants) >= 4 for variants in FAMILIES.values())
    assert all(set(picked) <= set(FAMILIES[family]) for family, picked in CHEAP.items())


def compare(lane: SandboxLane, source: str) -> BenchResult:
    attack = make_solution("attack", source)
    return compare_solutions(
        PACK, [attack], lane, against=PACK.solution("torch_plain"), plan=PLAN, rules=RULES
    )[1]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("family", "variant"), [(family, one) for family, picked in CHEAP.items() for one in picked]
)
def test_no_cheat_is_called_faster(judging: SandboxLane, family: str, variant: str) -> None:
    result = compare(judging, sources(PACK)[family, variant])
    assert result.outcome in ("", "slower", "undecided", "unconfirmed"), result
    if not result.outcome:
        assert result.verdict.reasons, "who is refused is told why"


def test_what_is_faster_is_called_so(judging: SandboxLane) -> None:
    """The same contest finds a gain, so that it is not for being blind that it finds no cheat."""
    slow = PACK.solution("torch_plain").source.replace("def run(", "def once(")
    slow += "\n\ndef run(x):\n    for _ in range(30):\n        y = once(x)\n    return y\n"
    plain = PACK.solution("torch_plain")
    result = compare_solutions(
        PACK, [plain], judging, against=make_solution("slow", slow), plan=PLAN, rules=RULES
    )[1]
    assert result.outcome == "faster", result
    assert result.gain is not None
    assert result.gain <= result.duels[-1]["own_gain"] + 1e-4


@pytest.mark.parametrize(
    ("own", "outcome", "gain"),
    [
        (None, ComparisonOutcome.FASTER, 0.5),
        (0.4, ComparisonOutcome.FASTER, 0.4),
        (0.9, ComparisonOutcome.FASTER, 0.5),
        (0.004, ComparisonOutcome.UNDECIDED, 0.004),
        (-0.2, ComparisonOutcome.UNDECIDED, -0.2),
    ],
)
def test_who_is_faster_is_so_by_both_clocks(
    own: float | None, outcome: ComparisonOutcome, gain: float
) -> None:
    ended = ComparisonResult(
        ComparisonOutcome.FASTER, (log(1.5),) * 20, 1e6, 0.1, "faster in 20 of 20 blocks"
    )
    result = ended.with_own_gain(own, 0.005)
    assert (result.outcome, result.gain) == (outcome, pytest.approx(gain))
    slower = ComparisonResult(ComparisonOutcome.SLOWER, (-0.5,) * 20, 0.0, 0.1, "slower in 20 of 20 blocks")
    assert slower.with_own_gain(own, 0.005).outcome is ComparisonOutcome.SLOWER
