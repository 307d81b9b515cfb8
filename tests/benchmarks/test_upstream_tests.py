"""How PyTorch's own tests are run with us and without: what counts as a difference, and what a process survives."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.inductor import upstream_tests as upstream
from benchmarks.inductor.upstream_tests import TestRun, deal, without_folders

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

PROBES = """
import os
from pathlib import Path
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

SETS = valid_vec_isa_list()
COMPILED = list(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so"))


def test_probes():
    assert SETS and bool(COMPILED) == (os.environ["PROBES"] == "1")
"""


def options(only: str | None = None, devices: list[str] | None = None) -> argparse.Namespace:
    """Of a run over all cases, or those of some names."""
    return argparse.Namespace(
        share=1.0,
        seed=0,
        only=only,
        without=None,
        again=None,
        each=600,
        processes=2,
        python=sys.executable,
        devices=devices,
    )


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


def test_what_was_late_or_has_changed_is_run_anew() -> None:
    late = {"outcome": "failed", "why": "not done after 60 s"}
    arms = {
        "plain": {"a": late, **_told({"b": "passed", "c": "passed"})},
        "ours": _told(dict.fromkeys("abc", "passed")),
    }
    earlier = {
        "outcomes": arms,
        "repeated": {"plain": {}, "ours": {}},
        "complete": _told({"b": "passed", "c": "failed"}),
    }
    kept = upstream.kept_outcomes(earlier, None)
    assert {arm: list(result) for arm, result in kept["outcomes"].items()} == {
        "plain": ["b", "c"],
        "ours": ["b", "c"],
    }
    assert list(kept["complete"]["ours"]) == ["b", "c"]
    kept = upstream.kept_outcomes(earlier, "^b$")
    assert [list(result) for result in kept["outcomes"].values()] == [["c"], ["c"]]
    assert list(kept["complete"]["ours"]) == ["c"]
    nothing = {"plain": {}, "ours": {}}
    assert upstream.kept_outcomes({}, "b") == {"outcomes": nothing, "repeated": nothing, "complete": nothing}


def test_a_run_is_gone_on_with_on_the_same_device_and_release(tmp_path: Path) -> None:
    here = {"device": "cpu", "torch": "2.13.0", "triton": "3.9.0"}
    there = {**here, "date": "2026-11-29", "commit": "abc", "python": "3.11.7"}
    rows = [{"file": "test_a.py", "outcomes": {}}]
    data = {"null": False, "environment": there, "options": {"each": 60}, "raw": {"files": rows}}
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    result = {"date": "2026-11-29", "commit": "abc", "options": {"each": 60}}
    assert upstream.earlier_run(path, here) == {"files": {"test_a.py": rows[0]}, "runs": [result]}
    assert upstream.earlier_run(None, here) == {"files": {}, "runs": []}
    with pytest.raises(SystemExit, match=r"this torch, '2\.12\.1'; earlier\.json has '2\.13\.0'"):
        upstream.earlier_run(path, {**here, "torch": "2.12.1"})


def test_each_process_has_its_share_of_the_slow_tests() -> None:
    """They come at regular distances: a file's parameters."""
    names = [f"t{n}" for n in range(160)]
    slow = set(names[::16])
    dealt = deal(names, 16, {})
    assert sorted(name for part in dealt for name in part) == sorted(names)
    assert dealt == deal(names, 16, {})
    assert all(part == sorted(part, key=names.index) for part in dealt)
    assert max(len(slow & set(part)) for part in dealt) <= 4
    assert sorted(deal(names[:2], 16, {})) == [["t0"], ["t1"]]
    assert deal([], 4, {}) == []
    known = {**dict.fromkeys(names, 1.0), **dict.fromkeys(slow, 50.0)}
    assert [len(slow & set(part)) for part in deal(names, 10, known)] == [1] * 10
    assert [len(part) for part in deal(names[:3], 2, {"t0": 2.0, "t1": 1.0, "t2": 1.0})] == [1, 2]


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
    run = TestRun("plain", tmp_path, sys.executable, 1)
    late, after = (f"test_late.py::test_{name}" for name in ("hangs", "comes_after"))
    result = run.outcomes("test_late.py", [late, after], time.monotonic() + 3600.0)
    assert (result[late]["outcome"], result[late]["why"]) == ("failed", "not done after 1 s")
    assert result[after]["outcome"] == "passed"
    (tmp_path / "test_late.py").write_text("import a_module_that_nobody_has\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match="a_module_that_nobody_has"):
        run.collect("test_late.py")


@pytest.mark.slow
def test_what_a_processor_can_do_is_found_out_by_one_process(tmp_path: Path) -> None:
    """Torch compiles a program for every instruction set, and runs each, where its cache is empty."""
    upstream._builds.cache_clear()  # what was found out before, in this process
    (tmp_path / "test_cases.py").write_text(PROBES, encoding="utf-8")
    outcomes = []
    for expected in ("1", "0"):
        run = TestRun("plain", tmp_path, sys.executable, 600)
        run.environment |= {"PROBES": expected}
        outcomes.append(run.outcomes("test_cases.py", ["test_cases.py::test_probes"], time.monotonic() + 600))
    assert [result["outcome"] for answer in outcomes for result in answer.values()] == ["passed", "passed"]


def test_messages_name_no_folder_of_this_machine() -> None:
    text = "('/a/b-1/test_x.py', 3, 'Skipped: 1/2, https://a.example/b/c') in /opt/lib/python3.11/torch/x.py"
    want = "('test_x.py', 3, 'Skipped: 1/2, https://a.example/b/c') in x.py"
    assert without_folders(text) == want


def test_a_share_is_seeded_and_keeps_the_order() -> None:
    names = [f"test_{i}" for i in range(100)]
    some = upstream.sample(names, 0.1, 3)
    assert (len(some), some) == (10, sorted(some, key=names.index))
    assert some == upstream.sample(names, 0.1, 3) != upstream.sample(names, 0.1, 4)
    assert (upstream.sample(names[:3], 0.01, 0), upstream.sample([], 0.5, 0))[1] == []
    assert len(upstream.sample(names[:3], 0.01, 0)) == 1


def test_files_beside_a_test_are_those_it_imports() -> None:
    source = """
try:
    from . import test_cpu_repro, test_torchinductor
except ImportError:
    import test_cpu_repro
from inductor.test_flex import helper
from .common import thing
import torch.testing
from torch._inductor import config
"""
    assert upstream.imported_names(source) == {"test_cpu_repro", "test_torchinductor", "test_flex", "common"}


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


def test_tests_are_chosen_by_their_names() -> None:
    names = ["t.py::A::test_mm", "t.py::A::test_addmm", "t.py::B::test_mm"]
    assert upstream.named(names, None, None) == names
    assert upstream.named(names, "::A::", None) == names[:2]
    assert upstream.named(names, None, "_mm$") == ["t.py::A::test_addmm"]
    assert upstream.named(names, "::A::", "addmm") == ["t.py::A::test_mm"]
    assert upstream.sample(upstream.named(names, "nothing", None), 1.0, 0) == []


@pytest.mark.parametrize("given", [["--only", "("], ["--without", "*"]])
def test_a_pattern_that_is_none_is_refused(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["upstream_tests", *given, "--out", "x.json"])
    with pytest.raises(SystemExit):
        upstream.parse()


def test_arms_side_by_side_share_no_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process and what it starts stay on its arm's half."""
    here = min(os.sched_getaffinity(0))
    case = f"import os\ndef test_cores():\n    assert os.sched_getaffinity(0) == {{{here}}}\n"
    (tmp_path / "test_cores.py").write_text(case, encoding="utf-8")
    run = TestRun("plain", tmp_path, sys.executable, 600, cores=[here])
    name = "test_cores.py::test_cores"
    assert run.outcomes("test_cores.py", [name], time.monotonic() + 3600.0)[name]["outcome"] == "passed"
    for count, ours in ((1, None), (2, [1]), (5, [2, 3]), (16, list(range(8, 16)))):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=count: set(range(count)))
        cores = upstream.cores_of_arms()
        assert cores.get("ours") == ours
        assert not set(cores.get("plain", [])) & set(ours or [])
