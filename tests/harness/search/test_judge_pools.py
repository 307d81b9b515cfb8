"""Pools of judges, of this machine and of a real Ray cluster: every job once, none lost, broken lanes kept out."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from forecast_autotune.errors import SettingsError
from forecast_autotune.records import Outcome
from forecast_harness.records import ConfirmationJob, NodeJob, VerificationJob
from forecast_harness.search.ray_judges import RayJudgePool, load_ray
from forecast_harness.trials import judge_pool
from forecast_harness.trials.judge_pool import MAX_REQUEUES, LocalJudgePool
from forecast_harness.trials.packs import PackJudge
from forecast_harness.trials.protocol import LaneFailure, NodeJudge
from forecast_harness.trials.race import RaceRules
from forecast_harness.verify.plan import VerificationPlan
from tests.harness.search.lane_judges import SEED, TARGET, ScriptedJudge, job, judged_jobs
from tests.harness.small import small_target
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def soon_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_pool, "RETRY_S", 0.05)


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
        lanes = RayJudgePool(partial(ScriptedJudge, folder=tmp_path), **options)
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


def test_a_lost_lane_is_told_as_such(opened: Callable[..., RayJudgePool]) -> None:
    lanes = opened(most=1)
    with pytest.raises(LaneFailure, match="fell off the bus") as caught:
        lanes.submit(job("flaky", "lose 1")).result(60)
    assert caught.value.lane == "table-0"
    assert lanes.submit(job("flaky", "lose 1")).result(60).outcome is Outcome.OK


@pytest.mark.slow
def test_a_job_that_kills_its_actor_is_tried_a_few_times(opened: Callable[..., RayJudgePool]) -> None:
    lanes = opened(most=1)
    with pytest.raises(LaneFailure, match="actor or its node ended"):
        lanes.submit(job("deadly", "exit")).result(120)
    assert lanes.lanes[0].restarts == MAX_REQUEUES + 1
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


# --- lanes of this machine ---


@pytest.fixture
def table(tmp_path: Path) -> Callable[[int], NodeJudge]:
    return partial(ScriptedJudge, folder=tmp_path)


def test_finalists_are_confirmed_once(table: Callable[[int], NodeJudge], tmp_path: Path) -> None:
    request = ConfirmationJob((job("a").node, job("b").node), {"node-a": {"N": 1}}, SEED, TARGET)
    with contextlib.closing(LocalJudgePool(table, 2)) as lanes:
        assert lanes.confirm(request).result(30) == lanes.confirm(request).result(30)
        assert set(lanes.confirm(request).result(30)) == {"node-a", "node-b"}
        assert judged_jobs(tmp_path) == ["confirm"]


def test_a_verification_goes_before_what_waits(table: Callable[[int], NodeJudge], tmp_path: Path) -> None:
    lanes = LocalJudgePool(table, 1)
    request = VerificationJob("verify-a", job("a").node, {}, TARGET)
    try:
        held = lanes.submit(job("held", "hold"))
        wait_until(lambda: bool(list(tmp_path.glob("pid-*"))))
        waiting = [lanes.submit(job(str(n))) for n in range(3)]
        verifying = lanes.verify(request)
        assert lanes.verify(request) is verifying
        (tmp_path / "go").touch()
        assert verifying.result(30).is_right
        assert [f.result(30).outcome for f in (held, *waiting)] == [Outcome.OK] * 4
        assert judged_jobs(tmp_path) == ["job-held", "verify-a", "job-0", "job-1", "job-2"]
    finally:
        lanes.close()


def test_what_is_given_up_is_lost_and_its_lane_stays_open(tmp_path: Path) -> None:
    results: list[ScriptedJudge] = []

    def make(number: int) -> NodeJudge:
        results.append(ScriptedJudge(number, tmp_path))
        return results[-1]

    with contextlib.closing(LocalJudgePool(make, 1)) as lanes:
        held = lanes.submit(job("held", "hold ended early"))
        wait_until(lambda: bool(list(tmp_path.glob("pid-*"))))
        waiting = lanes.submit(job("waiting"))
        lanes.give_up()
        with pytest.raises(LaneFailure, match="ended early"):
            held.result(30)
        with pytest.raises(LaneFailure, match="given up"):
            waiting.result(30)
        assert lanes.submit(job("next")).result(30).outcome is Outcome.OK
        assert judged_jobs(tmp_path) == ["job-next"]
        assert len(results) == 1
        assert not results[0].closed


def test_a_lost_job_is_told_and_may_be_tried_again_in_a_fresh_lane(table: Callable[[int], NodeJudge]) -> None:
    with contextlib.closing(LocalJudgePool(table, 1)) as lanes:
        with pytest.raises(LaneFailure, match="fell off the bus") as caught:
            lanes.submit(job("flaky", "lose 1")).result(30)
        assert caught.value.lane == "table-0"
        assert lanes.submit(job("flaky", "lose 1")).result(30).outcome is Outcome.OK
        assert lanes.lanes[0].restarts == 1
        assert lanes.capacity == 1


def test_a_broken_lane_is_quarantined_and_comes_back(
    table: Callable[[int], NodeJudge], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.touch()

    def make(number: int) -> NodeJudge:
        if number == 1 and broken.exists():
            raise LaneFailure("the canary computed 3, expected 4")
        return table(number)

    with contextlib.closing(LocalJudgePool(make, 2)) as lanes:
        wait_until(lambda: lanes.capacity == 1)
        assert "canary" in lanes.lanes[1].problem
        assert {lanes.submit(job(str(n))).result(30).device for n in range(8)} == {"table-0"}
        broken.unlink()
        wait_until(lambda: lanes.capacity == 2)
        assert lanes.lanes[1].state == "ready"


def test_after_the_end_nothing_waits_for_ever(table: Callable[[int], NodeJudge]) -> None:
    lanes = LocalJudgePool(table, 1)
    running = lanes.submit(job("long", "sleep 0.3"))
    wait_until(lambda: running.running())
    waiting = lanes.submit(job("waiting"))
    before = threading.active_count()
    lanes.close()
    assert running.result(0).outcome is Outcome.OK
    assert waiting.cancelled()
    with pytest.raises(LaneFailure, match="closed"):
        lanes.submit(job("late")).result(0)
    assert threading.active_count() == before - 1


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
def test_real_judges_side_by_side(tmp_path: Path) -> None:
    target, seed = small_target("softmax")
    source = "import torch\n\n\ndef run(x):\n    return torch.softmax(x, -1)  # {}\n"

    def asked(n: int) -> NodeJob:
        node = replace(seed, id=f"n{n}", source=source.format(n))
        return NodeJob(f"j{n}", node, seed, {}, target, 0, 1)

    # So few launches that no neighbour on this machine can make a candidate's clock look wrong.
    quick = RaceRules(rung=1, first=1, least=2, most=2)
    with contextlib.closing(
        LocalJudgePool(
            lambda n: PackJudge(target, VerificationPlan(), tmp_path / str(n), number=n, rules=quick), 2
        )
    ) as lanes:
        futures = [lanes.submit(asked(n)) for n in range(6)]
        assert {f.result(120).outcome for f in futures} == {Outcome.OK}
    assert [p for folder in tmp_path.iterdir() for p in folder.iterdir()] == []
