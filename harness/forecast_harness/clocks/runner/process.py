"""The process of a runner, as its handle has it: its channel, its marks, and its end."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from forecast_harness.clocks.comparison.device import ONE_QUEUE
from forecast_harness.clocks.runner.run_marks import NOBODY, RunMarks, create_marks
from forecast_harness.sandbox import wire
from forecast_harness.sandbox.containment.levels import module_search_path
from forecast_harness.sandbox.jobs import SandboxError, WireError

_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from forecast_harness.clocks.runner.service import main; main(sys.argv[2])"
)
_ENVIRONMENT = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_CACHE_PATH",
    "HOME",
)


class RunnerLost(SandboxError):
    """The runner failed for reasons that are not a program's: nothing is known of it."""


class RunnerProcess:
    """A process that starts; `greeting` waits until it can be asked."""

    def __init__(self, orders: Mapping[str, Any], visible: str) -> None:
        """`visible`: the only device that it is to see, by its UUID; '': those that this process sees."""
        self.channel, theirs = socket.socketpair()
        marks = create_marks()
        self.marks = RunMarks(marks)
        self.marks.set(NOBODY)
        told = {**orders, "channel": theirs.fileno(), "marks": marks, "parent": os.getpid()}
        command = [sys.executable, "-I", "-c", _COMMAND, module_search_path(), json.dumps(told)]
        kept = {**ONE_QUEUE, **{n: os.environ[n] for n in _ENVIRONMENT if n in os.environ}}
        if visible:
            kept["CUDA_VISIBLE_DEVICES"] = visible
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=kept,
                pass_fds=[theirs.fileno(), marks],
                start_new_session=True,
            )
        os.close(marks)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def greeting(self, within_s: float) -> Mapping[str, Any]:
        """Facts of the device, once it is open. Raises `RunnerLost`; then the process is ended."""
        try:
            if not select.select([self.channel], [], [], within_s)[0]:
                raise RunnerLost(f"the runner did not greet within {within_s:g} s")
            try:
                said, _ = wire.receive(self.channel, wire.TRUSTED_LIMIT)
            except (EOFError, OSError, WireError) as error:
                raise RunnerLost(f"the runner did not start: {error or type(error).__name__}") from error
            if "hello" not in said:
                raise RunnerLost(f"the runner cannot use the device: {said.get('broken', said)}")
        except RunnerLost:
            self.stop()
            raise
        facts: Mapping[str, Any] = said["hello"]
        return facts

    def stop(self) -> None:
        """End it, and wait for its end."""
        self._process.kill()
        self._process.wait()
        self.channel.close()
        self.marks.close()
