"""Nothing decides for another: programs that share a store and differ in one thing, compiled for real on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.integrations.inductor.test_compile import answer_of, environment

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torch")

pytestmark = pytest.mark.slow
OPERATORS = ["operators", "thresholds", "hooks", "failures", "foreign_times", "disturbed"]


def work(folder: Path, cache: str, *scenarios: str, **more: str) -> Any:
    """The answers of scenarios in one process; `cache` names its caches of compilers."""
    return answer_of("identity_worker.py", environment(folder, cache, **more), folder, *scenarios)


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return work(tmp_path_factory.mktemp("operators"), "cache", *OPERATORS)


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return work(tmp_path_factory.mktemp("layers"), "cache", "activations", "batches")


def timed(answer: dict[str, Any], word: str) -> bool:
    return any(word in name for name in answer["timed"])


def test_a_template_is_timed_for_each_thing_that_is_fused_to_it(layers: Any) -> None:
    answers = layers["activations"]
    for name, answer in answers.items():
        assert answer["right"], name
        assert timed(answer, "cpp_") is (not name.endswith("again")), name


def test_the_summary_names_what_an_empty_batch_took(layers: Any) -> None:
    for name, answer in layers["batches"].items():
        assert answer["chosen"] in ([], answer["taken"]), name
        assert answer["stored"] == (0 if "_0" in name else 1), name


def test_an_edited_operator_is_timed_again_and_what_it_calls_belongs_to_it(operators: Any) -> None:
    again = {name: timed(answer, "faident_edited") for name, answer in operators["operators"].items()}
    assert again == {"first": True, "same": False, "body": True, "helper": True}


def test_a_threshold_holds_in_every_process(operators: Any) -> None:
    answers = operators["thresholds"]
    for name in ("first", "second", "third"):
        assert answers[name]["taken"][-1:] == ["aten::faident_threshold_fallback"], name
        assert answers[name]["chosen"] == ["aten::faident_threshold_fallback"], name
    assert [answers[name]["timed"] for name in ("second", "none", "third")] == [[], [], []]


def test_a_hook_is_asked_in_every_process_with_all_times(operators: Any) -> None:
    answers = operators["hooks"]
    asked = [count for count in answers.pop("asked") if count > 1]
    assert asked == [2, 2]
    taken = {name: [one for one in answer["taken"] if one != "aten::mm"] for name, answer in answers.items()}
    for name, answer in answers.items():
        assert answer["chosen"] == taken[name], name
    assert taken["first"] == taken["second"] != taken["none"]
    assert [timed(answers[name], "") for name in ("first", "second", "none")] == [True, False, False]


def test_a_killed_compiler_says_nothing_of_a_choice(operators: Any) -> None:
    killed, broken = operators["failures"]["killed"], operators["failures"]["broken"]
    assert killed["first"]["risks"][0] > 0.1
    assert (killed["first"]["stored"], killed["again"]["stored"]) == (0, 1)
    assert (timed(killed["again"], "split"), timed(killed["again"], "killed_fallback")) == (True, False)
    assert (broken["first"]["risks"], broken["first"]["stored"], broken["again"]["timed"]) == ([0.0], 1, [])


def test_times_of_inductors_own_cache_are_obeyed_and_not_ours(operators: Any) -> None:
    obeyed, measured = (operators["foreign_times"][name] for name in ("obeyed", "measured"))
    assert (obeyed["timed"], obeyed["measured"], obeyed["stored"]) == ([], [0], 0)
    assert obeyed["risks"] == [1.0]
    assert (measured["measured"], measured["stored"]) == ([2], 1)


def test_what_other_work_disturbed_is_not_kept(operators: Any) -> None:
    beside, alone = (operators["disturbed"][name] for name in ("beside", "alone"))
    assert (beside["stored"], beside["risks"], beside["measured"]) == (0, [1.0], [2])
    assert "other work disturbed" in beside["reasons"][0]
    assert (alone["measured"], alone["stored"]) == ([2], 1)


def test_precompiled_artifacts_serve_those_alone_who_compile_by_the_same_rules(tmp_path: Path) -> None:
    answers = {}
    for number, step in enumerate(("plain_0", "served_1:plain_0", "plain_1:served_1", "served_2:served_1")):
        caching = {"TORCH_CACHING_PRECOMPILE": "1", "STEP": step}
        answers[step] = work(tmp_path, f"cache{number}", "compile_once", **caching)["compile_once"]
    assert [answer["precompiled"] for answer in answers.values()] == [0, 0, 0, 1]
    assert answers["served_1:plain_0"]["operations"] == 1


def test_what_another_process_compiles_is_not_filed_under_our_name(tmp_path: Path) -> None:
    elsewhere = {"TORCHINDUCTOR_FX_COMPILE_MODE": "SUBPROCESS", "STEP": "served_0"}
    first = work(tmp_path, "cache", "compile_once", **elsewhere)["compile_once"]
    assert (first["operations"], first["said"] != []) == (0, True)
    here = work(tmp_path, "cache", "compile_once", STEP="served_1")["compile_once"]
    assert (here["hits"], here["operations"]) == (0, 1)


OPTIONS = """
import json, torch
from forecast_autotune.activate import autoload
autoload()
said = []
for options in ({"max-autotune": True}, {"max_autotune": "yes"}, {"max_autotunee": True}):
    try:
        torch.compile(torch.relu, backend="forecast_autotune", options=options)
    except RuntimeError as error:
        said.append(str(error).partition(",")[0])
print(json.dumps(said))
"""


def test_options_of_our_backend_are_checked_where_torch_checks_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", OPTIONS], capture_output=True, text=True, check=True)
    wrong_type, unknown = json.loads(done.stdout.splitlines()[-1])
    assert wrong_type.startswith("Unexpected type of attr max_autotune")
    assert unknown == "Unexpected optimization option max_autotunee"
