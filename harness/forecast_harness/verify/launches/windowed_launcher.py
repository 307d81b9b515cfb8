"""Launches of code on a host, of which nothing but the judge's own clock and memory is believed.

A cell and its judge share memory. While all of the cell's processes are stopped, the judge writes a launch's
whole block into it; then it looks at its clock, resumes the cell and asks. The cell's answer ends the window:
everything in the cell is stopped, the judge looks at its clock again, and reads the block, and the outputs out
of the memory of the stopped process. So whatever runs in the cell, it has its inputs for as long as it is
timed, and what counts as its outputs is what lay there when its time was up.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from forecast_autotune.variants.signature import span_of
from forecast_harness.clocks.devices import EVENTS_PROTOCOL
from forecast_harness.sandbox.cell import CandidateFault
from forecast_harness.sandbox.jobs import CellAnswer, Fault, TensorBytes
from forecast_harness.sandbox.wire import SharedMemory
from forecast_harness.targets.packs.schema import Language, PackFormat
from forecast_harness.verify.cost_control import PhaseTimer
from forecast_harness.verify.launches.answers import check_answer, malformed_answers_as_forgery
from forecast_harness.verify.launches.arena import Arena, aligned_size
from forecast_harness.verify.launches.launcher import (
    CELL_ENTRIES,
    CellClient,
    DescriptorCell,
    Launcher,
    LaunchResult,
    launch_payload,
)
from forecast_harness.verify.launches.outputs import process_findings
from forecast_harness.verify.problems.problem import LaunchCase
from forecast_harness.verify.verdict import Reason

_LEAST_BLOCK_BYTES = 16 << 20
"""Room for blocks that is shared at first; memory is taken where it is written alone."""
_SPAN_FACTOR, _SPAN_SLACK = 4, 1 << 16
"""How much larger than its size an output may be, gaps included."""
_REPORT_SHARE = 0.05
"""Share of timed launches after which the cell is asked what it notices about its process."""


@runtime_checkable
class WindowedCell(DescriptorCell, Protocol):
    """A cell that can be stopped, and asked within a window; see `sandbox.cell.Cell`."""

    def ask_in_window(self, entry: str, payload: Mapping[str, Any]) -> CellAnswer:
        """Resume it, ask, and stop it; the answer's `seconds` are all in between."""

    def share(self, descriptor: int, size: int) -> None:
        """Let its first process map memory for `copy_out`."""

    def copy_out(self, places: Sequence[tuple[int, int, int]]) -> int:
        """Copy what it holds at (address, bytes) to (offset) in that memory; how many it does not hold."""


class WindowedLauncher(Launcher):
    """Puts launches to one cell on a host, within windows."""

    windowed = True

    def __init__(
        self, cell: WindowedCell, kind: PackFormat, rng: random.Random, spent: PhaseTimer | None = None
    ) -> None:
        super().__init__(cell, kind, rng, "cpu", spent)
        self._stoppable = cell
        self._block = SharedMemory(_LEAST_BLOCK_BYTES)
        self._copied = SharedMemory(_SPAN_SLACK)
        """Where outputs are copied to; the cell's other processes do not see it."""
        self._forms: dict[str, bool] = {}
        """Questions of earlier windows, and whether the cell was armed with them."""
        self._latest: tuple[LaunchResult, CellAnswer, Arena] | None = None

    def prepare(self, file: str, entry: str, language: Language) -> list[Reason]:
        """Have the candidate imported; reasons to go no further. An empty `file`: none is."""
        self._share_block(self._block)
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
        noticed = self._notice()
        reply = self._launched(case, self._build(case), "", poison=False)
        reply.reasons += noticed
        with malformed_answers_as_forgery():
            odd = any("problem" in d or d["alias"] for d in reply.described)
        if odd and not case.outputs:
            self.read(reply)
        return reply

    def _notice(self) -> list[Reason]:
        """What the cell notices about its process: asked before a few launches, after which nothing may run."""
        if self._rng.random() >= _REPORT_SHARE:
            return []
        answer, _ = self._ask("report", {}, {})
        return process_findings(answer.value, f"before launch {self.trials + 1}")

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
            answer = self._window(self._form(reply.case, arena), {"act": "again"})
        with malformed_answers_as_forgery():
            return self._raw(answer, arena) != reply.outputs.raw

    def place(self, case: LaunchCase) -> None:
        """Nothing: what is not yet timed is not shown."""

    def idle(self, case: LaunchCase, protocol: str = "") -> float:
        """Seconds of a window in which the candidate's cell launches nothing."""
        arena = self._build(case)
        with self._phase_timer.phase("idle"):
            form = self._form(case, arena)
            self._lay(arena)
            return self._window(form, {"act": "nothing"}).seconds

    def null_window(self, case: LaunchCase, returned: Sequence[Mapping[str, Any]]) -> float:
        """Seconds of a window of a launch that does nothing and returns tensors of these forms.

        To be asked of a cell that holds no candidate.
        """
        arena = self._build(case)
        forms = [{"dtype": d["dtype"], "shape": d["shape"]} for d in returned if "dtype" in d]
        form = self._form(case, arena)
        self._lay(arena)
        return self._window(form, {"act": "null", "null": forms, "report": False}).seconds

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
        form = self._form(case, arena)
        self._lay(arena)  # from here on the cell runs within its window alone
        about = {"act": "launch", "watch": watch, "poison": poison, "report": poison}
        with self._phase_timer.phase("launch"):
            answer = self._window(form, about)
        reply = self._reply(case, answer, answer.seconds)
        with malformed_answers_as_forgery():
            reply.described = answer.value["outputs"]
        self._latest = reply, answer, arena
        return reply

    def _window(self, form: Mapping[str, Any], about: Mapping[str, Any]) -> CellAnswer:
        rest = {"watch": "", "poison": False, "report": True, **about}
        answer = self._stoppable.ask_in_window(f"{CELL_ENTRIES}:window", {**form, **rest})
        check_answer("window", answer)
        return answer

    def _form(self, case: LaunchCase, arena: Arena) -> Mapping[str, Any]:
        """What a window is about, but for contents, or only its name where the cell knows it.

        What is read in a window costs time there; but a form is told outside of windows only when it is met
        again, so that nothing new is: it may hold numbers. To be asked for before a block is written.
        """
        form = {**launch_payload(case, arena, EVENTS_PROTOCOL), "size": arena.block.numel()}
        name = hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()[:12]
        if name not in self._forms:
            self._forms[name] = False
            return form
        if not self._forms[name]:
            self._ask("arm", {**form, "form": name}, {})
            self._forms[name] = True
        return {"form": name}

    def _lay(self, arena: Arena) -> None:
        """Write the block into the shared memory."""
        size = arena.block.numel()
        if size > self._block.size:
            self._block = SharedMemory(aligned_size(2 * size))
            self._share_block(self._block)
        np.frombuffer(self._block.data, dtype=np.uint8)[:size] = arena.block.numpy()

    def _share_block(self, memory: SharedMemory) -> None:
        self._stoppable.thaw()
        entry = f"{CELL_ENTRIES}:share"
        answer = self._stoppable.ask(entry, {"bytes": memory.size}, {}, descriptor=memory.fd)
        check_answer("share", answer)
        self._stoppable.freeze()
        memory.forget_descriptor()

    def _fill(self, reply: LaunchResult, *, stray: bool) -> None:
        """Read the outputs of the latest launch out of the stopped cell."""
        assert self._latest is not None
        _, answer, arena = self._latest
        with malformed_answers_as_forgery():
            raw = self._raw(answer, arena)
            arrays = {n: TensorBytes("uint8", (len(data),), data) for n, data in raw.items()}
            self._take(reply, CellAnswer(answer.value, arrays), arena, stray=stray)

    def _raw(self, answer: CellAnswer, arena: Arena) -> dict[str, bytearray]:
        """Copies of all bytes of the block and of the outputs.

        Raises `ValueError` for outputs that are not where, or larger than, an answer may say.
        """
        found = {"block": bytearray(self._block.data[: arena.block.numel()])}
        spans = {n: _span_bytes(d) for n, d in enumerate(answer.value["outputs"]) if "problem" not in d}
        assert self._latest is not None
        most = _SPAN_FACTOR * self._latest[0].case.output_bytes + _SPAN_SLACK
        total = sum(aligned_size(size) for size in spans.values())
        if total > max(1, len(spans)) * most:
            raise ValueError(f"outputs span {total} bytes")
        if total > self._copied.size or self._copied.fd >= 0:
            if total > self._copied.size:
                self._copied = SharedMemory(aligned_size(2 * total))
            self._stoppable.share(self._copied.fd, self._copied.size)
            self._copied.forget_descriptor()
        at, places = 0, []
        for size, address in zip(spans.values(), answer.value["places"], strict=True):
            places.append((address, size, at))
            at += aligned_size(size)
        if missing := self._stoppable.copy_out(places):
            raise ValueError(f"{missing} outputs are not where they are said to be")
        for (n, size), (_, _, offset) in zip(spans.items(), places, strict=True):
            found[f"out{n}"] = bytearray(self._copied.data[offset : offset + size])
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
    return width * span_of(shape, stride)
