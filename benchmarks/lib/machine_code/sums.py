"""A problem for programs of the fake driver: the sum of two float32 vectors."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.lib.machine_code.fake_code import addition, honest
from forecast_harness.clocks.compilation.cubin import check_cubin
from forecast_harness.clocks.compilation.workers import MOST_SCRATCH_BYTES, CallCase, TensorArgument
from forecast_harness.clocks.records import MachineCodeError, Program
from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.clocks.runner.messages import (
    BufferContents,
    ObservedLaunch,
    ProgramFault,
    ProgramInputs,
    TimingLimits,
)

COUNT = 1024


class SumCall:
    """One call: x and y drawn from a seed, and what their sum has to be."""

    def __init__(self, seed: int = 0, count: int = COUNT) -> None:
        chance = np.random.default_rng(seed)
        self.count = count
        self._values = {n: chance.standard_normal(count, dtype=np.float32) for n in ("x", "y")}
        inputs = {n: BufferContents.of(v.tobytes()) for n, v in self._values.items()}
        key = f"{seed}-{count}-{secrets.token_hex(4)}"
        self.given = ProgramInputs(key, inputs, rotate={"x": 4, "y": 4})
        tensor = TensorArgument("float32", (count,), (1,))
        self.arguments = CallCase({"x": tensor, "y": tensor})

    def wrong(self, program: Program, launches: Sequence[ObservedLaunch]) -> str:
        """Return what is wrong with these outputs; '' for nothing."""
        same = [one.outputs for one in launches if not any(one.rotation.values())]
        if any(outputs != same[0] for outputs in same[1:]):
            return "two launches on equal inputs gave different bits"
        for one in launches:
            got = np.frombuffer(one.outputs[0], dtype=np.float32)
            if not np.allclose(got, self._sum(one.rotation), rtol=1e-5, atol=1e-6):
                return "wrong values"
        return ""

    def _sum(self, rotation: Mapping[str, int]) -> np.ndarray:
        x, y = (np.roll(self._values[n], -(rotation.get(n, 0) // 4)) for n in ("x", "y"))
        return np.asarray(x + y)


def objection(runner: RunnerClient, program: Program, call: SumCall, incumbent: Program | None = None) -> str:
    """Why a program is not accepted as a sum; '' where it is. All that a real one has to pass, with its timing.

    `incumbent`: a right one to be timed beside it, that its device takes; None for one of the fake driver.
    """
    try:
        sizes = {n: 4 * call.count for n in ("x", "y")}
        program.plan.check(program.kernels, sizes, scratch_limit=MOST_SCRATCH_BYTES)
        for kernel in program.kernels:
            check_cubin(kernel)
        answer = runner.check(program, call.given, 3)
        if answer.violations:
            return answer.violations[0].rule
        if text := call.wrong(program, answer.launches):
            return text
        rival = incumbent or addition("incumbent", honest(), call.count)
        result = runner.time([replace(rival, candidate="incumbent"), program], call.given, TimingLimits())
        if result.violations:
            return result.violations[0].rule
        return call.wrong(program, result.launches)
    except ProgramFault as fault:
        if fault.candidate != program.candidate:
            return f"blamed {fault.candidate}"
        return str(fault.kind)
    except MachineCodeError as error:
        return f"refused: {error}"
