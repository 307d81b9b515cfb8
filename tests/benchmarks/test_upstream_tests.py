"""How PyTorch's own tests are run with us and without: what counts as a difference, and what a process survives."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.inductor import upstream_tests as upstream
from benchmarks.inductor.upstream_tests import TestRun

CASES = """
import os
import sys

import pytest

def test_passes():
    pass

def test_is_skipped():
    pytest.skip("no device")

def test_passes_alone():
    assert "forecast_autotune" not in sys.modules

def test_wants_every_choice():
    assert "forecast_autotune" not in sys.modules or os.environ.get("FORECAST_AUTOTUNE_MODE") == "exhaustive"

def test_takes_its_process_down():
    os._exit(7)

def test_comes_last():
    pass
"""
HANGS = """
import time

def test_hangs():
    until = time.monotonic() + 10000
    while time.monotonic() < until:
        try:
            time.sleep(10000)
        except Exception:
            pass

def test_comes_after():
    pass
"""


def options(only: str | None = None, devices: list[str] | None = None) -> argparse.Namespace:
    """Of a run over all cases, or those of some names."""
    return argparse.Namespace(only=only, each=600, processes=2, devices=devices)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [None, ["0", "1"]])
def test_a_file_is_run_in_both_arms_to_its_end(tmp_path: Path, devices: list[str] | None) -> None:
    """What takes a process down costs itself alone; what differs is run again and named."""
    (tmp_path / "test_cases.py").write_text(CASES, encoding="utf-8")
    result = upstream.run_file("test_cases.py", options(devices=devices), tmp_path, 3600.0, {})
    assert (result["collected"], result["came_to"], result["compared"]) == (6, {"plain": 6, "ours": 6}, 6)
    assert result["passed"] == {"plain": 4, "ours": 2}
    assert result["skipped"] == result["died"] == {"plain": 1, "ours": 1}
    assert result["failed"] == {"plain": 0, "ours": 2}
    assert result["lost"] == ["test_cases.py::test_passes_alone"]
    assert result["left_out"] == ["test_cases.py::test_wants_every_choice"]
    assert (result["gained"], result["chance"], result["open"]) == ([], [], [])
    assert upstream.summary([result])["left_out"] == result["left_out"]
    assert all(seconds > 0 for arm in ("plain", "ours") for seconds in result["ready_s"][arm])
    assert len(result["ready_s"]["plain"]) >= 3, "of all processes, that which collects among them"
    assert "lost: test_cases.py::test_passes_alone: AssertionError" in upstream.table([result])


def test_an_earlier_run_is_gone_on_with(tmp_path: Path) -> None:
    """What both arms came to is taken over; what one arm came to, or was not repeated, is run."""
    (tmp_path / "test_cases.py").write_text(CASES, encoding="utf-8")
    skipped, alone, choice, last = (
        f"test_cases.py::test_{name}"
        for name in ("is_skipped", "passes_alone", "wants_every_choice", "comes_last")
    )
    earlier = {
        "outcomes": {
            "plain": _told({skipped: "died", alone: "passed", choice: "passed"}),
            "ours": _told({skipped: "died", alone: "failed", choice: "failed", last: "failed"}),
        },
        "repeated": {"plain": _told({choice: "passed"}), "ours": _told({choice: "failed"})},
    }
    rows: list[dict[str, Any]] = []
    result = upstream.run_file(
        "test_cases.py", options(only="comes_last"), tmp_path, 3600.0, earlier, rows.append
    )
    assert (result["compared"], result["sampled"]) == (4, 4)
    assert result["died"] == {"plain": 1, "ours": 1}  # not run again
    rerun = result["outcomes"]["ours"][last]  # as the plain arm had not come to it
    assert rerun["outcome"] == "passed"
    assert set(result["repeated"]["plain"]) == {alone, choice}
    assert (result["lost"], result["left_out"], result["open"]) == ([alone], [choice], [])
    assert [(row["compared"], row["lost"], row["open"]) for row in rows] == [
        (4, [choice], [alone]),  # kept before anything is repeated, should the run be cut short
        (4, [alone, choice], []),
    ]


def test_a_difference_that_turns_round_is_chance() -> None:
    def arms(plain: dict[str, str], ours: dict[str, str]) -> upstream.Outcomes:
        return {"plain": _told(plain), "ours": _told(ours)}

    first = arms(
        {"stays": "passed", "turns": "passed", "goes": "passed", "comes": "failed", "waits": "passed"},
        {"stays": "failed", "turns": "failed", "goes": "failed", "comes": "passed", "waits": "failed"},
    )
    again = arms(
        {"stays": "passed", "turns": "failed", "goes": "passed", "comes": "failed", "waits": "passed"},
        {"stays": "died", "turns": "passed", "goes": "passed", "comes": "passed"},
    )
    assert upstream.standing(first, again) == {
        "lost": ["stays"],
        "gained": ["comes"],
        "chance": ["goes", "turns"],
        "open": ["waits"],  # no time was left for it with us
    }


def _told(words: dict[str, str]) -> dict[str, dict[str, str]]:
    return {test: {"outcome": word} for test, word in words.items()}


def test_what_hangs_is_ended_and_what_cannot_be_imported_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_late.py").write_text(HANGS, encoding="utf-8")
    run = TestRun("plain", tmp_path, 1)
    late, after = (f"test_late.py::test_{name}" for name in ("hangs", "comes_after"))
    result = run.outcomes("test_late.py", [late, after], time.monotonic() + 3600.0)
    assert (result[late]["outcome"], result[late]["why"]) == ("failed", "not done after 1 s")
    assert result[after]["outcome"] == "passed"
    (tmp_path / "test_late.py").write_text("import a_module_that_nobody_has\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match="a_module_that_nobody_has"):
        run.collect("test_late.py")


def test_only_what_both_came_to_is_compared() -> None:
    def said(*outcomes: str) -> dict[str, dict[str, str]]:
        return {f"t{i}": {"outcome": outcome} for i, outcome in enumerate(outcomes)}

    outcomes = {
        "plain": said("passed", "passed", "failed", "passed"),
        "ours": said("passed", "died", "passed"),
    }
    assert upstream.differences(outcomes) == (["t1"], ["t2"])
    assert upstream.compared(outcomes) == ["t0", "t1", "t2"]
    result = upstream.counts(outcomes)
    assert (result["passed"], result["died"]) == ({"plain": 2, "ours": 2}, {"plain": 0, "ours": 1})
