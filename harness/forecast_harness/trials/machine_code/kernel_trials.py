"""Launches of a kernel and its variants on recorded calls; the base kernel's results are right."""

from __future__ import annotations

import math
import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forecast_autotune.records import Config
from forecast_harness.clocks.compilation.workers import (
    BuildRequest,
    BuildResult,
    CallCase,
    CompileWorkers,
    TensorArgument,
)
from forecast_harness.clocks.records import MachineCodeError, Program
from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.clocks.runner.messages import (
    BufferContents,
    ElementKind,
    ObservedLaunch,
    ProgramFault,
    ProgramInputs,
    RunnerFaultKind,
)
from forecast_harness.clocks.times import impossible_time
from forecast_harness.records import Node, NodeJob, SearchTarget
from forecast_harness.sandbox.jobs import tensor_to_bytes
from forecast_harness.targets.kernels.base_kernel import BaseKernel
from forecast_harness.targets.search_target import configs_for, decided_config, subjects_of
from forecast_harness.trials.configs.source_configs import work_of_a_warp
from forecast_harness.trials.configs.variant_tracing import TRACE_LIMITS, Timing, VariantTracer
from forecast_harness.trials.kernel_calls import TimedCall, error_limits
from forecast_harness.trials.kernel_cell import HOST_PERIOD, fill_tensor
from forecast_harness.trials.machine_code.targets import (
    TargetTrials,
    TrialCalls,
    TrialConfig,
    violation_reason,
)
from forecast_harness.verify.plan import VerificationPlan

_MOST_INPUT_BYTES = 4 << 30
"""The most bytes of one call's inputs: larger ones are judged as host code, which makes them on the device."""
_NO_ROOM = re.compile("OutOfResources|PTXASError")
_OTHER_FAILURES = 3
"""Configs of the base kernel that fail for another reason than room, after which no other one is tried."""


@dataclass
class BaseResultCall:
    """One call of a kernel, on values that every candidate gets; the runner has the right results."""

    timed_call: TimedCall
    arguments: CallCase
    given: ProgramInputs
    """The inputs, with the buffers that the base kernel writes, once these are known."""
    kinds: Mapping[str, ElementKind]
    """The kind of every buffer."""

    @property
    def size(self) -> int:
        """Bytes of all its tensors."""
        return sum(contents.size for contents in self.given.inputs.values())

    @property
    def written_bytes(self) -> int:
        """The bytes of the buffers that the base kernel writes."""
        return sum(self.given.inputs[name].size for name in self.given.updates)

    def wrong(self, program: Program, launches: Sequence[ObservedLaunch]) -> str:
        """Describe the fault in these results; '' for none. Raises `MachineCodeError` where nothing was compared.

        See `error_limits`.
        """
        dtypes = {name: kind.dtype for name, kind in self.kinds.items()}
        limits = error_limits(dtypes, self.timed_call.subject.source)
        for launch in launches:
            if any(launch.rotation.values()):  # right results for rotated inputs are not known
                continue
            if missing := set(self.given.updates) - set(launch.errors):
                raise MachineCodeError(f"the runner has not compared {', '.join(sorted(missing))}")
            for name in self.given.updates:
                if (error := launch.errors[name]) > limits[name]:
                    return f"wrong values: {name} differs by {error:.3g} of the base kernel's largest value"
        return ""


class KernelTrials(TargetTrials):
    """`TargetTrials` of a kernel in a user's file."""

    language = "triton"

    def __init__(self, target: SearchTarget, plan: VerificationPlan, folder: Path) -> None:
        """Draws the calls; `learn_results` comes before any other method.

        `folder` is for scratch files. Raises `MachineCodeError` where calls cannot be made.
        """
        self._target, self._plan = target, plan
        self._timed_calls = {str(n): kernel_call(subject) for n, subject in enumerate(subjects_of(target))}
        self._small = min(self._timed_calls.values(), key=lambda call: call.size)
        self.calls = TrialCalls(self._small, self._timed_calls)
        self.base_build: tuple[TrialConfig, BuildResult] | None = None
        """A config in which the base kernel runs, and its build."""
        self._tracer, self._tracing = VariantTracer(target, folder), threading.Lock()
        self._to_learn: deque[tuple[str, Mapping[Config, Timing]]] = deque()
        """Timings since the last forecast: a verdict does not wait until others' configs are chosen."""

    def learn_results(self, runner: RunnerClient, builder: CompileWorkers) -> None:
        """Launch the base kernel at every call: the tensors that it changes are its results.

        Raises `MachineCodeError` where it does not run, and what the runner raises.
        """
        self._tracer.trace_in(lambda jobs: builder.run_jobs(jobs, TRACE_LIMITS), lambda: builder.idle)
        base, problem, others = subjects_of(self._target)[0], "it has no configs", 0
        # Its forecasts are asked for next.
        threading.Thread(target=self._tracer.prepare_source, args=(base.source,), daemon=True).start()
        for config in self._base_configs(base):
            build = builder.submit(self._request("base", base.source, config)).result()
            if not build.programs:
                problem = build.error or build.host_code or build.infrastructure
                others += not _NO_ROOM.search(build.error)
                if build.error and others < _OTHER_FAILURES:
                    continue
                break
            try:
                self._learn(runner, build.programs[1:])
            except ProgramFault as fault:
                if fault.kind is not RunnerFaultKind.REFUSED:
                    raise
                problem = fault.detail  # the device has less than it asks for
                continue
            self.base_build = config.to_json(), build
            # No launch that is timed is to find the inputs of another one.
            calls = {
                n: replace(c, given=replace(c.given, rotate=_rotatable(c)))
                for n, c in self._timed_calls.items()
            }
            self.calls = TrialCalls(self._small, calls)
            return
        raise MachineCodeError(f"the base kernel cannot be launched as machine code: {problem}")

    def configs(self, job: NodeJob, check: Callable[[], None] = lambda: None) -> Sequence[TrialConfig]:
        """The config that suits the rival's, the best that are forecast, and one more; of the base kernel itself
        the one that the store has decided on, where it has."""
        source = job.node.source
        able = configs_for(self._target, source)
        beside = Config.from_json(job.against_config) if job.against_config else None
        base = self.base_build[0] if self.base_build and job.node.id == job.against.id else None
        if base and (stored := decided_config(self._target, source)) in able and stored.to_json() == base:
            return [base]
        most = max(1, job.trials)
        if len(able) > most:
            check()
            # Several threads may do so at a time.
            self._tracer.prepare_source(source, rival=job.against.source, beside=beside)
        with self._tracing:  # for which many nodes may wait
            check()
            while self._to_learn:
                self._tracer.learn(*self._to_learn.popleft())
            candidates = self._tracer.best_configs(source, able, most, beside)
        results = [c.to_json() for c in candidates]
        # Others of the base may not fit, and every other source is timed beside its first.
        return [base, *(c for c in results if c != base)][:most] if base else results

    def request(self, node: Node, config: TrialConfig) -> BuildRequest:
        """The request to compile a variant: for the checked call, then for the timed ones."""
        own_config = Config.from_json(config) if config else configs_for(self._target, node.source)[0]
        return self._request(node.id, node.source, own_config)

    def sealed(self, program: Program) -> Program:
        """The program with its results in the buffers that the base kernel writes, whatever its cell says."""
        return replace(program, plan=replace(program.plan, returned=()))

    def implausible(self, workload: str, seconds: float) -> str:
        """Why one launch of a call cannot have taken so few seconds: it has to write its results at least."""
        size = self._timed_calls[workload].written_bytes
        return impossible_time(seconds, size if self._plan.device != "cpu" else 0, 0, self._plan.peaks)

    def learn(
        self, job: NodeJob, timed: Sequence[tuple[TrialConfig, Sequence[float]]], rival: Sequence[float]
    ) -> None:
        """Have later choices heed these timings."""
        if job.against_config:
            self._to_learn.append((job.against.source, {Config.from_json(job.against_config): list(rival)}))
        self._to_learn.append((job.node.source, {Config.from_json(c): list(s) for c, s in timed}))

    def close(self) -> None:
        """End the sandbox of forecasts."""
        with self._tracing:
            self._tracer.close()

    def _request(self, name: str, source: str, config: Config) -> BuildRequest:
        calls = [self._small, *self._timed_calls.values()]
        launches = [c.timed_call.launch(source, config) for c in calls]
        return BuildRequest(
            name,
            source,
            self._target.entry,
            tuple(c.arguments for c in calls),
            launches=tuple(launches),
        )

    def _learn(self, runner: RunnerClient, programs: Sequence[Program]) -> None:
        """Learn the base kernel's results at each call, the smallest first: that one shows which tensors it writes."""
        program_of = dict(zip(self._timed_calls, programs, strict=True))
        writes: tuple[str, ...] = ()
        for number in sorted(self._timed_calls, key=lambda n: self._timed_calls[n] is not self._small):
            call = self._timed_calls[number]
            names, violations = runner.learn(
                self.sealed(program_of[number]), replace(call.given, updates=writes), call.kinds
            )
            if problem := violation_reason(violations):
                raise MachineCodeError(f"the base kernel, at one of its calls: {problem.detail}")
            if not names:
                raise MachineCodeError("the base kernel changes none of its tensors")
            call.given, writes = replace(call.given, updates=names), names

    def _base_configs(self, base: BaseKernel) -> list[Config]:
        """The stored config and the first one, then others by how likely they are to fit."""
        stored, configs = decided_config(self._target, base.source), configs_for(self._target, base.source)
        first = [*([stored] if stored else []), *configs[:1]]
        return list(dict.fromkeys([*first, *sorted(configs, key=work_of_a_warp)]))


def kernel_call(subject: BaseKernel) -> BaseResultCall:
    """A subject's call at its real sizes, with values. Raises `MachineCodeError`, `RecordError`."""
    timed_call = TimedCall.of(subject)
    description = timed_call.to_payload()
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    tensors: dict[str, TensorArgument] = {}
    inputs: dict[str, BufferContents] = {}
    kinds: dict[str, ElementKind] = {}
    if any(tensor["extra"] for tensor in description["tensors"]):
        raise MachineCodeError(
            "tensor descriptors and addresses that a caller makes take the way of host code"
        )
    total = sum(int(t["span"]) * getattr(torch, t["dtype"]).itemsize for t in description["tensors"])
    if total > _MOST_INPUT_BYTES:
        raise MachineCodeError(f"a call takes {total} bytes of tensors; at most {_MOST_INPUT_BYTES} are sent")
    for tensor in description["tensors"]:
        name, late = str(tensor["name"]), int(tensor["late"])
        if math.prod(tensor["shape"]) == 0:
            raise MachineCodeError(f"{name} has no elements, so that nothing can be told from it")
        own = timed_call.drawn.memory[name] if description["given"] else None
        inputs[name] = _contents(tensor, late, description["least"], own, generator)
        tensors[name] = TensorArgument(tensor["dtype"], tuple(tensor["shape"]), tuple(tensor["stride"]), late)
        kinds[name] = ElementKind(tensor["dtype"], late * getattr(torch, tensor["dtype"]).itemsize)
    program_inputs = ProgramInputs(secrets.token_hex(16), inputs)
    return BaseResultCall(timed_call, CallCase(tensors), program_inputs, kinds)


def _contents(
    tensor: Mapping[str, Any], late: int, least: int, own: torch.Tensor | None, generator: torch.Generator
) -> BufferContents:
    """Values of a tensor, after `late` elements: the user's `own`, zeros, or some that we draw."""
    dtype, count = getattr(torch, tensor["dtype"]), int(tensor["span"]) + late
    # One period of what we draw is enough.
    values = torch.zeros(count if own is not None else min(count, HOST_PERIOD), dtype=dtype)
    if own is not None:
        values[late:].copy_(own.reshape(-1))
    elif not tensor["zeroed"]:
        fill_tensor(values, least, generator)
    return BufferContents(bytes(tensor_to_bytes(values).data), count * values.element_size())


def _rotatable(call: BaseResultCall) -> dict[str, int]:
    """Bytes of an element, of tensors whose values we drew and mean the same in another order."""
    if call.timed_call.has_values:
        return {}
    results = {}
    for name, tensor in call.arguments.tensors.items():
        kind = getattr(torch, tensor.dtype)
        is_dense = math.prod(tensor.shape) == tensor.elements  # no gap, and nothing before its first element
        if kind.is_floating_point and is_dense and name not in call.given.updates:
            results[name] = kind.itemsize
    return results
