"""The live comparison with and without advice: which kernels, which models, whose turn, what it adds up to."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kernels
from benchmarks.lib.advice.table import recorded_advice
from benchmarks.lib.environment import ROOT
from benchmarks.lib.processes.waiting_processes import WaitingChild
from benchmarks.tuning import advice_live
from benchmarks.tuning.advice_live import RecordedList
from forecast_autotune.surrogates.learned import shipped_model

ADVICE = ROOT / "benchmarks" / "data" / "advice.jsonl.gz"
CONFIGS = tuple({"kwargs": {"BLOCK": n}, "num_warps": 4} for n in range(advice_live.FEWEST_CONFIGS))
LIST = RecordedList(CONFIGS, CONFIGS[: advice_live.TOP], 0.1)


def kernel_of(case: kernels.Case) -> str:
    return case.name.partition("/")[0]


def usable(limits: dict[str, RecordedList] | None = None) -> dict[str, dict[str, kernels.Case]]:
    lists = {c.name: LIST for c in kernels.every()} | (limits or {})
    return advice_live.usable_cases(lists, recorded_advice(ADVICE))


def test_the_draw_is_a_function_of_the_seed_and_covers_families() -> None:
    cases = usable()
    drawn = advice_live.drawn_cases(cases, 20, 10, 0)
    assert drawn == advice_live.drawn_cases(dict(reversed(cases.items())), 20, 10, 0)
    assert drawn != advice_live.drawn_cases(cases, 20, 10, 1)
    assert len({kernel_of(c) for c in drawn}) == 20
    families = Counter(c.family for c in drawn)
    assert len(families) == 10
    assert max(families.values()) <= 3
    begun = {c.family for c in drawn[:10]}
    assert begun == set(families), "a run cut short has met every family"


def test_the_first_shape_within_the_limits_is_taken() -> None:
    first, second = kernels.cases(["matmul"])[:2]
    assert usable()["gemm"]["matmul"] == first
    short = {first.name: replace(LIST, best_ms=0.004)}
    assert usable(short)["gemm"]["matmul"] == second
    few = {c.name: replace(LIST, configs=CONFIGS[:4]) for c in kernels.cases(["matmul"])}
    assert "matmul" not in usable(few)["gemm"]


def test_a_model_that_may_know_the_family_is_refused(tmp_path: Path) -> None:
    model = shipped_model()
    assert model is not None
    replace(model, about={"without": "gemm"}).save(tmp_path / "gemm.npz")
    replace(model, about={"without": "gemm"}).save(tmp_path / "norm.npz")
    assert advice_live.model_without("gemm", tmp_path) == tmp_path / "gemm.npz"
    with pytest.raises(SystemExit, match="without 'gemm'"):
        advice_live.model_without("norm", tmp_path)
    with pytest.raises(SystemExit, match=r"scan\.npz is missing"):
        advice_live.model_without("scan", tmp_path)


def test_both_answers_are_followed_the_latest_first() -> None:
    found = recorded_advice(ADVICE)
    assert set(found) == {kernel_of(c) for c in kernels.every()}
    assert {(a.version, len(a.others)) for a in found.values()} == {("advice-2", 1)}
    assert len(found["attention"].functions) == 2


def test_arms_take_turns_at_being_first() -> None:
    orders = [advice_live.arm_order(number, repeat)[0] for number in range(2) for repeat in range(2)]
    assert orders == ["off", "on", "on", "off"]


def row(name: str, off: list[float], on: list[float]) -> dict[str, Any]:
    def arm(values: list[float], advice: str) -> dict[str, Any]:
        figures = dict.fromkeys(("seconds", "forecast_s", "measured", "regret", "stated_risk"), values)
        return {**figures, "advice": [advice] * len(values)}

    arms = {"off": arm(off, ""), "on": arm(on, "advice at weight 0.28")}
    return {"case": name, "family": name, "noise": 0.0, "wrong": {}, "arms": arms}


def test_kernels_are_pairs() -> None:
    found = advice_live.summary([row("a", [3, 1], [1, 1]), row("b", [2], [2]), row("c", [], [])], failed=2)
    assert (found["kernels"], found["failed"], found["followed"]) == (2, 2, 3)
    assert found["off"]["mean_measured"] == 2
    assert found["measured_on_less_off"] == {
        "mean": [-0.5, -1.0, 0.0],
        "median": [-0.5, -1.0, 0.0],
        "less": 1,
        "more": 0,
    }
    assert advice_live.summary([], failed=0)["kernels"] == 0


def waiting(body: str) -> WaitingChild:
    text = f"from benchmarks.lib.processes.waiting_processes import *\n{body}"
    return WaitingChild([sys.executable, "-c", text], {**os.environ, "PYTHONPATH": str(ROOT)})


def test_a_process_waits_for_its_turn() -> None:
    child = waiting("say_ready()\nprint('{noise')\ngive_answer({'got': wait_for_turn()['n'] + 1})")
    try:
        child.wait_until_ready(60)
        assert child.take_turn({"n": 1}, 60) == {"got": 2}
    finally:
        child.close()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("say_ready()\nwait_for_turn()\nraise SystemExit(3)", "ended .* with 3"),
        ("say_ready()\nwait_for_turn()\nimport time; time.sleep(60)", "not answer"),
    ],
)
def test_a_process_that_gives_no_answer_is_named(body: str, message: str) -> None:
    child = waiting(body)
    try:
        child.wait_until_ready(60)
        with pytest.raises(RuntimeError, match=message):
            child.take_turn({}, 2)
    finally:
        child.close()
