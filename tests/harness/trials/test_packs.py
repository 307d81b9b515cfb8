"""Nodes of real packs in a real sandbox: good, wrong, crashing, hanging, slower and suspicious ones."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from forecast_autotune.errors import SettingsError
from forecast_autotune.records import Outcome, codec
from forecast_harness.records import (
    ConfirmationJob,
    Node,
    NodeJob,
    NodeResult,
    SearchTarget,
    TargetKind,
    VerificationJob,
)
from forecast_harness.sandbox.api import ResourceLimits
from forecast_harness.targets.search_target import open_target, pack_of, solution_of
from forecast_harness.trials import packs as pack_judge
from forecast_harness.trials.bench import SolutionBench
from forecast_harness.trials.configs.source_configs import configs_of
from forecast_harness.trials.devices import device_slug
from forecast_harness.trials.host_judges import open_judge
from forecast_harness.trials.packs import PackJudge, compiled_solution
from forecast_harness.trials.protocol import LaneFailure, NodeJudge
from forecast_harness.trials.race import RaceRules
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import verify
from tests.harness.small import small_target

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")

TARGET, SEED = small_target("softmax")
FAST = "import torch\n\n\ndef run(x):\n    return torch.softmax(x, -1)\n"
OFTEN = FAST.replace(
    "return torch.softmax(x, -1)", "for _ in range(400):\n        y = torch.softmax(x, -1)\n    return y"
)
TUNABLE = """import torch

TIMES = 4
CONFIGS = [{"TIMES": n} for n in (1, 8, 12, 16, 32)]


def run(x):
    for _ in range(20 * TIMES**2):
        y = torch.softmax(x, -1)
    return y
"""


def node(name: str, source: str) -> Node:
    return replace(SEED, id=name, source=source, parents=(SEED.id,))


def job(name: str, source: str, trials: int = 4) -> NodeJob:
    return NodeJob(f"job-{name}", node(name, source), SEED, {}, TARGET, 0, trials)


def judged(judge: NodeJudge, asked: NodeJob) -> NodeResult:
    """As a search does: where the machine had other things to do than to be timed, the job is done again."""
    for _ in range(2):
        with contextlib.suppress(LaneFailure):
            return judge.judge(asked)
    return judge.judge(asked)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeJudge]:
    with contextlib.closing(
        open_judge(TARGET, device="cpu", folder=tmp_path_factory.mktemp("judge"))
    ) as opened:
        yield opened


def test_a_faster_source_is_measured_beside_the_incumbent(judge: NodeJudge) -> None:
    result = judged(judge, replace(job("fast", FAST), against=node("often", OFTEN)))
    assert (result.outcome, result.against, result.stage) == (Outcome.OK, "often", "time")
    assert result.log2_ratio < -0.5
    assert set(result.seconds) == {"small", "ragged"}
    assert result.measurements == 1
    assert 0 < result.device_seconds <= result.wall_seconds
    assert result.device == device_slug("cpu")
    assert result.facts["blocks"] >= 8
    assert "faster" in result.feedback
    assert codec.from_json(NodeResult, codec.to_json(result)) == result


def test_a_source_is_verified_in_full_where_it_would_lead(judge: NodeJudge) -> None:
    """What only shows in many launches of equal sizes is left to that; the yardstick is verified at once."""
    seed = judged(judge, replace(job("seed", SEED.source), node=SEED))
    assert seed.facts["verified_in_full"]
    assert seed.may_lead
    late = FAST.replace("return", "COUNT.append(0)\n    return (len(COUNT) > 40) * 0.01 +").replace(
        "import torch\n", "import torch\n\nCOUNT = []\n"
    )
    asked = job("late", late)
    first = judge.verify(VerificationJob("verify", asked.node, {}, TARGET))
    assert not first.is_right
    assert not judged(judge, replace(job("fast", FAST), against=node("often", OFTEN))).may_lead


def test_a_pack_with_a_size_for_the_host_is_timed_at_it(tmp_path: Path) -> None:
    target, (seed,) = open_target("softmax", device="cpu")
    quick = RaceRules(rung=1, first=1, least=2, most=2)
    with contextlib.closing(
        PackJudge(target, VerificationPlan(cases=1, timed=1), tmp_path, rules=quick)
    ) as judge:
        result = judged(judge, replace(job("fast", FAST), target=target, against=seed))
    assert result.outcome is Outcome.OK
    assert set(result.seconds) == {"host"}


def test_a_slower_source_is_given_up_early(judge: NodeJudge) -> None:
    source = FAST.replace("return", "for _ in range(9):\n        torch.exp(x)\n    return").replace(
        "torch.softmax(x, -1)", "(x - x.amax(-1, keepdim=True)).softmax(-1)"
    )
    slower = source.replace("range(9)", "range(900)")
    result = judged(judge, job("slow", slower))
    assert result.outcome is Outcome.OK
    assert result.log2_ratio > 0.4
    # A pause of the machine beside the short seed can hide the slowdown in one of the first blocks.
    assert result.facts["ended"] in {"hopeless", "slower"}
    assert result.facts["blocks"] <= RaceRules().most / 2


@pytest.mark.parametrize(
    ("source", "outcome", "stage", "said"),
    [
        ("import torch\n\n\ndef run(x):\n    return x.exp()\n", Outcome.INCORRECT, "verify", "wrong_values"),
        ("def run(x:\n", Outcome.RUNTIME_ERROR, "compile", "SyntaxError"),
        ("import no_such_module\n", Outcome.RUNTIME_ERROR, "compile", "no_such_module"),
        ("def other(): pass\n", Outcome.RUNTIME_ERROR, "compile", "run"),
        ("def run(x):\n    raise ValueError('never')\n", Outcome.RUNTIME_ERROR, "verify", "never"),
        (
            "import ctypes\n\n\ndef run(x):\n    ctypes.string_at(0)\n",
            Outcome.RUNTIME_ERROR,
            "verify",
            "SIGSEGV",
        ),
        ("import os\nos._exit(0)\n", Outcome.INFRASTRUCTURE, "verify", "escape"),
    ],
)
def test_a_candidates_fault_is_its_outcome(
    judge: NodeJudge, source: str, outcome: Outcome, stage: str, said: str
) -> None:
    result = judged(judge, job("bad", source))
    assert (result.outcome, result.stage, result.log2_ratio) == (outcome, stage, None)
    assert said in result.feedback
    assert result.measurements == 1


def test_a_hanging_source_is_a_timeout(judge: NodeJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ResourceLimits(wall_s=2.0, trusted_s=60.0)
    with monkeypatch.context() as patch:
        patch.setattr(pack_judge, "verify", lambda *a, **k: verify(*a, **k, limits=limits))
        result = judged(judge, job("hang", "def run(x):\n    while True:\n        pass\n"))
    assert (result.outcome, result.stage) == (Outcome.TIMEOUT, "verify")
    assert judged(judge, job("fast", FAST)).outcome is Outcome.OK


@pytest.mark.slow
def test_one_that_turns_wrong_while_it_is_timed_is_caught(tmp_path: Path) -> None:
    """It passes verification, which takes fewer launches; those of the race are checked, too."""
    later = FAST.replace("def run(x):", "calls = 0\n\n\ndef run(x):\n    global calls\n    calls += 1")
    later = later.replace("softmax(x, -1)", "softmax(x, -1) * (calls < 300)")
    patient = RaceRules(first=100, least=100, most=100)
    with contextlib.closing(PackJudge(TARGET, VerificationPlan(), tmp_path, rules=patient)) as judge:
        result = judged(judge, job("later", later))
    assert (result.outcome, result.stage) == (Outcome.INCORRECT, "time")


@pytest.mark.slow
def test_the_best_config_is_found_within_the_trials(judge: NodeJudge) -> None:
    for _ in range(3):  # a busy machine may hold up the quickest of them
        result = judged(judge, job("tunable", TUNABLE, trials=4))
        assert (result.outcome, result.measurements) == (Outcome.OK, 4)
        if result.config == {"TIMES": 1}:
            break
    assert result.config == {"TIMES": 1}
    assert len(result.facts["configs"]) == 4
    alone = judged(judge, job("tunable", TUNABLE, trials=1))
    assert (alone.config, alone.measurements) == ({}, 1)


def test_a_config_that_is_wrong_does_not_condemn_the_others(judge: NodeJudge) -> None:
    source = TUNABLE.replace("return y", "return y if TIMES > 1 else torch.zeros_like(y)")
    result = judged(judge, job("half", source, trials=3))
    assert result.outcome is Outcome.OK
    assert result.config != {"TIMES": 1}


def test_configs_that_cannot_be_read_are_refused_before_anything_runs(judge: NodeJudge) -> None:
    result = judged(judge, job("odd", FAST + "\nCONFIGS = [{'MISSING': 1}]\n"))
    assert (result.outcome, result.stage) == (Outcome.RUNTIME_ERROR, "compile")
    assert "MISSING" in result.feedback


@pytest.mark.slow
def test_the_config_of_the_incumbent_is_the_one_it_is_timed_with(judge: NodeJudge) -> None:
    request = replace(job("fast", FAST), against=node("tunable", TUNABLE))
    beside = {
        n: judged(judge, replace(request, against_config={"TIMES": n})).log2_ratio or 0.0 for n in (1, 16)
    }
    assert beside[16] < beside[1] - 1


def test_configs_of_triton_sources_on_a_device_begin_with_the_rivals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(PackJudge(TARGET, VerificationPlan(), tmp_path)) as judge:
        assert configs_chosen(judge, {"TIMES": 16}) == [{}, {"TIMES": 1}, {"TIMES": 8}], "not on a CPU"
        monkeypatch.setattr(judge, "_plan", replace(VerificationPlan(), device="cuda"))
        assert configs_chosen(judge, {"TIMES": 16}) == [{}, {"TIMES": 16}, {"TIMES": 1}]
        assert configs_chosen(judge, {"TIMES": 16}, 2) == [{}, {"TIMES": 16}]
        assert configs_chosen(judge, {"TIMES": 16}, 1) == [{}]
        assert (
            configs_chosen(judge, {"TIMES": 5})
            == configs_chosen(judge, {})
            == [{}, {"TIMES": 1}, {"TIMES": 8}]
        )


def triton_job() -> NodeJob:
    request = job("tunable", TUNABLE)
    return replace(request, node=replace(request.node, language="triton"))


def configs_chosen(judge: PackJudge, beside: dict[str, int], n: int = 3) -> list[object]:
    request = replace(triton_job(), against_config=beside)
    return list(judge._choose_configs(request, configs_of(TUNABLE), n))


def test_feedback_is_bounded_and_tells_no_seed(judge: NodeJudge) -> None:
    result = judged(judge, job("long", f"def run(x):\n    raise ValueError('{'y' * 9000}')\n"))
    assert len(result.feedback) <= 1500
    assert "seed" not in result.facts


@pytest.mark.slow
def test_finalists_are_confirmed_beside_the_seed_in_a_fresh_lane(judge: NodeJudge) -> None:
    seed = replace(SEED, source=OFTEN)
    finalists = (
        node("fast", FAST),
        node("wrong", "def run(x):\n    return x\n"),
        node("tunable", TUNABLE),
        seed,
    )
    result = judge.confirm(ConfirmationJob(finalists, {"tunable": {"TIMES": 16}}, seed, TARGET))
    assert list(result) == [seed.id, "fast", "wrong", "tunable"]
    assert result[seed.id].log2_ratio == 0
    assert result["wrong"].outcome is Outcome.INCORRECT
    assert (result["fast"].log2_ratio or 0) < -0.5 < (result["tunable"].log2_ratio or 0)
    assert result["fast"].facts["standing"] == "faster"
    assert result["tunable"].config == {"TIMES": 16}
    assert {j.stage for j in result.values()} == {"confirm"}


@pytest.mark.slow
def test_a_pytorch_seed_is_timed_under_torch_compile_too(judge: NodeJudge) -> None:
    """Its entry is a function; of a module's class the text alone is looked at."""
    assert isinstance(judge, PackJudge)
    solution = solution_of(TARGET, SEED)
    bench = SolutionBench(pack_of(TARGET), judge._lane, VerificationPlan(cases=1, timed=1))
    bench.enter(solution)
    compiled = compiled_solution(solution)
    assert compiled is not None
    assert compiled_solution(compiled) is None
    assert set(bench.seconds_of(compiled)) == {w.name for w in pack_of(TARGET).workloads}
    source = "class ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x + 1\n"
    module = compiled_solution(replace(solution, source=f"import torch\n{source}", entry="ModelNew"))
    assert module is not None
    names: dict[str, object] = {}
    exec(module.source, names)
    assert names["ModelNew"]()._compiled_call_impl is not None  # type: ignore[operator]


@pytest.mark.slow
def test_a_win_that_does_not_hold_at_calls_that_were_not_timed_is_named(tmp_path: Path) -> None:
    """The search timed wide rows alone; the winner is slower at short ones."""
    pack = pack_of(TARGET)
    wide = replace(pack.workloads[0], name="wide", axes={"M": 33, "N": 130}, host=True)
    target = replace(TARGET, payload={"pack": pack.with_(workloads=(*pack.workloads, wide)).to_json()})
    turning = OFTEN.replace("400", "2000 if x.shape[0] == 16 else 1")
    with contextlib.closing(open_judge(target, device="cpu", folder=tmp_path)) as opened:
        assert isinstance(opened, PackJudge)
        asked = NodeJob("job", node("turning", turning), SEED, {}, target, 0, 1)
        trial = opened._trial(asked, opened._rules, [opened._lane])
        facts = opened._each_call(trial, asked, {}, {})
    assert facts["slower_at"] == ["small"], facts
    result = NodeResult(Outcome.OK, log2_ratio=-1.0, sd=0.1, facts=facts)
    assert re.search(r"slower at some calls.*small", result.other_calls_text)


def test_finalists_that_there_is_no_time_for_are_left_out_but_the_first(judge: NodeJudge) -> None:
    finalists = (node("fast", FAST), node("wrong", "def run(x):\n    return x\n"))
    assert isinstance(judge, PackJudge)
    judge.prepare_confirmation()
    prepared = judge._fresh_lanes._verifying
    judge.prepare_confirmation()
    assert judge._fresh_lanes._verifying is prepared, "one is enough"
    result = judge.confirm(ConfirmationJob(finalists, {}, SEED, TARGET, seconds=0.1))
    assert list(result) == [SEED.id, "fast"]
    assert result["fast"].stage == "confirm"


def test_a_sound_pack_is_admitted(judge: NodeJudge) -> None:
    assert isinstance(judge, PackJudge)
    assert judge.pack_problems() == []


def test_kernels_are_refused_on_a_cpu(tmp_path: Path) -> None:
    target = SearchTarget(TargetKind.KERNEL, "scale", "id", "triton", "scale", "")
    with pytest.raises(SettingsError, match="says nothing about how fast"):
        open_judge(target, device="cpu", folder=tmp_path)
    with pytest.raises(SettingsError, match="the driver knows"):
        open_judge(TARGET, device="cuda", index=99, folder=tmp_path)
