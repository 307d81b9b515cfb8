"""The handle on a runner: sends requests, watches the time, attributes faults, and restarts the runner."""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from forecast_harness.clocks import devices
from forecast_harness.clocks.devices import ONE_QUEUE
from forecast_harness.clocks.records import MachineCodeError, Program
from forecast_harness.clocks.runner.driver import LIBRARY
from forecast_harness.clocks.runner.messages import (
    NOBODY,
    CheckAnswer,
    ElementKind,
    FaultRecord,
    LaunchMarker,
    ProgramFault,
    ProgramInputs,
    RunnerFaultKind,
    TimingAnswer,
    TimingLimits,
    TimingRequest,
    Violation,
    create_marker,
    decode_launches,
)
from forecast_harness.sandbox import wire
from forecast_harness.sandbox.containment.levels import module_search_path
from forecast_harness.sandbox.jobs import Resource, SandboxError, TensorBytes, WireError

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
    """The runner failed through no fault of a program, of which nothing is known then."""


class RunnerProcess:
    """A starting process; `greeting` waits until it takes requests."""

    def __init__(self, orders: Mapping[str, Any], visible: str) -> None:
        """`visible`: UUID of the only device that it sees; '': the devices that this process sees."""
        self.channel, theirs = socket.socketpair()
        marks = create_marker()
        self.marks = LaunchMarker(marks)
        self.marks.set(NOBODY)
        settings = {**orders, "channel": theirs.fileno(), "marks": marks, "parent": os.getpid()}
        command = [sys.executable, "-I", "-c", _COMMAND, module_search_path(), json.dumps(settings)]
        environment = {**ONE_QUEUE, **{n: os.environ[n] for n in _ENVIRONMENT if n in os.environ}}
        if visible:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
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
                message, _ = wire.receive(self.channel, wire.TRUSTED_LIMIT)
            except (EOFError, OSError, WireError) as error:
                raise RunnerLost(f"the runner did not start: {error or type(error).__name__}") from error
            if "hello" not in message:
                raise RunnerLost(f"the runner cannot use the device: {message.get('broken', message)}")
        except RunnerLost:
            self.stop()
            raise
        facts: Mapping[str, Any] = message["hello"]
        return facts

    def stop(self) -> None:
        """End the process, and wait for its end."""
        self._process.kill()
        self._process.wait()
        self.channel.close()
        self.marks.close()


LAUNCH_S = 4.0
"""Seconds of one launch after which its program counts as hanging; a driver may need two to report an error."""
_ANSWER_S, _START_S = 120.0, 60.0
"""Seconds of a whole request, and of a start, after which a runner is given up."""
_POLL_S = 0.1
_MOST_INPUT_SETS = 16


class RunnerClient(Resource):
    """A runner of one device; use as a context manager. Requests wait for each other.

    `library`: the driver, by name or path. `launch_s`: seconds of one launch after which its program is said to
    hang. `flush_bytes`: what is read to empty the caches; 0: three times the L2. `visible`: the only device that the
    runner is to see, by its UUID; '': those that this process sees.
    """

    def __init__(
        self,
        library: str = LIBRARY,
        device: int = 0,
        *,
        launch_s: float = LAUNCH_S,
        flush_bytes: int = 0,
        visible: str = "",
    ) -> None:
        self._orders = {"library": library, "device": device, "flush_bytes": flush_bytes}
        self._visible = visible
        self._launch_s = launch_s
        self._lock = threading.Lock()
        self._runner: RunnerProcess | None = None
        self._sent_keys: list[str] = []
        self._right_programs: dict[str, tuple[Program, ProgramInputs, Mapping[str, ElementKind]]] = {}
        self._number = 0
        self._closed = True
        self.facts: Mapping[str, Any] = {}
        """`name`, `arch` and `multiprocessors` of the device."""
        self.faults: list[FaultRecord] = []
        self.restarts = 0
        self.busy_s = 0.0
        """Seconds that processes have worked on requests."""

    def __enter__(self) -> RunnerClient:
        self._closed = False
        self._start()
        return self

    def close(self) -> None:
        """End the process."""
        self._closed = True
        with self._lock:
            self._stop()

    @property
    def pid(self) -> int:
        """The runner's process id; 0 while there is none."""
        return self._runner.pid if self._runner else 0

    # --- requests ---

    def check(self, program: Program, inputs: ProgramInputs, launches: int = 3) -> CheckAnswer:
        """Launch a program in several placements. Raises `ProgramFault`, `RunnerLost`."""
        value, arrays = self._ask("check", [([program], inputs, {"launches": launches})])
        (data,) = value["parts"]
        return CheckAnswer(decode_launches(data["launches"], arrays, "0"), self._violations(data, inputs))

    def learn(
        self, program: Program, inputs: ProgramInputs, kinds: Mapping[str, ElementKind]
    ) -> tuple[tuple[str, ...], tuple[Violation, ...]]:
        """Launch a right program at a call; later launches there are compared with its results.

        `kinds`: of every input. The inputs that it changes; with `inputs.updates`, these, and it may change no others.
        Raises `ProgramFault`, `RunnerLost`.
        """
        self._right_programs.pop(inputs.key, None)
        value, _ = self._ask("learn", [([program], inputs, _learning(kinds, 0))])
        (data,) = value["parts"]
        names = tuple(data["names"])
        if not data["violations"]:
            self._right_programs[inputs.key] = program, replace(inputs, updates=names), kinds
        return names, self._violations(data, inputs)

    def time(
        self, programs: Sequence[Program], inputs: ProgramInputs, limits: TimingLimits | None = None
    ) -> TimingAnswer:
        """Time one program, or two side by side: the second is on trial. Raises `ProgramFault`, `RunnerLost`."""
        return self.time_calls([TimingRequest(programs, inputs, limits or TimingLimits())])[0]

    def time_calls(self, requests: Sequence[TimingRequest]) -> list[TimingAnswer]:
        """Time at several calls, one after the other, of the same candidates; the first violation is the last answer.

        Raises `ProgramFault`, `RunnerLost`.
        """
        parts = [(r.programs, r.given, {"limits": r.limits.to_json()}) for r in requests]
        value, arrays = self._ask("time", parts)
        answers = []
        for number, data in enumerate(value["parts"]):
            answers.append(
                TimingAnswer(
                    [[float(s) for s in times] for times in data["seconds"]],
                    data["stopped"],
                    data["recorded"],
                    list(decode_launches(data["launches"], arrays, f"{number}")),
                    list(self._violations(data, requests[number].given)),
                )
            )
        return answers

    def check_health(self) -> str:
        """The fault of the runner's own kernel; '' for none."""
        with self._lock:
            return self._health()

    def renew(self) -> float:
        """Replace the process, and with it all data that programs left in the driver's own memory.

        Returns the seconds that it took. Raises `RunnerLost`.
        """
        with self._lock:
            return self._restart()

    def timed_pauses(self, cycles: Sequence[int]) -> list[tuple[float, float]]:
        """Seconds of pauses of so many clock cycles: by the device, and by the host's clock around each.

        Raises `RunnerLost` where they cannot be timed.
        """
        with self._lock:
            try:
                value, _ = self._converse({"op": "clock", "cycles": list(cycles)}, {})
            except _RunnerEnded as failure:
                raise RunnerLost(f"the runner's own pause: {failure.detail}") from None
        if "failed" in value:
            raise RunnerLost(f"the runner's own pause: {value['failed']}")
        return [(float(device), float(host)) for device, host in value["pauses"]]

    # --- one request ---

    def _ask(
        self, operation: str, parts: Sequence[tuple[Sequence[Program], ProgramInputs, dict[str, Any]]]
    ) -> tuple[dict[str, Any], dict[str, TensorBytes]]:
        request, code = self._encode_parts(parts)
        programs = parts[0][0]
        with self._lock:
            for attempt in (0, 1):
                try:
                    for _, inputs, _ in parts:
                        self._give(inputs)
                    return self._exchange(programs, {"op": operation, "parts": request}, code)
                except _RunnerEnded as end:
                    restart_s = self._restart()
                    number = end.contestant if end.contestant != NOBODY else None
                    if number is not None and (end.certain or attempt):
                        raise self._fault(end.kind, programs[number], end.detail, restart_s) from None
                    self.faults.append(FaultRecord("", end.kind, end.detail, restart_s))
                    if attempt:
                        raise RunnerLost(f"the runner was lost twice: {end.detail}") from None
        raise AssertionError("unreachable")

    def _encode_parts(
        self, parts: Sequence[tuple[Sequence[Program], ProgramInputs, dict[str, Any]]]
    ) -> tuple[list[dict[str, Any]], dict[str, TensorBytes]]:
        request = [
            {
                "inputs": inputs.key,
                "outputs": dict(inputs.outputs),
                "rotate": dict(inputs.rotate),
                "updates": list(inputs.updates),
                "compared": inputs.key in self._right_programs,
                "programs": [p.to_json() for p in programs],
                **more,
            }
            for programs, inputs, more in parts
        ]
        code = {
            f"code-{part}-{n}-{m}": TensorBytes("uint8", (len(k.image),), k.image)
            for part, (programs, _, _) in enumerate(parts)
            for n, p in enumerate(programs)
            for m, k in enumerate(p.kernels)
        }
        return request, code

    def _exchange(
        self, programs: Sequence[Program], request: dict[str, Any], code: Mapping[str, TensorBytes]
    ) -> tuple[dict[str, Any], dict[str, TensorBytes]]:
        value, arrays = self._converse(request, code)
        if "failed" not in value:
            return value, arrays
        contestant = int(value["contestant"])
        if value["lost"]:
            certain = contestant != NOBODY
            raise _RunnerEnded(RunnerFaultKind.DEVICE_ERROR, contestant, value["failed"], certain)
        if contestant == NOBODY and not value["code"]:
            raise RunnerLost(f"the runner: {value['failed']}")
        # The plan asks for memory, so that a lack of it is the candidate's fault.
        program = programs[contestant if contestant != NOBODY else len(programs) - 1]
        restart_s = self._restart() if self._health() else 0.0
        raise self._fault(RunnerFaultKind.REFUSED, program, value["failed"], restart_s)

    def _fault(self, kind: RunnerFaultKind, program: Program, detail: str, seconds: float) -> ProgramFault:
        self.faults.append(FaultRecord(program.candidate, kind, detail, seconds))
        return ProgramFault(kind, program.candidate, detail)

    def _give(self, inputs: ProgramInputs) -> None:
        if inputs.key in self._sent_keys:
            return
        while len(self._sent_keys) >= _MOST_INPUT_SETS:
            self._converse({"op": "forget", "key": self._sent_keys.pop(0)}, {})
        arrays = {n: TensorBytes("uint8", (len(b.data),), b.data) for n, b in inputs.inputs.items()}
        sizes = {n: b.size for n, b in inputs.inputs.items()}
        self._converse({"op": "inputs", "key": inputs.key, "sizes": sizes}, arrays)
        if inputs.key in self._right_programs:
            self._learn_again(*self._right_programs[inputs.key])
        self._sent_keys.append(inputs.key)

    def _learn_again(self, program: Program, inputs: ProgramInputs, kinds: Mapping[str, ElementKind]) -> None:
        """Learn results again, in a new runner. The program was right before, so nobody is to blame for a fault."""
        request, code = self._encode_parts([([program], inputs, _learning(kinds, NOBODY))])
        value, _ = self._converse({"op": "learn", "parts": request}, code)
        if message := value.get("failed") or value["parts"][0]["violations"]:
            raise RunnerLost(f"the right program, launched again: {message}")

    def _violations(self, value: Mapping[str, Any], inputs: ProgramInputs) -> tuple[Violation, ...]:
        """The rules that a program broke; inputs that it may have spoilt are sent again."""
        try:
            result = tuple(Violation.from_json(v) for v in value["violations"])
        except (KeyError, TypeError) as error:
            raise MachineCodeError(f"the runner's answer has no list of violations: {error}") from error
        # The runner sends spoilt inputs anew itself; results are learned again with them.
        if result and inputs.key in self._right_programs and inputs.key in self._sent_keys:
            self._sent_keys.remove(inputs.key)
        return result

    def _health(self) -> str:
        try:
            value, _ = self._converse({"op": "health", "seed": secrets.randbits(31)}, {})
        except _RunnerEnded as failure:
            return failure.detail
        return str(value.get("failed") or value.get("wrong", ""))

    def _converse(
        self, request: Mapping[str, Any], arrays: Mapping[str, TensorBytes]
    ) -> tuple[dict[str, Any], dict[str, TensorBytes]]:
        """One request and its answer. Raises `_RunnerEnded`."""
        if self._runner is None:
            raise RunnerLost("the runner is closed; use `with RunnerClient() as runner:`")
        channel, marks = self._runner.channel, self._runner.marks
        self._number += 1
        began = since = time.monotonic()
        mark = marks.read()

        def wait() -> None:
            nonlocal since, mark
            while not select.select([channel], [], [], _POLL_S)[0]:
                now, latest = time.monotonic(), marks.read()
                if latest != mark:
                    since, mark = now, latest
                elif latest[0] != NOBODY and now - since > self._launch_s:
                    message = f"a launch did not end within {self._launch_s:g} s"
                    raise _RunnerEnded(RunnerFaultKind.HANG, latest[0], message, True)
                elif now - began > _ANSWER_S:
                    message = f"no answer within {_ANSWER_S:g} s"
                    raise _RunnerEnded(RunnerFaultKind.HANG, latest[0], message, False)

        try:
            wire.send(channel, {**request, "number": self._number}, dict(arrays))
            value, outputs = wire.receive(channel, wire.TRUSTED_LIMIT, wait, wire.TRUSTED_LIMIT)
        except (EOFError, OSError, WireError) as error:
            detail = f"the runner ended: {error or type(error).__name__}"
            raise _RunnerEnded(RunnerFaultKind.CRASH, marks.read()[0], detail, False) from None
        if not isinstance(value, dict) or value.get("number") != self._number:
            raise _RunnerEnded(RunnerFaultKind.CRASH, marks.read()[0], "an answer to another request", False)
        self.busy_s += float(value.get("busy_s", 0.0))
        return value, outputs

    # --- the process ---

    def _start(self) -> None:
        self._sent_keys.clear()
        runner = RunnerProcess(self._orders, self._visible)
        self.facts, self._runner = runner.greeting(_START_S), runner

    def _stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.stop()

    def _restart(self) -> float:
        """Another runner, shown to be healthy; the seconds that it took. Raises `RunnerLost`."""
        if self._closed:
            raise RunnerLost("the runner is closed")
        began = time.monotonic()
        self._stop()
        self.restarts += 1
        self._start()
        if message := self._health():
            raise RunnerLost(f"the device is not healthy after a restart: {message}")
        return time.monotonic() - began


class _RunnerEnded(Exception):
    """The process ended or has to be ended; `certain` where the marked contestant surely caused it."""

    def __init__(self, kind: RunnerFaultKind, contestant: int, detail: str, certain: bool) -> None:
        super().__init__(detail)
        self.kind, self.contestant, self.detail, self.certain = kind, contestant, detail, certain


def _learning(kinds: Mapping[str, ElementKind], contestant: int) -> dict[str, Any]:
    return {"kinds": {n: k.to_json() for n, k in kinds.items()}, "blamed": contestant}


# --- health ---


_SHORT_CYCLES, _LONG_CYCLES = 2_000_000, 16_000_000
"""Cycles of two pauses: some 1 and 8 ms."""
_RATIO_ERROR = 0.25
"""Most relative error of the ratio of two pauses, as clocks change their rate meanwhile."""
_SLOWEST_HZ, _FASTEST_HZ = 2e8, 5e9
"""Rates of a device's clock."""
_HOST_SLACK = 1.05
"""The device's seconds of a pause may be so many times the host's around it."""


def runner_problem(runner: RunnerClient) -> str:
    """Why this runner cannot be trusted with labels; '' if it can."""
    if message := runner.check_health():
        return f"the runner's own kernel: {message}"
    try:
        return clock_problem(runner.timed_pauses((_SHORT_CYCLES, _SHORT_CYCLES, _LONG_CYCLES))[1:])
    except RunnerLost as error:
        return str(error)


def clock_problem(pauses: list[tuple[float, float]]) -> str:
    """The problem of the device's seconds of a short and a long pause, given the host's; '' for none."""
    (short, _), (long, host) = pauses
    ratio = _LONG_CYCLES / _SHORT_CYCLES
    if short <= 0 or abs(long / short - ratio) > _RATIO_ERROR * ratio:
        return (
            f"the device's clock: pauses of {_SHORT_CYCLES:,} and {_LONG_CYCLES:,} cycles took {short:.3g} s and "
            f"{long:.3g} s; the second should take {ratio:g} times the first"
        )
    if not _SLOWEST_HZ <= _LONG_CYCLES / long <= _FASTEST_HZ:
        return f"the device's clock: {_LONG_CYCLES:,} cycles took {long:.3g} s, which no device's clock does"
    if long > _HOST_SLACK * host:
        return f"the device's clock: a pause took {long:.3g} s of the {host:.3g} s that passed around it"
    return ""


FLUSH_BYTES = 0
"""Bytes that a runner writes to empty its device's caches; 0: as many as suit the device."""
_HEALTH_TRIES, _HEALTH_PAUSE_S = 10, 1.0
"""Tries, and seconds between them: others may use the device, and a clock that waits for them tells no time."""


class NoMachineCodePath(Exception):
    """A target that is not judged through machine code here; the text says why."""


def facts_for_workers(runner: RunnerClient) -> Mapping[str, Any]:
    """The facts that compile workers need of a runner's device."""
    blocks = int(runner.facts["multiprocessors"])
    return {
        "arch": int(runner.facts["arch"]),
        "name": runner.facts["name"],
        "properties": {"multiprocessor_count": blocks},
    }


def open_healthy_runner(index: int, uuid: str = "") -> RunnerClient:
    """A runner of the device with this number and UUID of the driver's, once it has proved its health; to be closed.

    Raises `NoMachineCodePath` for one that has not, and `RunnerLost` where it does not start.
    """
    # By its UUID: the driver's own number may be another card's, by CUDA_VISIBLE_DEVICES or CUDA_DEVICE_ORDER.
    number = 0 if uuid else index
    with ExitStack() as stack:
        runner = stack.enter_context(RunnerClient(LIBRARY, number, visible=uuid, flush_bytes=FLUSH_BYTES))
        for _ in range(_HEALTH_TRIES):
            if not (message := runner_problem(runner)):
                break
            time.sleep(_HEALTH_PAUSE_S)
        else:
            raise NoMachineCodePath(message)
        if uuid and runner.facts["name"] != (name := devices.identity(index)[0]):
            raise NoMachineCodePath(
                f"the runner has {runner.facts['name']!r} for device {index}, the driver's tools have {name!r}: "
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID and leave CUDA_VISIBLE_DEVICES unset"
            )
        stack.pop_all()
        return runner
