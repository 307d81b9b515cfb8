"""The runner: a process that launches programs on request. It imports no candidate, torch or Triton."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from forecast_autotune.errors import ForecastAutotuneError
from forecast_harness.clocks.records import MOST_STEPS, CompiledKernel, MachineCodeError, Program
from forecast_harness.clocks.runner.contestant import Contestant, LoadedKernel
from forecast_harness.clocks.runner.driver import (
    ATTRIBUTE_L2_BYTES,
    ATTRIBUTE_MAJOR,
    ATTRIBUTE_MINOR,
    ATTRIBUTE_MULTIPROCESSORS,
    LIMIT_HEAP_BYTES,
    LIMIT_PRINTF_BYTES,
    CudaDriver,
    DriverError,
)
from forecast_harness.clocks.runner.messages import (
    NOBODY,
    BufferContents,
    ElementKind,
    LaunchMarker,
    ProgramInputs,
    TimingLimits,
    encode_launches,
)
from forecast_harness.clocks.runner.session import LaunchSession
from forecast_harness.sandbox import wire
from forecast_harness.sandbox.jobs import TensorBytes

_MOST_LOADED = 4 * MOST_STEPS
_LEAST_FLUSH_BYTES, _FLUSH_FACTOR = 256 << 20, 3
_HEAP_BYTES = 1 << 20


class RunnerService:
    """Answers requests, one at a time."""

    def __init__(self, driver: CudaDriver, flush_bytes: int, marks: LaunchMarker) -> None:
        self._driver, self._marks = driver, marks
        self._session = LaunchSession(driver, flush_bytes, marks.set)
        self._inputs: dict[str, dict[str, BufferContents]] = {}
        self._kernels: OrderedDict[str, LoadedKernel] = OrderedDict()

    def answer(
        self, request: Mapping[str, Any], arrays: Mapping[str, TensorBytes]
    ) -> tuple[dict[str, Any], dict[str, TensorBytes]]:
        """The answer to a request: its value and arrays. Raises `DriverError`, `ForecastAutotuneError`."""
        if request["op"] == "health":
            return {"wrong": self._session.kernels.check_health(int(request["seed"]))}, {}
        if request["op"] == "clock":
            return {"pauses": [list(p) for p in self._session.timed_pauses(request["cycles"])]}, {}
        if request["op"] == "inputs":
            self._inputs[request["key"]] = {
                n: BufferContents(bytes(a.data), int(request["sizes"][n])) for n, a in arrays.items()
            }
            return {}, {}
        if request["op"] == "forget":
            self._inputs.pop(request["key"], None)
            self._session.forget(request["key"])
            return {}, {}
        parts, outputs = list[dict[str, Any]](), dict[str, TensorBytes]()
        for number, part in enumerate(request["parts"]):
            value, result = self._part(request["op"], f"{number}", part, arrays)
            parts.append(value)
            outputs |= result
            if value["violations"]:
                break
        return {"parts": parts}, outputs

    def _part(
        self, operation: str, name: str, request: Mapping[str, Any], arrays: Mapping[str, TensorBytes]
    ) -> tuple[dict[str, Any], dict[str, TensorBytes]]:
        """The answer for one call, and the outputs that the host does not have."""
        contestants = [
            self._contestant(n, f"code-{name}-{n}", data, arrays)
            for n, data in enumerate(request["programs"])
        ]
        key = request["inputs"]
        inputs = ProgramInputs(
            key, self._inputs[key], request["outputs"], request["rotate"], tuple(request["updates"])
        )
        if operation == "learn":
            kinds = {n: ElementKind.from_json(k) for n, k in request["kinds"].items()}
            names, faults = self._session.learn(contestants[0], inputs, kinds, int(request["blamed"]))
            return {"names": names, "violations": [v.to_json() for v in faults]}, {}
        if request["compared"] and not self._session.knows_results(inputs.key):
            raise MachineCodeError(f"what is right at the call {inputs.key} has not been learned")
        if operation == "check":
            launches, violations = self._session.check(contestants[0], inputs, int(request["launches"]))
            value, outputs = encode_launches(launches, name)
            return {"launches": value, "violations": [v.to_json() for v in violations]}, outputs
        result = self._session.time(contestants, inputs, TimingLimits.from_json(request["limits"]))
        value, outputs = encode_launches(result.launches, name)
        answer = {"launches": value, "seconds": result.seconds, "stopped": result.stopped}
        answer |= {"recorded": result.recorded, "violations": [v.to_json() for v in result.violations]}
        return answer, outputs

    def _contestant(
        self, number: int, code: str, data: Mapping[str, Any], arrays: Mapping[str, TensorBytes]
    ) -> Contestant:
        program = Program.from_json(data)
        self._marks.set(number)  # loading is the candidate's doing
        kernels = [
            self._load(replace(kernel, image=bytes(arrays[f"{code}-{n}"].data)))
            for n, kernel in enumerate(program.kernels)
        ]
        self._marks.set(NOBODY)
        return Contestant(self._driver, program, kernels, f"{number}/")

    def _load(self, kernel: CompiledKernel) -> LoadedKernel:
        key = kernel.id
        if key in self._kernels:
            self._kernels.move_to_end(key)
            return self._kernels[key]
        while len(self._kernels) >= _MOST_LOADED:
            self._kernels.popitem(last=False)[1].unload()
        result = self._kernels[key] = LoadedKernel(self._driver, kernel)
        return result


def _leave_with(parent: int) -> None:
    """End this process once its parent has ended, even while the device works."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(3)


def main(text: str) -> NoReturn:
    """Serve on the socket that `text` names, until it is closed or the device is lost."""
    orders = json.loads(text)
    threading.Thread(target=_leave_with, args=(int(orders["parent"]),), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = socket.socket(fileno=orders["channel"])
    marks = LaunchMarker(orders["marks"])
    marks.set(NOBODY)
    try:
        driver = CudaDriver(orders["library"], int(orders["device"]))
        driver.limit(LIMIT_HEAP_BYTES, _HEAP_BYTES)
        driver.limit(LIMIT_PRINTF_BYTES, _HEAP_BYTES)
        flush = orders["flush_bytes"] or max(
            _LEAST_FLUSH_BYTES, _FLUSH_FACTOR * driver.attribute(ATTRIBUTE_L2_BYTES)
        )
        service = RunnerService(driver, flush, marks)
        arch = 10 * driver.attribute(ATTRIBUTE_MAJOR) + driver.attribute(ATTRIBUTE_MINOR)
        facts = {
            "name": driver.device_name,
            "arch": arch,
            "multiprocessors": driver.attribute(ATTRIBUTE_MULTIPROCESSORS),
        }
    except (DriverError, OSError) as error:
        wire.send(channel, {"broken": str(error)}, {})
        os._exit(1)
    wire.send(channel, {"hello": facts}, {})
    while True:
        try:
            request, arrays = wire.receive(channel, wire.TRUSTED_LIMIT, header_limit=wire.TRUSTED_LIMIT)
        except (EOFError, OSError):
            os._exit(0)
        value: dict[str, Any]
        outputs: dict[str, TensorBytes] = {}
        is_lost = False
        contestant, began = NOBODY, time.perf_counter()
        try:
            value, outputs = service.answer(request, arrays)
        except DriverError as error:
            contestant, _ = marks.read()
            is_lost = error.sticky
            value = {"failed": str(error), "code": error.code, "contestant": contestant}
        except (ForecastAutotuneError, KeyError, RuntimeError) as error:
            contestant, _ = marks.read()
            value = {"failed": f"{type(error).__name__}: {error}"[:2000], "code": 0, "contestant": contestant}
        marks.set(NOBODY)
        busy = time.perf_counter() - began
        wire.send(channel, {"number": request["number"], **value, "lost": is_lost, "busy_s": busy}, outputs)
        if is_lost:
            os._exit(2)
