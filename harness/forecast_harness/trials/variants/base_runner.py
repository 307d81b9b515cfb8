"""The base kernel in a cell of its own: its results for arguments. Runs in the judge.

Tensors travel as their memory: one-dimensional, from the first element to the last, gaps of strided ones
included. The kernel wrote whatever changed in it, or around it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch

from forecast_autotune import frameworks
from forecast_autotune.records import Argument, Config
from forecast_autotune.variants.constants import encode_constant
from forecast_autotune.variants.signature import memory_span
from forecast_harness.sandbox.api import CandidateFault, Cell, Fault, JobContext, TensorBytes
from forecast_harness.sandbox.jobs import TensorArrays
from forecast_harness.trials.variants.compilation import CELL_ENTRY as COMPILE_ENTRY
from forecast_harness.trials.variants.files import BASE_FILE, READ_ENTRY, WRITE_ENTRY
from forecast_harness.verify.answers import check_answer
from forecast_harness.verify.blocks import build_arena, changed_bytes
from forecast_harness.verify.launcher import CELL_ENTRIES
from forecast_harness.verify.tolerance import results_agree

_TRAILING_CANARY_BYTES = 1 << 16, 1 << 20
"""Bytes of canary behind the last tensor, at least and at most: a read past its end should not reach memory
that never changes."""
_CELL_WALL_S = {"cpu": 90.0, "cuda": 600.0}
"""Most seconds of a cell's life. A base kernel that is tried on arguments it was not made for may write
anywhere in its own process, and hang."""

TensorMemory = Mapping[str, torch.Tensor]
"""Tensor argument -> its memory, one-dimensional."""


class BaseKernelError(Exception):
    """The base kernel did not accept arguments; the text says what happened."""

    def __init__(self, text: str, *, of_config: bool = True) -> None:
        """`of_config`: whether another config may run where this one failed."""
        super().__init__(text)
        self.of_config = of_config


_CONFIG_ERRORS = (
    "OutOfResources",
    "CompilationError",
    "CompileTimeAssertionFailure",
    "PTXASError",
    "RecordError",
)
"""The last one says that the call's own grid is not known for a config's meta-parameters."""


def is_config_error(error: BaseException | None) -> TypeGuard[CandidateFault]:
    """Whether this is a config's failure, without its source being wrong: tuning will find it a failed candidate."""
    if not isinstance(error, CandidateFault) or error.fault is not Fault.EXCEPTION:
        return False
    # An interpreter wraps errors; a static assertion is one of Python's there.
    names = (*_CONFIG_ERRORS, "AssertionError") if error.kind == "InterpreterError" else ()
    return error.kind in _CONFIG_ERRORS or any(name in error.detail for name in names)


@dataclass(frozen=True)
class BaseKernelRun:
    """The effects of one launch of the base kernel."""

    memory: TensorMemory
    """All tensors afterwards."""
    changed: tuple[str, ...]
    stray: int
    """Bytes that changed outside of all tensors."""
    seconds: float
    """Seconds from question to answer."""


class BaseKernelRunner:
    """A cell that launches the base kernel; replaced when a launch takes it down."""

    def __init__(
        self,
        work: JobContext,
        device: str,
        rng: random.Random,
        binaries: TensorArrays | None = None,
    ) -> None:
        """`binaries`: files of earlier compilations, as `binaries_as_arrays` gives them."""
        self._binaries = binaries or {}
        self._work, self._device, self._rng = work, device, rng
        self._cell: Cell | None = None
        self._opened_at = 0.0
        self._noise = self._compiles = False
        self.unable: dict[Hashable, BaseKernelError] = {}
        """Failures by config, and by the part of a call that decides how it is compiled."""
        self._limits = replace(work.limits, wall_s=min(work.limits.wall_s, _CELL_WALL_S[device]))

    def open(self) -> None:
        """Open the cell, and the device in it; a fault shows at its first question."""
        try:
            self._open()
        except CandidateFault:
            self.close()

    def close(self) -> None:
        """End the cell."""
        if self._cell is not None:
            self._cell.close()
        self._cell = None

    def run(
        self,
        arguments: Sequence[Argument],
        scalars: Mapping[str, Any],
        memory: TensorMemory,
        grid: Sequence[int],
        config: Config,
    ) -> BaseKernelRun:
        """Launch once, in a random order, between random numbers and between NaN in turns: a read beyond
        a tensor's end must not give the same twice. Raises `BaseKernelError`."""
        memory = dict(self._rng.sample(sorted(memory.items(), key=lambda pair: pair[0]), len(memory)))
        layouts = {a.name: "offset" for a in arguments if a.kind == "tensor" and not a.aligned}
        self._noise = not self._noise
        arena = build_arena(
            memory,
            {},
            layouts,
            self._rng,
            shift=self._rng.randrange(0, 32),
            behind=min(
                max(_TRAILING_CANARY_BYTES[0], memory_bytes(memory)),
                _TRAILING_CANARY_BYTES[1],
            ),
            noise=self._noise,
        )
        payload = {
            "slots": [s.to_json() for s in arena.slots],
            "call": call_arguments(arguments, scalars, grid, config),
            "output_bytes": 0,
            "watch": "",
            "protocol": "",
        }
        try:
            cell = self._open()
            answer = cell.ask(
                f"{CELL_ENTRIES}:launch",
                payload,
                {"block": TensorBytes("uint8", (arena.block.numel(),), arena.data())},
            )
            check_answer("launch", answer, block_bytes=arena.block.numel())
            self._compiles |= bool(answer.value.get("compiled"))
        except CandidateFault as fault:
            if fault.fault is not Fault.EXCEPTION or "CUDA" in fault.detail:
                self.close()  # all later launches of a process fail after an illegal address in one
            raise BaseKernelError(fault.detail, of_config=is_config_error(fault)) from fault
        data = answer.arrays["block"].data
        names, stray = changed_bytes(arena, data)
        block = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return BaseKernelRun(
            {s.name: s.view(block) for s in arena.slots}, tuple(names), stray, answer.seconds
        )

    def compile_ahead(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Compile for these calls, as `compile_calls` takes them, side by side. An interpreter compiles nothing.

        It saves time and decides nothing: what cannot be compiled fails when it is launched.
        """
        if self._device == "cpu" or not calls:
            return
        self._compiles = True
        try:
            self._open().ask(COMPILE_ENTRY, {"calls": [dict(call) for call in calls]})
        except CandidateFault:
            self.close()

    def compiled(self) -> TensorArrays:
        """The files of all binaries that this cell compiled, see `BaseBinaries`."""
        if self._device == "cpu":
            return {}
        try:
            return self._open().ask(READ_ENTRY, {}).arrays
        except CandidateFault:
            self.close()
            return {}

    def newly_compiled(self) -> TensorArrays:
        """The files of binaries that are new here, for verifications to come, which may need them, too."""
        if self._cell is None or not self._compiles:
            return {}
        return {name: array for name, array in self.compiled().items() if name not in self._binaries}

    def _open(self) -> Cell:
        if self._cell is not None and time.monotonic() - self._opened_at > self._limits.wall_s / 2:
            self.close()
        if self._cell is None:
            self._cell, self._opened_at = self._work.cell(self._limits), time.monotonic()
            if self._binaries:
                self._cell.ask(WRITE_ENTRY, {}, self._binaries)
            self._cell.ask(
                f"{CELL_ENTRIES}:prepare",
                {
                    "file": BASE_FILE,
                    "entry": "run",
                    "language": "triton",
                    "format": "own",
                    "device": self._device,
                    "timed": False,
                },
            )
        return self._cell


def call_arguments(
    arguments: Sequence[Argument], scalars: Mapping[str, Any], grid: Sequence[int] | None, config: Config
) -> dict[str, Any]:
    """The arguments of `run` in a cell as `decode_arguments` reads them."""
    tensors = [a for a in arguments if a.kind == "tensor"]
    views = {a.name: [list(a.shape), list(a.stride), dict(a.extra)] for a in tensors}
    options = {n: v for n, v in config.parameters().items() if n not in dict(config.kwargs)}
    kwargs: dict[str, Any] = {
        "_views": {"v": views},
        "_grid": {"v": None if grid is None else list(grid)},
        "_meta": {"v": dict(config.kwargs)},
        "_options": {"v": options},
    }
    values: dict[str, Any] = dict.fromkeys(a.name for a in arguments)  # members of a tuple keep their order
    constants = encode_scalars(scalars).items()
    values |= {name: {"c" if isinstance(value, dict) else "v": value} for name, value in constants}
    values |= {name: {"t": name} for name in views}
    return {"args": [], "kwargs": kwargs | {n: value for n, value in values.items() if value is not None}}


def call_to_compile(
    arguments: Sequence[Argument], scalars: Mapping[str, Any], grid: Sequence[int] | None, config: Config
) -> dict[str, Any]:
    """A call as `compile_calls` takes it."""
    tensors = {a.name: [a.dtype, memory_span(a), int(not a.aligned)] for a in arguments if a.kind == "tensor"}
    return {"tensors": tensors, "call": call_arguments(arguments, scalars, grid, config)}


def encode_scalars(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that are no tensors as JSON; see `encode_constant`, as which it raises."""

    def module_of(function: Any) -> str:
        return frameworks.triton().standalone_source(function)

    return {n: v if isinstance(v, dict) else encode_constant(v, module_of) for n, v in scalars.items()}


def tensor_view(memory: torch.Tensor, argument: Argument) -> torch.Tensor:
    """A tensor as the kernel sees it."""
    return memory.as_strided(argument.shape, argument.stride)


def gap_mask(argument: Argument) -> torch.Tensor:
    """A mask of the elements of its memory that belong to no element of a tensor, [span]."""
    free = torch.ones(memory_span(argument), dtype=torch.bool)
    if free.numel():
        tensor_view(free, argument).fill_(False)
    return free


def surroundings_dependence(
    first: BaseKernelRun, second: BaseKernelRun, writes: Iterable[str], device: str
) -> str:
    """Why two launches of the base, equal but for what surrounds the tensors, show that it does not accept
    these arguments; empty if it does."""
    if first.stray or second.stray:
        return f"{first.stray or second.stray} bytes outside of its tensors change"
    for name in writes:
        a, b = first.memory[name], second.memory[name]
        # An interpreter adds in one order: there, other bits come from reading elsewhere.
        if not torch.equal(raw_bits(a), raw_bits(b)) and (device == "cpu" or not results_agree(a, b)):
            return f"{name} depends on what lies around the tensors"
    return ""


def has_nonfinite(arguments: Sequence[Argument], run: BaseKernelRun) -> bool:
    """Whether there is more in the written tensors than finite numbers."""
    outputs = [tensor_view(run.memory[a.name], a) for a in arguments if a.name in run.changed]
    wide = (t.float() if t.element_size() == 1 else t for t in outputs if t.is_floating_point())
    return any(not bool(t.isfinite().all()) for t in wide)


def memory_bytes(memory: TensorMemory) -> int:
    """The bytes of all tensors together."""
    return sum(t.nbytes for t in memory.values())


_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw_bits(value: torch.Tensor) -> torch.Tensor:
    """The bits of each element: whole numbers, [elements], or bytes, [elements, bytes], of types that are wider."""
    kind = _WHOLE_NUMBERS.get(value.element_size())
    flat = value.contiguous()
    return flat.view(torch.uint8).reshape(len(value), -1) if kind is None else flat.view(kind)
