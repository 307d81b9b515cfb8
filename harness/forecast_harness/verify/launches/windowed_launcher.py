"""Launches of code on a host, of which nothing but the judge's own clock and memory is believed.

A cell and its judge share memory. While all of the cell's processes are stopped, the judge writes a launch's
whole block into it; then it looks at its clock, resumes the cell and asks. The cell's answer ends the window:
everything in the cell is stopped, the judge looks at its clock again, and reads block and outputs itself, from
memory in which nobody can write. So whatever runs in the cell, it has its inputs for as long as it is timed,
and what counts as its outputs is what lay there when its time was up.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from forecast_harness.packs.schema import Language, PackFormat
from forecast_harness.sandbox.cell import CandidateFault
from forecast_harness.sandbox.jobs import CellAnswer, Fault, TensorBytes
from forecast_harness.sandbox.shared_memory import SharedMemory
from forecast_harness.timing.device import EVENTS_PROTOCOL
from forecast_harness.verify.cost_control import PhaseTimer
from forecast_harness.verify.launches.answers import check_answer
from forecast_harness.verify.launches.arena import Arena, aligned_size
from forecast_harness.verify.launches.launcher import (
    CELL_ENTRIES,
    CellClient,
    Launcher,
    LaunchResult,
    launch_payload,
    malformed_answers_as_forgery,
)
from forecast_harness.verify.problems.problem import LaunchCase
from forecast_harness.verify.verdict import Reason

_LEAST_BLOCK_BYTES, _LEAST_AREA_BYTES = 16 << 20, 32 << 20
"""Room for blocks and for outputs that is shared at first; memory is taken where it is written alone."""
_SPAN_FACTOR, _SPAN_SLACK = 4, 1 << 16
"""How much larger than its size an output may be, gaps included."""
_UNSET = 255


@runtime_checkable
class WindowedCell(Protocol):
    """A cell that can be stopped, and asked within a window; see `sandbox.Cell`."""

    def ask(
        self,
        entry: str,
        payload: Mapping[str, Any],
        arrays: Mapping[str, TensorBytes],
        *,
        descriptor: int | None = None,
    ) -> CellAnswer:
        """Ask while all of its processes run."""

    def ask_in_window(self, entry: str, payload: Mapping[str, Any]) -> CellAnswer:
        """Resume it, ask, and stop it; the answer's `seconds` are all in between."""

    def freeze(self) -> None:
        """Stop all of its processes."""

    def thaw(self) -> None:
        """Resume them."""


class WindowedLauncher(Launcher):
    """Puts launches to one cell on a host, within windows."""

    windowed = True

    def __init__(
        self, cell: WindowedCell, kind: PackFormat, rng: random.Random, spent: PhaseTimer | None = None
    ) -> None:
        super().__init__(cell, kind, rng, "cpu", spent)
        self._stoppable = cell
        self._memory: SharedMemory | None = None
        self._bytes = np.empty(0, dtype=np.uint8)
        self._area = 0
        """Where outputs begin in the shared memory."""
        self._written = 0
        """Bytes of outputs that the launch before may have left there."""
        self._latest: tuple[LaunchResult, CellAnswer, Arena] | None = None

    def prepare(self, file: str, entry: str, language: Language) -> list[Reason]:
        """Have the candidate imported; reasons to go no further. An empty `file`: none is."""
        self._share(_LEAST_BLOCK_BYTES, _LEAST_AREA_BYTES)
        return super().prepare(file, entry, language)

    def launch(
        self, case: LaunchCase, *, shift: int = 0, watch: str = "", protocol: str = EVENTS_PROTOCOL
    ) -> LaunchResult:
        """One launch with new contents, all outputs read. Raises `RecordError` for more than can be judged."""
        self._must_fit(case)
        reply = self._launched(case, self._build(case, shift), watch, poison=True)
        self._fill(reply, stray=not watch)
        return reply

    def timed(self, case: LaunchCase, protocol: str = "") -> LaunchResult:
        """One launch of which nothing is read yet, unless what it returned is none of the asked."""
        self._must_fit(case)
        reply = self._launched(case, self._build(case), "", poison=False)
        with malformed_answers_as_forgery():
            odd = any("problem" in d or d["alias"] for d in reply.described)
        if odd and not case.outputs:
            self.read(reply)
        return reply

    def read(self, reply: LaunchResult) -> None:
        """Read the outputs of the latest launch, unless they are known, and whether it wrote elsewhere.

        Raises `ValueError` for an earlier launch: its outputs are gone.
        """
        if reply.outputs is not None:
            return
        if reply.number != self.trials or self._latest is None:
            raise ValueError(f"launch {reply.number} cannot be read after launch {self.trials}")
        self._fill(reply, stray=True)

    def changed_since(self, reply: LaunchResult) -> bool:
        """Whether the bytes of the latest launch, all of them read, are others by now."""
        assert reply.outputs is not None
        assert self._latest is not None
        _, _, arena = self._latest
        with self._phase_timer.phase("again"):
            answer = self._window(reply.case, arena, {"act": "again"})
        return self._raw(answer, arena) != reply.outputs.raw

    def place(self, case: LaunchCase) -> None:
        """Nothing: what is not yet timed is not shown."""

    def idle(self, case: LaunchCase, protocol: str = "") -> float:
        """Seconds of a window in which the candidate's cell launches nothing."""
        arena = self._build(case)
        with self._phase_timer.phase("idle"):
            self._lay(arena, case.output_bytes)
            return self._window(case, arena, {"act": "nothing"}).seconds

    def null_window(self, case: LaunchCase, returned: Sequence[Mapping[str, Any]]) -> float:
        """Seconds of a window of a launch that does nothing and returns tensors of these forms.

        To be asked of a cell that holds no candidate.
        """
        arena = self._build(case)
        forms = [{"dtype": d["dtype"], "shape": d["shape"]} for d in returned if "dtype" in d]
        self._lay(arena, case.output_bytes)
        return self._window(case, arena, {"act": "null", "null": forms}).seconds

    def _ask(
        self, question: str, payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes]
    ) -> tuple[CellAnswer, float]:
        """Ask while the cell runs: for what no clock counts, and nothing of a launch is told in."""
        self._stoppable.thaw()
        try:
            found = super()._ask(question, payload, arrays)
        except CandidateFault as fault:
            if fault.fault is Fault.EXCEPTION:  # after all others there is nothing left to stop
                self._stoppable.freeze()
            raise
        self._stoppable.freeze()
        return found

    def _launched(self, case: LaunchCase, arena: Arena, watch: str, *, poison: bool) -> LaunchResult:
        parameters: dict[str, Any] = {}
        arrays: dict[str, TensorBytes] = {}
        if self._add_parameters(case, parameters, arrays):
            self._ask("build", parameters, arrays)
        self._lay(arena, case.output_bytes)
        with self._phase_timer.phase("launch"):
            answer = self._window(case, arena, {"act": "launch", "watch": watch, "poison": poison})
        reply = self._reply(case, answer, answer.seconds)
        with malformed_answers_as_forgery():
            reply.described = answer.value["outputs"]
        self._latest = reply, answer, arena
        return reply

    def _window(self, case: LaunchCase, arena: Arena, about: Mapping[str, Any]) -> CellAnswer:
        room = 0 if self._memory is None else self._memory.size - self._area
        payload = {
            **launch_payload(case, arena, EVENTS_PROTOCOL),
            "size": arena.block.numel(),
            "area": self._area,
            "room": room,
            "watch": "",
            "poison": False,
            **about,
        }
        answer = self._stoppable.ask_in_window(f"{CELL_ENTRIES}:window", payload)
        check_answer("window", answer)
        return answer

    def _lay(self, arena: Arena, output_bytes: int) -> None:
        """Write the block, and spoil what outputs of earlier launches are left."""
        size, area = arena.block.numel(), _SPAN_FACTOR * output_bytes + _SPAN_SLACK
        if size > self._area or area > len(self._bytes) - self._area:
            self._share(max(2 * size, self._area), max(area, len(self._bytes) - self._area))
        self._bytes[:size] = arena.block.numpy()
        self._bytes[self._area : self._area + max(self._written, output_bytes)] = _UNSET
        self._written = output_bytes

    def _share(self, block: int, area: int) -> None:
        """Share memory with room for a block and for outputs, in place of what is shared."""
        block = aligned_size(block)
        memory = SharedMemory(block + aligned_size(area))
        self._stoppable.thaw()
        entry = f"{CELL_ENTRIES}:share"
        answer = self._stoppable.ask(entry, {"bytes": memory.size}, {}, descriptor=memory.fd)
        check_answer("share", answer)
        self._stoppable.freeze()
        memory.forget_descriptor()
        self._memory, self._area = memory, block
        self._bytes = np.frombuffer(memory.data, dtype=np.uint8)

    def _fill(self, reply: LaunchResult, *, stray: bool) -> None:
        """Read the outputs of the latest launch from the shared memory."""
        assert self._latest is not None
        _, answer, arena = self._latest
        with malformed_answers_as_forgery():
            raw = self._raw(answer, arena)
            arrays = {n: TensorBytes("uint8", (len(data),), data) for n, data in raw.items()}
            self._take(reply, CellAnswer(answer.value, arrays), arena, stray=stray)

    def _raw(self, answer: CellAnswer, arena: Arena) -> dict[str, bytearray]:
        """Copies of all bytes of the block and of the outputs, where the cell had to put them.

        Raises `ValueError` for outputs that do not fit into what is shared.
        """
        found = {"block": bytearray(self._bytes[: arena.block.numel()])}
        at = self._area
        for n, about in enumerate(answer.value["outputs"]):
            if "problem" in about:
                continue
            size = _span_bytes(about)
            if not 0 <= size <= len(self._bytes) - at:
                raise ValueError(f"output {n} spans {size!r:.40} bytes of {len(self._bytes) - at}")
            found[f"out{n}"] = bytearray(self._bytes[at : at + size])
            at += aligned_size(size)
        self._written = max(self._written, at - self._area)
        return found


def open_launcher(
    cell: CellClient, kind: PackFormat, rng: random.Random, device: str, spent: PhaseTimer
) -> Launcher:
    """What puts launches to a cell on this device."""
    if device == "cpu" and isinstance(cell, WindowedCell):
        return WindowedLauncher(cell, kind, rng, spent)
    return Launcher(cell, kind, rng, device, spent)


def _span_bytes(about: Mapping[str, Any]) -> int:
    """Bytes from the first to the last element of a tensor that is described so."""
    shape, stride = about["shape"], about["stride"]
    width = int(getattr(torch, about["dtype"]).itemsize)
    if any(type(n) is not int or n < 0 for n in (*shape, *stride)):
        raise ValueError("sizes and strides are numbers from 0 on")
    if math.prod(shape) == 0:
        return 0
    last: int = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return width * (1 + last)
