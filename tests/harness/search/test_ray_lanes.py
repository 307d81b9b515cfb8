"""Lanes on a real Ray cluster of several raylets on this machine."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from forecast_autotune.errors import SettingsError
from forecast_autotune.records import Outcome
from forecast_harness.records import ConfirmationJob, VerificationJob
from forecast_harness.search.ray_judges import RayJudgePool, RemoteJudge, load_ray
from forecast_harness.trials.protocol import LaneFailure, NodeJudge
from tests.harness.search.lane_judges import SEED, TARGET, ScriptedJudge, job, judged_jobs
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
_OPEN_S = 240.0
"""As long as Ray may take to start a process on a busy machine."""


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingsError, match=r"pip install 'forecast-autotune\[ray\]'"):
        RayJudgePool(partial(ScriptedJudge, folder=Path()))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="Ray is an extra: pip install 'forecast-autotune[ray]'")
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before]))
    ray, memory = load_ray(), 80 << 20
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": memory})
    made.add_node(num_cpus=1, object_store_memory=memory)
    try:
        ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@pytest.fixture
def opened(cluster: Any, tmp_path: Path) -> Iterator[Callable[..., RayJudgePool]]:
    made: list[RayJudgePool] = []

    def start(**options: Any) -> RayJudgePool:
        lanes = RayJudgePool(partial(ScriptedJudge, folder=tmp_path), open_s=_OPEN_S, **options)
        made.append(lanes)
        return lanes

    yield start
    for lanes in made:
        lanes.close()


def test_jobs_are_done_once_on_several_nodes(opened: Callable[..., RayJudgePool], tmp_path: Path) -> None:
    lanes = opened()
    assert lanes.capacity == 2
    # Both lanes have opened before any job is done: on a busy machine one would do all twelve meanwhile.
    futures = [lanes.submit(job(str(n % 12), "meet 2" if n % 12 < 2 else "sleep 0.05")) for n in range(24)]
    assert {f.result(60).outcome for f in futures} == {Outcome.OK}
    assert {f.result().device for f in futures} == {"table-0", "table-1"}
    confirm = ConfirmationJob((job("a").node,), {}, SEED, TARGET)
    assert lanes.confirm(confirm).result(60)["node-a"].log2_ratio == 0.25
    assert sorted(judged_jobs(tmp_path)) == sorted([*(f"job-{n}" for n in range(12)), "confirm"])


@pytest.mark.slow
def test_a_node_is_verified_in_full_by_an_actor(opened: Callable[..., RayJudgePool]) -> None:
    found = opened().verify(VerificationJob("verify-a", job("a").node, {"N": 1}, TARGET)).result(60)
    assert found.is_right
    assert "lane" in found.facts


def test_a_lost_lane_is_told_as_such(opened: Callable[..., RayJudgePool]) -> None:
    lanes = opened(most=1)
    with pytest.raises(LaneFailure, match="fell off the bus") as caught:
        lanes.submit(job("flaky", "lose 1")).result(60)
    assert caught.value.lane == "table-0"
    assert lanes.submit(job("flaky", "lose 1")).result(60).outcome is Outcome.OK


@pytest.mark.slow
def test_a_job_that_kills_its_actor_is_tried_a_few_times(opened: Callable[..., RayJudgePool]) -> None:
    lanes = opened(most=1, requeues=1)
    with pytest.raises(LaneFailure, match="actor or its node ended"):
        lanes.submit(job("deadly", "exit")).result(120)
    assert lanes.lanes[0].restarts == 2
    assert lanes.submit(job("fine")).result(60).outcome is Outcome.OK


def test_an_actor_that_is_killed_loses_nothing(opened: Callable[..., RayJudgePool], tmp_path: Path) -> None:
    lanes = opened()
    futures = [lanes.submit(job(str(n), "hold")) for n in range(10)]
    wait_until(lambda: len(list(tmp_path.glob("pid-*"))) >= 2)
    os.kill(int(next(tmp_path.glob("pid-*")).name.partition("-")[2]), signal.SIGKILL)
    (tmp_path / "go").touch()
    assert {f.result(120).outcome for f in futures} == {Outcome.OK}
    assert sorted(judged_jobs(tmp_path)) == sorted(f"job-{n}" for n in range(10))


@pytest.mark.slow
def test_a_lane_takes_the_gpu_that_its_node_was_given(
    cluster: Any, opened: Callable[..., RayJudgePool], tmp_path: Path
) -> None:
    # Each node counts its GPUs from 0, whichever of the machine's they are.
    variable = "CUDA_VISIBLE_DEVICES"
    nodes = [
        cluster.add_node(num_cpus=0, num_gpus=1, env_vars={variable: name}, object_store_memory=80 << 20)
        for name in ("5", "3")
    ]
    lanes = opened(gpus=True)
    wait_until(lambda: [lane.state for lane in lanes.lanes] == ["ready", "ready"])
    futures = [lanes.submit(job(str(n), "sleep 0.3")) for n in range(4)]
    assert {f.result(60).device for f in futures} == {"table-3", "table-5"}
    lanes.close()
    for node in nodes:
        cluster.remove_node(node, allow_graceful=False)


class _StubRay:
    """What an actor asks Ray."""

    def __init__(self, *gpus: str) -> None:
        self._gpus = gpus

    def get_gpu_ids(self) -> list[str]:
        return list(self._gpus)

    def get_runtime_context(self) -> _StubRay:
        return self

    def get_node_id(self) -> str:
        return "node"


def test_a_gpu_is_found_by_its_uuid_and_never_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from forecast_harness.clocks import devices as device
    from forecast_harness.search import ray_judges as ray_lanes

    known = ["GPU-a", "GPU-b", "GPU-c"]
    monkeypatch.setattr(device, "device_count", lambda: len(known))
    monkeypatch.setattr(device, "identity", lambda index: ("NVIDIA H200", known[index]))

    def opened_on(*gpus: str) -> tuple[list[int], str]:
        made: list[int] = []

        def make(number: int) -> NodeJudge:
            made.append(number)
            return ScriptedJudge(number, Path())

        monkeypatch.setattr(ray_lanes, "load_ray", lambda: _StubRay(*gpus))
        return made, ray_lanes.JudgeActor(make, 7).open()["problem"]

    assert opened_on("GPU-c") == ([2], "")
    assert opened_on("1") == ([1], "")
    assert opened_on() == ([7], "")
    made, problem = opened_on("MIG-d")
    assert not made
    assert "MIG-d, which the driver does not list" in problem


@pytest.mark.slow
def test_a_judge_that_does_not_open_is_told(cluster: Any) -> None:
    with pytest.raises(LaneFailure, match="NotADirectoryError"):
        RemoteJudge(_broken, 0, gpus=0, open_s=_OPEN_S)


def _broken(number: int) -> NodeJudge:
    raise NotADirectoryError("scratch is a file")
