"""Contests between solutions, in real cells: who is faster, who is caught, what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from forecast_autotune.commands import main
from forecast_harness.clocks.paired_comparison import StoppingRules
from forecast_harness.sandbox.api import JobStatus, ResourceLimits, SandboxJob, SandboxLane
from forecast_harness.targets.packs import Solution, load_pack, make_solution
from forecast_harness.trials.bench import BenchResult, compare_solutions
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import verify
from forecast_harness.verify.timing_job import chance_difference
from forecast_harness.verify.verdict import Judgement, ReasonCode, memory_rise
from tests.harness.small import checked_only, small_folder

HERE = Path(__file__).parents[1]
QUICK = VerificationPlan(cases=4, timed=8)
RULES = StoppingRules(most=60)
SOFTMAX = checked_only(load_pack("softmax"))

ONCE = "import torch\n\n\ndef run(x):\n    return torch.softmax(x, -1)\n"
MANY_TIMES = """import torch


def run(x):
    for _ in range(3000):
        y = torch.softmax(x, -1)
    return y
"""
LATER_WRONG = """import torch

calls = 0


def run(x):
    global calls
    calls += 1
    return torch.softmax(x, -1) if calls < 120 else torch.zeros_like(x)
"""


def named(name: str, source: str) -> Solution:
    return make_solution(name, source)


def contest(lane: SandboxLane, *solutions: Solution, **options: Any) -> list[BenchResult]:
    return compare_solutions(SOFTMAX, solutions, lane, plan=QUICK, rules=RULES, **options)


@pytest.mark.slow
def test_the_slower_one_is_not(judging: SandboxLane) -> None:
    fast, slow = contest(judging, named("slow", MANY_TIMES), against=named("fast", ONCE))
    assert (fast.outcome, slow.outcome, len(slow.duels)) == ("incumbent", "slower", 1)


def test_a_few_late_launches_accuse_nobody() -> None:
    """A hopeless candidate's contest ends after three launches; a busy machine makes two of them late."""
    assert chance_difference([1.0, 0.0], 3) > 1
    assert chance_difference([1.0, 0.0], 20) < 0.5, (
        "who hides all of its time is caught when a win is decided"
    )
    assert chance_difference([0.3, 0.0], 200) < 0.2


def test_a_wrong_solution_has_no_time(judging: SandboxLane) -> None:
    wrong = named("wrong", "def run(x):\n    return x\n")
    entries = contest(judging, named("right", ONCE), wrong)
    assert (entries[1].verdict.judgement, entries[1].outcome) == (Judgement.REJECTED, "")
    assert entries[1].labels == {}
    assert [e.outcome for e in contest(judging, named("right", ONCE), against=wrong)] == ["", ""]


@pytest.mark.slow
def test_one_that_turns_wrong_while_it_is_timed_is_caught(judging: SandboxLane) -> None:
    """It passes a short verification; launches of the contest are checked, too."""
    drifting = named("drifting", LATER_WRONG)
    # No contest ends before all its blocks are run, whatever a busy host makes of the first ones.
    rules = StoppingRules(first=200, second=200, least=200, enough=200, most=200)
    right = named("right", MANY_TIMES.replace("3000", "4"))
    entries = compare_solutions(SOFTMAX, [right, drifting], judging, plan=QUICK, rules=rules)
    assert entries[0].verdict.reasons == ()
    assert entries[1].outcome == ""
    assert {r.code for r in entries[1].verdict.reasons} == {ReasonCode.WRONG_VALUES}


def test_a_seed_repeats_a_verification(judging: SandboxLane) -> None:
    pack, wrong = SOFTMAX, named("wrong", "import torch\n\n\ndef run(x):\n    return x.exp()\n")
    first = verify(pack, wrong, judging, plan=QUICK)
    again = verify(pack, wrong, judging, plan=QUICK, seed=first.facts["seed"])
    other = verify(pack, wrong, judging, plan=QUICK)
    assert first.reasons == again.reasons
    assert first.facts["seed"] != other.facts["seed"]
    assert first.facts["level"] == judging.level.name.lower()


def test_nothing_of_the_question_is_in_the_candidates_process(judging: SandboxLane) -> None:
    """Neither the reference nor the seed can be found among its objects."""
    spy = """import gc

import torch


def run(x):
    told = [d for d in gc.get_objects() if isinstance(d, dict) and ("reference" in d or "seed" in d)]
    modules = [m for m in __import__("sys").modules if "pack_reference" in m or m.endswith("verify.judge")]
    packs = [d for d in told if "definition" in d or "plan" in d]
    if packs or modules:
        raise RuntimeError(f"found {len(packs)} {modules}")
    return torch.softmax(x, -1)
"""
    verdict = verify(SOFTMAX, named("spy", spy), judging, plan=QUICK)
    assert verdict.accepted, verdict.reasons


def test_a_broken_pack_is_the_harness_fault(judging: SandboxLane) -> None:
    pack = SOFTMAX.with_(reference="def reference(x):\n    return x, x\n")
    verdict = verify(pack, named("right", ONCE), judging, plan=QUICK)
    assert verdict.judgement is Judgement.INFRASTRUCTURE
    job = SandboxJob("forecast_harness.verify.verification_job:main", {"pack": {}})
    assert judging.run(job, ResourceLimits(wall_s=20)).status is JobStatus.INFRA_ERROR


# --- the command line ---


def test_verify_prints_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.py").write_text("def run(x):\n    return x\n")
    options = ["--device", "cpu", "--cases", "3"]
    assert main(["verify", "softmax", "torch_plain", *options]) == 0
    assert "torch_plain on softmax: accepted" in capsys.readouterr().out
    assert main(["verify", "softmax", str(tmp_path / "wrong.py"), "--json", *options]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["judgement"], said["reasons"][0]["code"]) == ("rejected", "aliases_input")
    assert said["type"] == "verdict"
    assert said["facts"]["harness"]


def test_verify_judges_a_pack_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "softmax", "--device", "cpu"]) == 0
    assert "is sound" in capsys.readouterr().out
    assert main(["verify", str(HERE / "tasks" / "constant"), "--device", "cpu"]) == 1
    assert "refused" in capsys.readouterr().out


@pytest.mark.slow
def test_bench_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "slow.py").write_text(MANY_TIMES)
    options = ["--device", "cpu", "--cases", "2", "--seconds", "1", "--json"]
    options += ["--against", str(tmp_path / "slow.py")]
    assert main(["bench", small_folder("softmax", tmp_path), "torch_plain", *options]) == 0
    said = capsys.readouterr()
    stages = [line for line in said.err.splitlines() if "torch_plain" in line or "pack" in line]
    assert [stage.split()[0] for stage in stages[:3]] == ["checking", "verifying", "timing"], "a line a stage"
    slow, plain = json.loads(said.out)["entries"]
    assert (slow["outcome"], plain["solution"]) == ("incumbent", "torch_plain")
    assert plain["outcome"] in ("faster", "undecided", "unconfirmed", "slower")
    assert plain["labels"]["small"]["median_ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", "no_such_pack", "--device", "cpu"], "neither a shipped pack"),
        (["verify", "softmx", "--device", "cpu"], "did you mean softmax?"),
        (["verify", "softmax", "nobody", "--device", "cpu"], "neither a file nor a solution"),
        (["verify", "softmax", "torch_plain", "--device", "77"], "--device 77"),
        (["verify", "softmax", "torch_plain", "--device", "cpu", "--level", "none"], "--level must be"),
        (["bench", "softmax", "torch_plain", "--device", "cpu"], "something to compare"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_memory_is_known_beside_times_and_its_rise_said(judging: SandboxLane) -> None:
    plan = VerificationPlan(cases=2, timed=2, launches=0)
    plain, copying = (
        verify(SOFTMAX, named("mine", ONCE.replace("torch.softmax(x, -1)", text)), judging, plan=plan)
        for text in ("torch.softmax(x, -1)", "torch.softmax(x.double(), -1).float()")
    )
    assert plain.accepted
    assert copying.accepted
    own, base = copying.facts["peak_bytes"], plain.facts["peak_bytes"]
    for work in SOFTMAX.timed_workloads("cpu"):
        size = 4 * work.axes["M"] * work.axes["N"]
        assert base[work.name] == size
        assert own[work.name] >= 4 * size
    assert memory_rise(own, base).startswith("holds 300% more memory at a time (")
    assert memory_rise({"a": 104, "b": 1}, {"a": 100, "c": 1}) == memory_rise({}, base) == ""
