"""A race that is made ready in a lane of its own while others work, and is timed once it is let go on."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread
from typing import Any

from forecast_harness.sandbox.api import JobResult, ResourceLimits, SandboxJob, SandboxLane

HOLD = "hold"
"""The key of a race's payload that names the file whose appearance lets it go on."""
_LOOK_S = 0.005
_GIVE_UP_AGAIN_S = 0.05


def wait_to_be_let_go(payload: Mapping[str, Any]) -> None:
    """Wait where the payload says so. Runs in the judge, whose time is limited by its lane."""
    hold = payload.get(HOLD)
    while hold and not Path(hold).exists():
        time.sleep(_LOOK_S)


class HeldRace:
    """One race. What it does before it is let go on, to compile and to launch a few times, needs no quiet device."""

    def __init__(self, lane: SandboxLane, job: SandboxJob, limits: ResourceLimits) -> None:
        self._lane = lane
        self._folder = tempfile.TemporaryDirectory(prefix="forecast-held-race-")
        self._gate = Path(self._folder.name) / "go"
        self._result: Future[JobResult] = Future()
        held = SandboxJob(job.entry, {**job.payload, HOLD: str(self._gate)}, job.files)
        self._running = Thread(target=self._run, args=(held, limits), name="held-race", daemon=True)
        self._running.start()

    def _run(self, job: SandboxJob, limits: ResourceLimits) -> None:
        try:
            self._result.set_result(self._lane.run(job, limits))
        except BaseException as error:
            self._result.set_exception(error)

    def timed(self) -> JobResult:
        """Let it go on; its result. Raises what the lane raises."""
        self._gate.touch()
        return self._result.result()

    def close(self) -> None:
        """End it, if it has not ended: nobody will ask for its result any more. The lane stays open."""
        while wait([self._result], 0.0).not_done:
            self._lane.give_up()  # again, as a lane that was about to begin its job was not told
            wait([self._result], _GIVE_UP_AGAIN_S)
        self._running.join()
        self._folder.cleanup()
