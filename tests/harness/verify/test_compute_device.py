"""What the judge does on a device between launches: as on the host, and where that fails, on the host."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forecast_harness.sandbox.api import CandidateFault, CellAnswer, ResourceLimits, SandboxLane, TensorBytes
from forecast_harness.targets.packs import load_pack, make_solution
from forecast_harness.targets.packs.load import builtin_names
from forecast_harness.targets.packs.schema import Pack, PackFormat, Workload
from forecast_harness.verify.cost_control import ComputeDevice, PhaseTimer
from forecast_harness.verify.launcher import Launcher
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problem import DrawSpec, LaunchCase, problem_of
from forecast_harness.verify.run import verify

DEVICE = "cpu:0"
"""The host under another name: it takes the way of a device."""
TASK = Path(__file__).parents[1] / "tasks" / "linear.py"


def generator(seed: int = 0) -> Any:
    return torch.Generator().manual_seed(seed)


def case_of(pack: Pack, folder: Path) -> LaunchCase:
    how = DrawSpec("normal", "contiguous", generator())
    return problem_of(pack, folder).case(pack.workloads[0].axes, how)


def test_work_is_done_on_the_device() -> None:
    where = ComputeDevice(DEVICE)
    assert where.run(lambda device: device) == DEVICE
    assert where.run(lambda device: device, portable=False) == "cpu"
    assert ComputeDevice("cpu").run(lambda device: device) == "cpu"
    assert ComputeDevice("meta").run(lambda device: torch.zeros(1).device.type) == "meta"
    assert where.failure == ""


def test_what_a_device_fails_at_is_done_on_the_host_from_then_on() -> None:
    where, tried = ComputeDevice("meta"), []

    def work(device: str) -> float:
        tried.append(device)
        return float(torch.ones(3, device=device).sum())

    assert where.run(work) == where.run(work) == 3.0
    assert tried == ["meta", "cpu", "cpu"]
    assert "meta" in where.failure


def test_a_device_that_does_not_open_is_not_used() -> None:
    where = ComputeDevice("meta")
    where.open_in_background()
    where.wait_until_open()
    assert where.device == "cpu"
    assert where.run(lambda device: device) == "cpu"
    where = ComputeDevice(DEVICE)
    where.open_in_background()
    assert where.run(lambda device: device) == DEVICE


def test_a_broken_reference_stays_broken() -> None:
    def work(device: str) -> None:
        raise ValueError(device)

    with pytest.raises(ValueError, match=DEVICE):
        ComputeDevice(DEVICE).run(work)


@pytest.mark.parametrize("name", [*builtin_names(), "linear"])
def test_a_device_checks_as_the_host_does(name: str, tmp_path: Path) -> None:
    case = case_of(load_pack(TASK if name == "linear" else name), tmp_path)
    assert case.right is not None
    right = list(case.right())
    where = ComputeDevice(DEVICE)
    assert case.check(right, where) == case.check(right)
    wrong = [t.clone() for t in right]
    wrong[0].view(-1)[0] = 3
    finding, _ = case.check(wrong, where)
    assert finding == case.check(wrong)[0] is not None
    assert where.failure == ""
    fallen = ComputeDevice("meta")
    assert case.check(right, fallen) == case.check(right)
    assert fallen.failure


# --- where the time went ---


def test_a_verdict_says_where_the_time_went(judging: SandboxLane) -> None:
    pack = load_pack("softmax").with_(
        workloads=(Workload("few", {"M": 8, "N": 64}), Workload("host", {"M": 512, "N": 1024}, host=True))
    )
    source = "import torch\n\n\ndef run(x):\n    return torch.softmax(x, -1)\n"
    verdict = verify(
        pack,
        make_solution("s", source),
        judging,
        plan=VerificationPlan(cases=3, timed=4),
        limits=ResourceLimits(wall_s=60),
    )
    assert verdict.accepted, verdict.reasons
    seconds = verdict.facts["seconds"]
    parts = {"draw", "build", "check", "wait", "inside", "prepare", "arm", "launch", "idle", "again"}
    assert parts <= set(seconds) <= {*parts, "report"}
    assert all(s >= 0 for s in seconds.values())
    assert seconds["inside"] <= seconds["launch"]
    assert sum(seconds.values()) - seconds["inside"] <= verdict.seconds
    assert "host" not in verdict.facts


@pytest.mark.parametrize("said", ["nan", "inf", math.nan, -math.inf, 1e300, 10**400, True, None])
def test_a_time_of_another_form_is_forged(said: Any, tmp_path: Path) -> None:
    launcher = Launcher(Forger(said), PackFormat.OWN, random.Random(0), "cpu", PhaseTimer())
    with pytest.raises(CandidateFault, match="seconds must be a number"):
        launcher.launch(case_of(load_pack("softmax"), tmp_path))


class Forger:
    """Answers like a cell, but for the seconds."""

    def __init__(self, seconds: Any) -> None:
        self._seconds = seconds

    def ask(self, entry: str, payload: Any, arrays: Mapping[str, TensorBytes]) -> CellAnswer:
        value = {"seconds": self._seconds, "whole": self._seconds, "protocol": "host", "compiled": 0}
        value |= {"operations": {}, "kernels": 0, "outputs": []}
        harness: dict[str, Any] = {"patched": [], "flags": {}, "threads": []}
        return CellAnswer({**value, "harness": harness}, dict(arrays))
