"""Lanes on a Ray cluster: one actor per GPU (or CPU), each supervised by a thread of this process.

An actor holds a judge and never a candidate: the judge's sandbox starts the processes that do, so no actor
initialises CUDA. Jobs and results cross as plain JSON objects. An actor that dies, alone or with its node,
has its job given to another lane, a limited number of times; `LocalJudgePool` has the rest of the rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forecast_autotune.errors import SettingsError
from forecast_autotune.records import codec
from forecast_harness.clocks.devices import device_index
from forecast_harness.records import ConfirmationJob, FullVerification, NodeJob, NodeResult, VerificationJob
from forecast_harness.trials.judge_pool import LaneDied, LocalJudgePool
from forecast_harness.trials.protocol import LaneFailure, NodeJudge

OPEN_TIMEOUT_S = 240.0
"""How long an actor may wait for its place in the cluster, and open its judge: Ray may take that long to start a
process on a busy machine."""
_CLOSE_TIMEOUT_S = 15.0


def load_ray() -> Any:
    """The ray module. Raises `SettingsError` saying how to install it."""
    try:
        import ray
    except ImportError as error:
        raise SettingsError(
            "lanes on other machines need Ray: pip install 'forecast-autotune[ray]', or leave --ray out to "
            "use this machine's devices"
        ) from error
    return ray


class JudgeActor:
    """The judge in an actor, which is called in plain data."""

    def __init__(self, make_judge: Callable[[int], NodeJudge], number: int) -> None:
        self._make_judge, self._number = make_judge, number
        self._judge: NodeJudge | None = None

    def open(self) -> dict[str, Any]:
        """Open the judge; `problem` says why that failed, and is empty if it did not."""
        import os

        ray = load_ray()
        problem = ""
        try:
            self._judge = self._make_judge(self._device_index(ray.get_gpu_ids()))
        except Exception as error:  # told as data: the caller may lack the class
            problem = f"{type(error).__name__}: {error}"
        return {"problem": problem, "node": ray.get_runtime_context().get_node_id(), "pid": os.getpid()}

    def judge(self, job: dict[str, Any]) -> dict[str, Any]:
        """`NodeJudge.judge` in plain data; `lost` and `lane` in place of a `LaneFailure`."""
        return self._call_judge(lambda judge: judge.judge(codec.from_json(NodeJob, job)))

    def verify(self, job: dict[str, Any]) -> dict[str, Any]:
        """`NodeJudge.verify` likewise."""
        return self._call_judge(lambda judge: judge.verify(codec.from_json(VerificationJob, job)))

    def confirm(self, confirm: dict[str, Any]) -> dict[str, Any]:
        """`NodeJudge.confirm` likewise."""
        return self._call_judge(lambda judge: judge.confirm(codec.from_json(ConfirmationJob, confirm)))

    def close(self) -> None:
        """End the judge's processes."""
        if self._judge is not None:
            self._judge.close()

    def _device_index(self, assigned: Sequence[object]) -> int:
        """The driver's own number of the GPU assigned, or the lane's: a judge asks the driver, not CUDA.

        Raises `SettingsError` for a GPU that the driver has no number for: the lane's would be another's.
        """
        if not assigned:
            return self._number
        if (number := device_index(str(assigned[0]))) is None:
            raise SettingsError(
                f"Ray gives this lane the GPU {assigned[0]}, which the driver does not list; lanes need "
                "whole GPUs: start Ray with their numbers or UUIDs in CUDA_VISIBLE_DEVICES"
            )
        return number

    def _call_judge(self, ask: Callable[[NodeJudge], Any]) -> dict[str, Any]:
        assert self._judge is not None, "open() comes first"
        try:
            return {"result": codec.to_json(ask(self._judge))}
        except Exception as error:
            return {"lost": f"{type(error).__name__}: {error}", "lane": getattr(error, "lane", "")}


class RemoteJudge(NodeJudge):
    """A judge in an actor, which does one thing after the other: what is under way is not given up.

    Raises `LaneFailure` where it cannot be opened, `LaneDied` when its actor dies.
    """

    def __init__(self, make_judge: Callable[[int], NodeJudge], number: int, *, gpus: float) -> None:
        self._ray, self._name = load_ray(), f"ray-{number}"
        actor = self._ray.remote(JudgeActor).options(
            num_gpus=gpus,
            num_cpus=0 if gpus else 1,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        self._actor = actor.remote(make_judge, number)
        try:
            opened = self._ray.get(self._actor.open.remote(), timeout=OPEN_TIMEOUT_S)
        except self._ray.exceptions.RayError as error:
            self._ray.kill(self._actor)
            raise LaneFailure(
                f"no place in the cluster, or it ended: {_error_line(error)}", self._name
            ) from error
        self.node, self.pid = str(opened["node"]), int(opened["pid"])
        if opened["problem"]:
            self._ray.kill(self._actor)
            raise LaneFailure(opened["problem"], self._name)

    def judge(self, job: NodeJob) -> NodeResult:
        """See `NodeJudge`."""
        return codec.from_json(NodeResult, self._call_actor(self._actor.judge, codec.to_json(job)))

    def verify(self, job: VerificationJob) -> FullVerification:
        """See `NodeJudge`."""
        return codec.from_json(FullVerification, self._call_actor(self._actor.verify, codec.to_json(job)))

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        """See `NodeJudge`."""
        results = self._call_actor(self._actor.confirm, codec.to_json(confirm))
        return {node: codec.from_json(NodeResult, judged) for node, judged in results.items()}

    def close(self) -> None:
        """End the judge's processes, then the actor."""
        with contextlib.suppress(self._ray.exceptions.RayError):  # gone, or hanging: its sandbox ends with it
            self._ray.get(self._actor.close.remote(), timeout=_CLOSE_TIMEOUT_S)
        self._ray.kill(self._actor)

    def _call_actor(self, method: Any, question: Any) -> Any:
        try:
            reply = self._ray.get(method.remote(question))
        except self._ray.exceptions.RayError as error:
            raise LaneDied(f"the actor or its node ended: {_error_line(error)}", self._name) from error
        if "lost" in reply:
            raise LaneFailure(reply["lost"], reply["lane"] or self._name)
        return reply["result"]


class RayJudgePool(LocalJudgePool):
    """Lanes on the cluster at `address`, or on one that is started on this machine for `local`.

    `gpus`: whether a lane takes a GPU, which it alone uses, or a CPU. `most` bounds the lanes; without it
    there are as many as the cluster has GPUs (CPUs) when the search begins. `make_judge(number)` is called in the
    actor: with the driver's number of its GPU, or with the lane's.

    Raises `SettingsError` without Ray, or where no cluster answers at `address`.
    """

    def __init__(
        self,
        make_judge: Callable[[int], NodeJudge],
        *,
        address: str = "auto",
        gpus: bool = False,
        most: int | None = None,
    ) -> None:
        self._ray = load_ray()
        self._gpus, self._most = gpus, most
        self._owns_connection = not self._ray.is_initialized()
        if self._owns_connection:
            try:
                self._ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise SettingsError(
                    f"no Ray cluster answers at {address}: start one with `ray start --head`, or use "
                    f"--ray local ({_error_line(error)})"
                ) from error

        def make(number: int) -> NodeJudge:
            return RemoteJudge(make_judge, number, gpus=float(gpus))

        super().__init__(make, max(1, self.available_places()))

    def available_places(self) -> int:
        """How many lanes the living nodes have room for, `most` at the most."""
        resource = "GPU" if self._gpus else "CPU"
        nodes = [n for n in self._ray.nodes() if n["Alive"]]
        room = sum(int(n["Resources"].get(resource, 0)) for n in nodes)
        return room if self._most is None else min(room, self._most)

    def close(self) -> None:
        """End all lanes, and the connection if it was made here."""
        super().close()
        if self._owns_connection:
            self._ray.shutdown()


def _error_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
