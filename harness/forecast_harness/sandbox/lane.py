"""A lane: one supervised slot for candidates, whose owner's process never loads any of them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forecast_harness.sandbox import canary, warm_process, wire
from forecast_harness.sandbox.containment.levels import ContainmentLevel, module_search_path
from forecast_harness.sandbox.jobs import (
    FILES_FOLDER,
    Fault,
    JobResult,
    JobStatus,
    Resource,
    ResourceLimits,
    SandboxError,
    SandboxJob,
    TensorArrays,
    WireError,
    describe_end,
    write_files,
)
from forecast_harness.sandbox.warm_process import ServerProcess, WarmProcess, WarmUp, read_log

_INHERITED_VARIABLES = (
    "PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "OMP_NUM_THREADS",
    "TRITON_INTERPRET",
)
"""The only variables of this process's environment that a server, a judge and a cell see."""
_HELLO_TIMEOUT_S = 180.0
_SILENT_S = 6
"""A server that does not answer so many pings, one a second, is lost; it never blocks for half as long."""
_STOP_TIMEOUT_S = 5.0
_MESSAGE_BYTES = 1 << 17
_LOG = "server.log"


class _ServerLost(Exception):
    """The fork-server died or does not answer."""


class SandboxLane(Resource):
    """A supervised worker slot: `lane.run(SandboxJob(...), ResourceLimits(...))` in a `with`.

    level: containment to insist on; by default the strongest that works here, see `SandboxLane.level`.
    device: `CUDA_VISIBLE_DEVICES` of its processes, an index or a UUID; None: no device.
    scratch: a directory for its files (default: the system's temporary one), made where it is missing; a private
    folder is made in it.
    environment: variables on top of the allow-list `PATH`, `LANG`, `LC_ALL`, `TZ`, `LD_LIBRARY_PATH`,
    `CUDA_HOME`, `CUDA_PATH`, `OMP_NUM_THREADS` and `TRITON_INTERPRET`. Candidates can read all of them.
    warm: modules that are imported once for all lanes that name the same; trusted, and none may use a device.
    niceness: how far its processes stand back for others where processors are short, 0 to 19.

    One job at a time; `run` may be called from several threads and waits its turn. Raises `SandboxError` on
    entering when the level does not work here or the server does not start.
    """

    def __init__(
        self,
        level: ContainmentLevel | None = None,
        device: str | None = None,
        scratch: str | Path | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        warm: Sequence[str] = ("torch", "triton"),
        niceness: int = 0,
    ) -> None:
        if sys.platform != "linux":
            raise SandboxError(
                f"the sandbox needs Linux, this is {sys.platform}; run it in a container there"
            )
        self._requested_level, self._device, self._parent = level, device, scratch
        self._niceness = niceness
        self._environment = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
        self._environment |= {"CUDA_VISIBLE_DEVICES": device or "", **(environment or {})}
        modules, variables = (*warm, canary.__name__), tuple(sorted(self._environment.items()))
        self._warm_up, self._search_path = WarmUp(modules, variables), module_search_path()
        self._warm_process: WarmProcess | None = None
        self._run_lock = threading.Lock()
        self._server: ServerProcess | None = None
        self._messages: list[dict[str, Any]] = []
        self._jobs = 0
        self._given_up = self._opening_given_up = False
        self._level: ContainmentLevel | None = None
        self._apart = True
        self.refused: dict[str, str] = {}
        """Why stronger levels do not work here, by level."""
        self.apart = False
        """Whether cells have users of their own instead of namespaces, as root can give them."""
        self.restarts = 0
        """How often the server had to be replaced."""
        self.healthy = True
        """Whether the last canary succeeded; with a device one runs at the start."""

    @property
    def level(self) -> ContainmentLevel:
        """The containment in force. Raises `SandboxError` before the lane is entered."""
        if self._level is None:
            raise SandboxError("the lane is not open; use `with SandboxLane() as lane:`")
        return self._level

    @property
    def server_pid(self) -> int:
        """Process id of the server, which starts judges and cells. Raises `SandboxError` where none runs."""
        if self._server is None:
            raise SandboxError("the lane is not open; use `with SandboxLane() as lane:`")
        return self._server.pid

    def __enter__(self) -> SandboxLane:
        if self._parent is not None:
            Path(self._parent).mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="forecast-lane-", dir=self._parent))
        self._scratch.chmod(0o711)  # candidates of another user have to find theirs in it
        (self._scratch / "root").mkdir()
        self._warm_process = warm_process.acquire(self._warm_up)
        try:
            if self._opening_given_up:
                raise SandboxError("nobody waits for this lane any more")
            self._start()
            if self._device is not None:
                self._try_device()
        except BaseException as error:
            message = f"the lane's server was lost at once: {error}; {read_log(self._scratch / _LOG)}"
            self.close()
            if isinstance(error, _ServerLost):
                raise SandboxError(message) from error
            raise
        return self

    def close(self) -> None:
        """End every process of the lane and remove its files."""
        self._stop()
        self._level = None
        process, self._warm_process = self._warm_process, None
        if process is not None:
            warm_process.release(process)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def give_up_opening(self, waiting: int) -> None:
        """Have `__enter__`, which another thread is at, raise `SandboxError` soon, unless it is nearly done.

        `waiting`: lanes, this one included, that nobody waits for any more.
        """
        self._opening_given_up = True
        if (process := self._warm_process) is not None and self._server is None:
            warm_process.give_up(process, waiting)

    def give_up(self) -> None:
        """End the job under way, if there is one: its `run` raises `SandboxError`. Call it from another thread.

        The lane stays open, and starts its server again for the next job.
        """
        if self._server is not None and self._run_lock.locked():
            self._given_up = True
            self._ask_to_stop()

    def run(self, job: SandboxJob, limits: ResourceLimits | None = None) -> JobResult:
        """Do one job in fresh processes and attribute its result. Never raises for a candidate.

        After any fault the canary runs: a fault is the candidate's only on a machine shown to be healthy.
        An unhealthy lane tries its canary again at the next job and returns `infra_error` until it succeeds.
        Raises `SandboxError` if the lane is not open, its server cannot be replaced, or the job was given up.
        """
        with self._run_lock:
            if self._given_up and self._server is not None:
                self._stop()  # asked to when the job before was done already: the server ends soon
            self._given_up = False
            began = time.perf_counter()
            level = self.level
            try:
                if self._server is None:  # given up in an interrupt
                    self._start(level)
                return self._run_and_attribute(job, limits or ResourceLimits(), began)
            except _ServerLost as error:
                if self._given_up:
                    self._stop()
                    raise SandboxError("the job was given up") from error
                detail = f"the server was lost and replaced: {error}; {read_log(self._scratch / _LOG)}"
                self._restart()
                seconds = time.perf_counter() - began
                return JobResult(JobStatus.INFRA_ERROR, Fault.SERVER_LOST, seconds=seconds, detail=detail)
            except BaseException:  # an interrupt, say: no job may be left running
                self._stop()
                raise

    def _run_and_attribute(self, job: SandboxJob, limits: ResourceLimits, began: float) -> JobResult:
        if not self.healthy and (verdict := self._canary()) != "ok":
            fault = Fault.DEVICE_UNHEALTHY
            seconds = time.perf_counter() - began
            return JobResult(fault.status, fault, seconds=seconds, detail=verdict, canary=verdict)
        message, arrays, end = self._converse(job, limits)
        if message is None:
            fault, detail, value = Fault.TRUSTED_ERROR, describe_end(end, limits), None
        else:
            fault, detail, value = Fault(message["fault"]), message["detail"], message["value"]
        if end["left"]:
            self.healthy = False
            detail += f" ({end['left']} processes could not be killed)"
        verdict = self._canary() if fault is not Fault.NONE or end["left"] else ""
        if verdict not in ("", "ok") and fault.status is JobStatus.CANDIDATE_ERROR:
            fault, detail = Fault.DEVICE_UNHEALTHY, f"{verdict} (after {fault}: {detail})"
        seconds = time.perf_counter() - began
        return JobResult(fault.status, fault, value, arrays, seconds, detail, verdict)

    def _converse(
        self, job: SandboxJob, limits: ResourceLimits
    ) -> tuple[dict[str, Any] | None, TensorArrays, dict[str, Any]]:
        """(the judge's message, its arrays, the server's report); None for a judge without a message."""
        self._jobs += 1
        place = self._scratch / f"job-{self._jobs}"
        try:
            write_files(place / FILES_FOLDER, job.files)
            place.chmod(0o711)
            return self._talk(job, limits, place)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _talk(
        self, job: SandboxJob, limits: ResourceLimits, place: Path
    ) -> tuple[dict[str, Any] | None, TensorArrays, dict[str, Any]]:
        ours, theirs = socket.socketpair()
        with ours:
            request = {"op": "run", "job": self._jobs, "place": str(place), "limits": limits.to_json()}
            self._tell(request, theirs.fileno())
            theirs.close()
            message: dict[str, Any] | None = None
            arrays: TensorArrays = {}
            with contextlib.suppress(ConnectionError, EOFError, WireError):
                ours.settimeout(limits.trusted_s)
                wire.send(ours, {"entry": job.entry, "payload": dict(job.payload)}, {})
                ours.settimeout(None)
                message, arrays = wire.receive(
                    ours, wire.TRUSTED_LIMIT, lambda: self._wait(ours), wire.TRUSTED_LIMIT
                )
        while (end := self._take_message("end")) is None:
            self._wait()
        return message, arrays, end

    def _wait(self, channel: socket.socket | None = None) -> None:
        """Wait until channel or server have a message. Raises `_ServerLost`, or `EOFError` at the job's end."""
        sources = [self._control, *([channel] if channel else [])]
        pings = 0
        while not (ready := select.select(sources, [], [], 1.0)[0]):
            if pings >= _SILENT_S:
                raise _ServerLost(f"no sign of life for {_SILENT_S} s")
            self._tell({"op": "ping"})
            pings += 1
        if self._control in ready:
            self._read_mail()
        if channel and channel not in ready:
            if any(m["event"] == "end" for m in self._messages):
                if not select.select([channel], [], [], 0)[0]:
                    raise EOFError
                return
            self._wait(channel)

    def _canary(self) -> str:
        """`ok`, or the fault of the machine or its device."""
        job = SandboxJob(f"{canary.__name__}:main", {"device": self._device})
        message, _, end = self._converse(job, canary.CANARY_LIMITS)
        if message is None or message["fault"]:
            text = message["detail"] if message else describe_end(end, canary.CANARY_LIMITS)
        else:
            text = str(message["value"])
        self.healthy = text == "ok"
        return text

    def _take_message(self, event: str) -> dict[str, Any] | None:
        for message in self._messages:
            if message["event"] == event:
                self._messages.remove(message)
                return message
        return None

    def _read_mail(self) -> None:
        try:
            data = self._control.recv(_MESSAGE_BYTES)
        except ConnectionError as error:
            raise _ServerLost(str(error)) from error
        if not data:
            raise _ServerLost("it hung up")
        message = json.loads(data)
        if message["event"] != "pong":
            self._messages.append(message)

    def _tell(self, message: dict[str, Any], *fds: int) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds)
        except OSError as error:
            raise _ServerLost(str(error)) from error

    # --- the server's life ---

    def _try_device(self) -> None:
        """Run the canary in a cell; where a level keeps the device from it, take the next weaker one.

        Only if the caller did not insist on a level. If it fails at every level, the device is at fault and
        not the containment: the lane stays at its strongest level, unhealthy.
        """
        strongest, refusals = self.level, dict(self.refused)
        while (message := self._canary()) != "ok" and (self._requested_level is None or self.apart):
            if self.apart:  # the device may be for root alone
                self._stop()
                self._apart = False
                self._start(self.level)
                continue
            refusals[self.level.name] = message
            weaker = self.level is not ContainmentLevel.PROCESS
            self._apart = True
            self._stop()
            self._start(ContainmentLevel(self.level - 1) if weaker else strongest)
            if not weaker:
                return
        self.refused = refusals

    def _start(self, level: ContainmentLevel | None = None) -> None:
        assert self._warm_process is not None
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        orders = {
            "level": level or self._requested_level,
            "device": self._device,
            "scratch": str(self._scratch),
            "staging": str(self._scratch / "root"),
            "apart": self._apart,
        }
        with theirs, (self._scratch / _LOG).open("wb") as log:
            try:
                self._server = self._warm_process.fork_server(
                    orders, self._search_path, self._scratch, theirs.fileno(), log.fileno()
                )
            except BaseException:
                self._control.close()
                raise
        self._messages.clear()
        if self._niceness:
            with contextlib.suppress(OSError):  # it has ended: its greeting will be missed
                os.setpriority(os.PRIO_PROCESS, self._server.pid, self._niceness)
        try:
            while (hello := self._take_message("hello")) is None:
                if not select.select([self._control], [], [], _HELLO_TIMEOUT_S)[0]:
                    raise _ServerLost(f"no greeting within {_HELLO_TIMEOUT_S:g} s")
                self._read_mail()
        except _ServerLost as error:
            message = read_log(self._scratch / _LOG)
            raise SandboxError(f"the lane's server did not start: {error}; {message}") from error
        self.refused = hello["refused"]
        if not hello["level"]:
            missing = (
                "no level of containment"
                if self._requested_level is None
                else f"level {self._requested_level.name} does not"
            )
            raise SandboxError(f"{missing} works here: {self.refused}; Lane(level=None) takes the strongest")
        self._level = ContainmentLevel(hello["level"])
        self.apart = bool(hello["apart"])

    def _stop(self) -> None:
        if self._server is None:
            return
        self._ask_to_stop()
        try:
            self._server.wait(_STOP_TIMEOUT_S)  # it kills what it has started, orphans too, then leaves
        except TimeoutError:
            self._server.kill()
            self._server.wait()
        self._control.close()
        self._server = None

    def _ask_to_stop(self) -> None:
        with contextlib.suppress(_ServerLost, OSError):
            self._tell({"op": "stop"})
            # Not closed yet: a server that cannot answer an earlier message takes the lane for dead, does not
            # read this one, and removes the lane's files.
            self._control.shutdown(socket.SHUT_WR)

    def _restart(self) -> None:
        if self._server is not None:
            self._server.kill()  # the server does not listen any more; its children die with it
        self._stop()
        self.restarts += 1
        self._start(self._level)
