"""Launches as the judge asks for them: questions, answers, and findings that need no reference.

Small blocks travel with every question, and all bytes come back with the answer. Large ones lie in the cell
(see `ResidentBlock`): the judge sends changes of them, the answer has digests, and the judge decides afterwards
whether it reads the bytes, which must have these digests.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from forecast_autotune.errors import RecordError
from forecast_autotune.variants.signature import span_of
from forecast_harness.clocks.devices import EVENTS_PROTOCOL
from forecast_harness.sandbox.cell import CandidateFault, Cell
from forecast_harness.sandbox.jobs import BytesLike, CellAnswer, Fault, TensorBytes, tensor_to_bytes
from forecast_harness.sandbox.wire import SharedMemory
from forecast_harness.targets.packs.schema import Language, PackFormat
from forecast_harness.verify.answers import check_answer, malformed_answers_as_forgery
from forecast_harness.verify.blocks import (
    Arena,
    BlockHasher,
    Slot,
    aligned_size,
    build_arena,
    changed_bytes,
    complement_spans,
    digest_values,
    output_spans,
)
from forecast_harness.verify.cost_control import PhaseTimer
from forecast_harness.verify.inputs import ElementChange, integer_view
from forecast_harness.verify.plan import MAX_LAUNCH_BYTES, oversize_message
from forecast_harness.verify.problem import LaunchCase
from forecast_harness.verify.verdict import Reason, ReasonCode

CELL_ENTRIES = "forecast_harness.verify.launch_cell"
MAX_INLINE_BYTES = 1 << 20
"""Bytes of arguments and outputs up to which all of them travel with every launch."""
_SEED_BITS = 62
_BLOCK_CHECK_SHARE = 0.5
"""The share of the large launches whose outputs are read of which inputs and canaries are read, too."""


@dataclass
class LaunchTimes:
    """The seconds of one launch, by several clocks."""

    seconds: float
    """Seconds by the cell's clock."""
    total_seconds: float
    """The seconds of all launches between question and answer, by the cell's clock."""
    wall_seconds: float
    """Seconds from question to answer, by the judge's clock."""
    protocol: str
    """The cell's way of timing: `host`, or one of `DeviceTimer`'s."""

    @property
    def times(self) -> LaunchTimes:
        """The times alone, which are kept of hundreds of launches."""
        return LaunchTimes(self.seconds, self.total_seconds, self.wall_seconds, self.protocol)


@dataclass
class LaunchResult(LaunchTimes):
    """One launch as the judge sees it."""

    case: LaunchCase
    number: int
    """The launch's number, from 1."""
    reasons: list[Reason]
    compiled: int = 0
    """Kernels compiled during the launch."""
    operations: Mapping[str, int] = field(default_factory=dict)
    """The framework's operations, if they were watched: name -> most elements that one call touched."""
    outputs: LaunchOutputs | None = None
    """The outputs; None until they are read."""
    digests: list[int] = field(default_factory=list)
    """The digests of the block but for its outputs, then of each output, of the cell's first answer."""
    seed: int = 0
    """The seed of the outputs' digests."""
    described: Any = None
    """The descriptions of outputs in the cell's first answer."""

    @property
    def trial(self) -> str:
        """The launch's number and label, for reasons."""
        return f"{self.number}: {self.case.label}"

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The outputs. Raises `ValueError` before they are read."""
        if self.outputs is None:
            raise ValueError(f"launch {self.trial} has not been read")
        return self.outputs.tensors


class Launcher:
    """Puts launches to one cell."""

    def __init__(
        self,
        cell: Cell,
        kind: PackFormat,
        rng: random.Random,
        device: str,
        spent: PhaseTimer | None = None,
    ) -> None:
        """`spent` gets the seconds of building blocks, of launches, and of waiting for answers."""
        self._cell, self._format, self._rng, self._device = cell, kind, rng, device
        self._phase_timer = spent or PhaseTimer()
        self._language = Language.TORCH
        self._state: Mapping[str, torch.Tensor] | None = None
        self._has_module = False
        self._residents: dict[str, ResidentBlock] = {}
        self._pages = rng.getrandbits(_SEED_BITS)
        self.trials = 0

    windowed = False
    """Whether launches see their inputs only within the window that the judge times."""

    def prepare(self, file: str, entry: str, language: Language) -> list[Reason]:
        """Have the candidate imported; reasons to go no further."""
        self._language = language
        payload = {
            "file": file,
            "entry": entry,
            "language": str(language),
            "format": str(self._format),
            "device": self._device,
            "pages": self._pages,
        }
        answer, _ = self._ask("prepare", payload, {})
        with malformed_answers_as_forgery():
            return process_findings(answer.value, "import")

    def launch(
        self, case: LaunchCase, *, shift: int = 0, watch: str = "", protocol: str = EVENTS_PROTOCOL
    ) -> LaunchResult:
        """One launch with new contents; all outputs are read with the answer.

        `protocol` is how it is timed on a device; empty: as suits it. Raises `RecordError` for more bytes
        than can be judged.
        """
        self._must_fit(case)
        arena = self._build(case, shift)
        payload = {**launch_payload(case, arena, protocol), "watch": watch}
        reply, answer = self._ask_launch(case, payload, {"block": byte_array(arena.data())})
        with malformed_answers_as_forgery():
            self._take(reply, answer, arena, stray=not watch)
        return reply

    def timed(self, case: LaunchCase, protocol: str = "") -> LaunchResult:
        """One launch; if its case is large, only digests are read."""
        if not is_large(case):
            return self.launch(case, protocol=protocol)
        resident = self._resident(case)
        seed = self._rng.getrandbits(_SEED_BITS)
        payload = {**launch_payload(case, resident.arena, protocol), "watch": ""}
        reply, answer = self._ask_launch(case, {**payload, "held": resident.name, "seed": seed}, {})
        with malformed_answers_as_forgery():
            reply.described, reply.seed = answer.value["outputs"], seed
            reply.digests = [int(n) for n in answer.value["digests"]]
            is_untouched = reply.digests[0] == resident.digest
            odd = any("problem" in d or d["alias"] for d in reply.described) and not case.outputs
        if odd or not is_untouched:
            self.read(reply)
            if not is_untouched and not reply.reasons:
                text = "what the block held when the solution returned is not what it holds now"
                reply.reasons.append(Reason(ReasonCode.LATE_WRITE, text, reply.trial))
        return reply

    def read(self, reply: LaunchResult) -> None:
        """Read the outputs of the latest launch, unless they are known already.

        A coin says whether the block comes with them, where no output lies in it and its digest, which was
        told before, is right: it is large. Raises `ValueError` for an earlier launch: its outputs are gone.
        """
        if reply.outputs is not None:
            return
        if reply.number != self.trials:
            raise ValueError(f"launch {reply.number} cannot be read after launch {self.trials}")
        resident = self._residents[block_name(reply.case)]
        odd = bool(reply.case.outputs) or reply.digests[0] != resident.digest
        block = odd or self._rng.random() < _BLOCK_CHECK_SHARE
        answer, _ = self._ask("again", {"block": block}, {})
        with malformed_answers_as_forgery():
            self._take(reply, answer, resident.arena, stray=block)
            same = reply.described == answer.value["outputs"]
            if not same or reply.digests[1:] != resident.digests(answer.arrays, reply.seed):
                text = "an output changed after the solution had returned"
                reply.reasons.append(Reason(ReasonCode.LATE_WRITE, text, reply.trial))

    def changed_since(self, reply: LaunchResult) -> bool:
        """Whether the bytes of the latest launch, all of them read, are others by now."""
        assert reply.outputs is not None
        answer, _ = self._ask("again", {"block": True}, {})
        return {n: a.data for n, a in answer.arrays.items()} != reply.outputs.raw

    def place(self, case: LaunchCase) -> None:
        """Send a large case to the cell as it is now, so that its next launch need not wait for that."""
        self._resident(case)

    def idle(self, case: LaunchCase, protocol: str = "") -> float:
        """Seconds of a question of the same size that launches nothing.

        Call it where a launch would have been: a cell that was asked a moment ago answers sooner than one that
        has slept.
        """
        if is_large(case):
            resident = self._resident(case)
            seed = self._rng.getrandbits(_SEED_BITS)
            payload = {**launch_payload(case, resident.arena, protocol), "held": resident.name, "seed": seed}
            arrays: dict[str, TensorBytes] = {}
        else:
            arena = self._build(case)
            payload, arrays = launch_payload(case, arena, protocol), {"block": byte_array(arena.data())}
        return self._ask("idle", payload, arrays)[1]

    def _ask(
        self, question: str, payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes]
    ) -> tuple[CellAnswer, float]:
        """The answer, and the seconds until it came."""
        begin = time.perf_counter()
        try:
            answer = self._cell.ask(f"{CELL_ENTRIES}:{question}", payload, arrays)
        finally:
            seconds = time.perf_counter() - begin
            self._phase_timer.add(question, seconds)
        check_answer(question, answer)
        return answer, seconds

    def _build(self, case: LaunchCase, shift: int = 0) -> Arena:
        with self._phase_timer.phase("build"):
            return build_arena(case.tensors, case.outputs, case.layouts, self._rng, shift=shift)

    def _must_fit(self, case: LaunchCase) -> None:
        # The outputs of a foreign task are not known beforehand, and `output_bytes` a generous guess.
        size = case.input_bytes + (case.output_bytes if self._format is PackFormat.OWN else 0)
        if size > MAX_LAUNCH_BYTES:
            raise RecordError(oversize_message(case.label, size))

    def _ask_launch(
        self, case: LaunchCase, payload: dict[str, Any], arrays: dict[str, TensorBytes]
    ) -> tuple[LaunchResult, CellAnswer]:
        """Ask for a launch; the reply without its outputs."""
        self._add_parameters(case, payload, arrays)
        answer, outside = self._ask("launch", payload, arrays)
        return self._reply(case, answer, outside), answer

    def _add_parameters(
        self, case: LaunchCase, payload: dict[str, Any], arrays: dict[str, TensorBytes]
    ) -> bool:
        """Add a module's constructor arguments and parameters; returns whether there is anything to add."""
        if self._format is not PackFormat.KERNELBENCH or self._state is case.state:
            return False
        if not self._has_module:
            payload["init"] = case.call["init"]
            self._has_module = True
        arrays |= {f"state.{n}": tensor_to_bytes(t) for n, t in case.state.items()}
        self._state = case.state
        return True

    def _reply(self, case: LaunchCase, answer: CellAnswer, outside: float) -> LaunchResult:
        """The result in an answer about one more launch, but for its outputs."""
        self.trials += 1
        with malformed_answers_as_forgery():
            value = answer.value
            reply = LaunchResult(
                float(value["seconds"]),
                float(value["whole"]),
                outside,
                str(value["protocol"]),
                case,
                self.trials,
                [],
                int(value["compiled"]),
                {str(n): int(size) for n, size in value["operations"].items()},
            )
            self._phase_timer.add(
                "inside", max(0.0, min(reply.total_seconds, outside))
            )  # the cell's seconds may be any number
            if "harness" in value:
                reply.reasons += process_findings(value, reply.trial)
            shapes = [t.shape for t in case.outputs.values()]
            shapes = shapes or [d["shape"] for d in value["outputs"] if "shape" in d]
            idle = not int(value["kernels"]) and any(0 not in shape for shape in shapes)
            if self._language is Language.TRITON and idle:
                reply.reasons.append(
                    Reason(ReasonCode.NO_KERNEL, "it launches no Triton kernel", reply.trial)
                )
        return reply

    def _take(self, reply: LaunchResult, answer: CellAnswer, arena: Arena, *, stray: bool) -> None:
        """Fill in the outputs, and findings about them and the block."""
        reply.outputs, problem = read_outputs(answer, arena)
        reply.reasons += [Reason(code, text, reply.trial) for code, text in problem]
        if stray:
            result = stray_writes(arena, answer.arrays["block"].data)
            reply.reasons += [Reason(code, text, reply.trial) for code, text in result]

    def _resident(self, case: LaunchCase) -> ResidentBlock:
        """The block of this case, which the cell holds from now on. Raises `RecordError` if it is too large."""
        self._must_fit(case)
        name = block_name(case)
        with self._phase_timer.phase("build"):
            resident = self._residents.get(name)
            if resident is None or resident.case is not case or resident.is_outdated:
                resident = self._residents[name] = ResidentBlock(case, self._rng, self._pages)
            payload, arrays = resident.update() or ({}, {})
        if payload:
            self._ask("place", {"name": name, **payload}, arrays)
        return resident


def is_large(case: LaunchCase) -> bool:
    """Whether the case's bytes are not sent with every launch.

    Outputs with gaps between their elements always are: a digest would cover the gaps, which may change.
    """
    gapless = all(case.layouts.get(n) != "padded" for n in case.outputs)
    return gapless and case.input_bytes + case.output_bytes > MAX_INLINE_BYTES


def launch_payload(case: LaunchCase, arena: Arena, protocol: str) -> dict[str, Any]:
    """The payload of every question about a launch: the slots, the call, the way of timing."""
    slots = [s.to_json() for s in arena.slots]
    return {"slots": slots, "output_bytes": case.output_bytes, "protocol": protocol, "call": case.call}


OutputFinding = tuple[ReasonCode, str]


@dataclass(frozen=True)
class LaunchOutputs:
    """The outputs that a launch wrote or returned."""

    tensors: list[torch.Tensor]
    raw: Mapping[str, BytesLike]
    """All bytes of the answer, by the names of its arrays."""


def read_outputs(answer: CellAnswer, arena: Arena) -> tuple[LaunchOutputs, list[OutputFinding]]:
    """Tensors made of the answer's bytes, and findings about their form."""
    raw = {n: a.data for n, a in answer.arrays.items()}
    slots = [s for s in arena.slots if s.output]
    if slots:
        data = _tensor(raw["block"])
        return LaunchOutputs([s.view(data) for s in slots], raw), []
    outputs: list[torch.Tensor] = []
    findings: list[OutputFinding] = []
    for n, d in enumerate(answer.value["outputs"]):
        if "problem" in d:
            findings.append((ReasonCode.WRONG_STRUCTURE, str(d["problem"])))
            continue
        if d["alias"]:
            findings.append((ReasonCode.ALIASES_INPUT, f"output {n} lies in the memory of the inputs"))
        dtype = getattr(torch, d["dtype"])
        if not raw[f"out{n}"]:
            outputs.append(torch.empty(d["shape"], dtype=dtype))
            continue
        outputs.append(_tensor(raw[f"out{n}"]).view(dtype).as_strided(d["shape"], d["stride"]))
    return LaunchOutputs(outputs, raw), findings


def stray_writes(arena: Arena, after: BytesLike) -> list[OutputFinding]:
    """Writes where none may be: into inputs, or out of bounds."""
    was, now = arena.block.numpy(), np.frombuffer(after, dtype=np.uint8)
    dense = all(s.dense for s in arena.slots if s.output)
    # Checked first because it is cheap: the owner of each of a billion bytes matters only if one changed.
    spans = (
        complement_spans(output_spans(arena.slots), len(was))
        if dense and len(was) == len(now)
        else [(0, len(was))]
    )
    if all(np.array_equal(was[a:b], now[a:b]) for a, b in spans):
        return []
    inputs, stray = changed_bytes(arena, after)
    results = []
    if inputs:
        results.append((ReasonCode.MUTATED_INPUT, f"changed its input {', '.join(inputs)}"))
    if stray:
        results.append((ReasonCode.OUT_OF_BOUNDS, f"changed {stray} bytes outside every tensor"))
    return results


def process_findings(value: Mapping[str, Any], label: str) -> list[Reason]:
    """Findings of the cell about its own process."""
    findings, report = [], value["harness"]
    if report["patched"]:
        findings.append(Reason(ReasonCode.PATCHED, f"replaced {', '.join(report['patched'])}", label))
    if report["flags"]:
        changes = ", ".join(f"{n} to {v}" for n, v in report["flags"].items())
        findings.append(Reason(ReasonCode.GLOBAL_STATE, f"set {changes} for the whole process", label))
    if report["threads"]:
        findings.append(
            Reason(
                ReasonCode.THREADS,
                f"computed while nothing was asked: {'; '.join(report['threads'])}",
                label,
            )
        )
    return findings


def _tensor(data: BytesLike) -> torch.Tensor:
    # Over the wire come bytearrays, which need no copy; an answer from the same process may have bytes.
    return torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)


PlaceRequest = tuple[dict[str, Any], dict[str, TensorBytes]]
"""A payload and arrays for `launch_cell.place`."""


class ResidentBlock:
    """One large case in one cell: its block, canaries included, as the cell has it."""

    def __init__(self, case: LaunchCase, rng: random.Random, pages: int) -> None:
        """`pages` is the seed of the factors of the block's digest, one for all blocks of a cell."""
        self.case, self.name = case, block_name(case)
        self.arena = build_arena(case.tensors, case.outputs, case.layouts, rng)
        self._version = 0 if case.mutator is None else case.mutator.version
        self._is_sent = False
        self._pages, self._digest = pages, BlockHasher(pages)
        spans = complement_spans(output_spans(self.arena.slots), self.arena.block.numel())
        (self.digest,) = digest_values([self._digest.of(self.arena.block, pages, spans)])
        """The digest of all but the outputs, as it has to be after a launch."""

    def update(self) -> PlaceRequest | None:
        """The request that brings the cell's block up to date; None if it is."""
        moving = self.case.mutator
        if not self._is_sent:
            self._is_sent = True
            return {"patches": []}, {"block": byte_array(self.arena.data())}
        if moving is None or moving.version == self._version:
            return None
        changes = moving.since(self._version)
        assert changes is not None, "whoever is behind for so long builds a new one"
        self._version = moving.version
        by_name = {s.name: s for s in self.arena.slots}
        slots, arrays = [], {}
        for n, change in enumerate(changes):
            slots.append(by_name[change.name].to_json())
            arrays[f"at{n}"] = _tensor_array(change.where)
            arrays[f"to{n}"] = _tensor_array(change.values)
            self._apply(by_name[change.name], change)
        return {"patches": slots}, arrays

    @property
    def is_outdated(self) -> bool:
        """Whether the case has changed too often for the cell's block to be updated."""
        return self.case.mutator is not None and self.case.mutator.since(self._version) is None

    def digests(self, arrays: Mapping[str, TensorBytes], seed: int) -> list[int]:
        """The digests of outputs that were read: first those in the block, then those returned, as the cell has
        them."""
        places, parts = output_spans(self.arena.slots), []
        if places:
            block = torch.frombuffer(arrays["block"].data, dtype=torch.uint8)
            parts = [block[start:stop] for start, stop in places]
        numbers = sorted(int(n.removeprefix("out")) for n in arrays if n.startswith("out"))
        for data in (arrays[f"out{n}"].data for n in numbers):
            empty = torch.empty(0, dtype=torch.uint8)
            parts.append(torch.frombuffer(data, dtype=torch.uint8) if data else empty)
        return digest_values([self._digest.of(p, seed) for p in parts]) if parts else []

    def _apply(self, slot: Slot, change: ElementChange) -> None:
        block = self.arena.block
        width = getattr(torch, slot.dtype).itemsize
        numbers = torch.div(slot.offset + change.where * width, 8, rounding_mode="floor").unique()
        words = block.view(torch.int64)
        before = words[numbers]
        integer_view(slot.view(block))[change.where] = change.values
        difference = (words[numbers] - before) * self._digest.factors(numbers, self._pages, block.numel())
        self.digest = int(torch.tensor(self.digest) + difference.sum())


def block_name(case: LaunchCase) -> str:
    """Cases that take up the same place have the same name: the cell needs to keep one of them."""
    shapes = [(n, str(t.dtype), list(t.shape)) for n, t in (*case.tensors.items(), *case.outputs.items())]
    return hashlib.sha256(repr((shapes, sorted(case.layouts.items()))).encode()).hexdigest()[:16]


def byte_array(data: memoryview) -> TensorBytes:
    """Bytes as an array."""
    return TensorBytes("uint8", (len(data),), data)


def _tensor_array(tensor: torch.Tensor) -> TensorBytes:
    kind = str(tensor.dtype).removeprefix("torch.")
    return TensorBytes(kind, tuple(tensor.shape), memoryview(tensor.contiguous().view(torch.uint8).numpy()))


_LEAST_BLOCK_BYTES = 16 << 20
"""Room for blocks that is shared at first; memory is taken where it is written alone."""
_SPAN_FACTOR, _SPAN_SLACK = 4, 1 << 16
"""An output may span so many times its size, gaps included, and so many bytes more."""
_REPORT_SHARE = 0.05
"""Share of timed launches before which the cell is asked for a report on its process."""


class WindowedLauncher(Launcher):
    """Puts launches to one cell on a host, within windows.

    The judge relies on its own clock and memory alone. A cell and its judge share memory. While all of the cell's
    processes are stopped, the judge writes a launch's whole block into it; then it looks at its clock, resumes the cell
    and asks. The cell's answer ends the window: everything in the cell is stopped, the judge looks at its clock again,
    and reads the block, and the outputs out of the memory of the stopped process. So whatever runs in the cell has its
    inputs only while it is timed, and its outputs are the bytes that lie there when its time is up.
    """

    windowed = True

    def __init__(
        self, cell: Cell, kind: PackFormat, rng: random.Random, spent: PhaseTimer | None = None
    ) -> None:
        super().__init__(cell, kind, rng, "cpu", spent)
        self._stoppable = cell
        self._block = SharedMemory(_LEAST_BLOCK_BYTES)
        self._output_copies = SharedMemory(_SPAN_SLACK)
        """The memory that outputs are copied to; the cell's other processes do not see it."""
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
        reply = self._launch_in_window(case, self._build(case, shift), watch, poison=True)
        self._fill(reply, stray=not watch)
        return reply

    def timed(self, case: LaunchCase, protocol: str = "") -> LaunchResult:
        """One launch of which nothing is read yet, unless it returned something else than plain outputs."""
        self._must_fit(case)
        findings = self._process_findings()
        reply = self._launch_in_window(case, self._build(case), "", poison=False)
        reply.reasons += findings
        with malformed_answers_as_forgery():
            odd = any("problem" in d or d["alias"] for d in reply.described)
        if odd and not case.outputs:
            self.read(reply)
        return reply

    def _process_findings(self) -> list[Reason]:
        """The cell's findings about its process, for which it is asked before a few launches, chosen at random."""
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
        """Nothing: the cell does not see inputs before they are timed."""

    def idle(self, case: LaunchCase, protocol: str = "") -> float:
        """Seconds of a window in which the candidate's cell launches nothing."""
        arena = self._build(case)
        with self._phase_timer.phase("idle"):
            form = self._form(case, arena)
            self._lay(arena)
            return self._window(form, {"act": "nothing"}).seconds

    def null_window(self, case: LaunchCase, returned: Sequence[Mapping[str, Any]]) -> float:
        """Seconds of a window of a launch that does nothing and returns tensors of these forms.

        For a cell without a candidate.
        """
        arena = self._build(case)
        forms = [{"dtype": d["dtype"], "shape": d["shape"]} for d in returned if "dtype" in d]
        form = self._form(case, arena)
        self._lay(arena)
        return self._window(form, {"act": "null", "null": forms, "report": False}).seconds

    def _ask(
        self, question: str, payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes]
    ) -> tuple[CellAnswer, float]:
        """Ask while the cell runs: no clock counts this, and the question tells nothing of a launch."""
        self._stoppable.thaw()
        try:
            result = super()._ask(question, payload, arrays)
        except CandidateFault as fault:
            if fault.fault is Fault.EXCEPTION:  # after all others there is nothing left to stop
                self._stoppable.freeze()
            raise
        self._stoppable.freeze()
        return result

    def _launch_in_window(self, case: LaunchCase, arena: Arena, watch: str, *, poison: bool) -> LaunchResult:
        parameters: dict[str, Any] = {}
        arrays: dict[str, TensorBytes] = {}
        if self._add_parameters(case, parameters, arrays):
            self._ask("build", parameters, arrays)
        form = self._form(case, arena)
        self._lay(arena)  # from here on the cell runs within its window alone
        question = {"act": "launch", "watch": watch, "poison": poison, "report": poison}
        with self._phase_timer.phase("launch"):
            answer = self._window(form, question)
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
        """The form of a window, without contents, or only its name where the cell knows it.

        Reading in a window costs time there; but a form is sent outside of windows only once a window has shown
        it, as it may hold numbers. Call it before a block is written.
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
        results = {"block": bytearray(self._block.data[: arena.block.numel()])}
        spans = {n: _span_bytes(d) for n, d in enumerate(answer.value["outputs"]) if "problem" not in d}
        assert self._latest is not None
        most = _SPAN_FACTOR * self._latest[0].case.output_bytes + _SPAN_SLACK
        total = sum(aligned_size(size) for size in spans.values())
        if total > max(1, len(spans)) * most:
            raise ValueError(f"outputs span {total} bytes")
        if total > self._output_copies.size or self._output_copies.fd >= 0:
            if total > self._output_copies.size:
                self._output_copies = SharedMemory(aligned_size(2 * total))
            self._stoppable.share(self._output_copies.fd, self._output_copies.size)
            self._output_copies.forget_descriptor()
        at, places = 0, []
        for size, address in zip(spans.values(), answer.value["places"], strict=True):
            places.append((address, size, at))
            at += aligned_size(size)
        if missing := self._stoppable.copy_out(places):
            raise ValueError(f"{missing} outputs are not where they are said to be")
        for (n, size), (_, _, offset) in zip(spans.items(), places, strict=True):
            results[f"out{n}"] = bytearray(self._output_copies.data[offset : offset + size])
        return results


def open_launcher(
    cell: Cell, kind: PackFormat, rng: random.Random, device: str, spent: PhaseTimer
) -> Launcher:
    """The launcher for a cell on this device."""
    if device == "cpu" and hasattr(cell, "ask_in_window"):
        return WindowedLauncher(cell, kind, rng, spent)
    return Launcher(cell, kind, rng, device, spent)


def _span_bytes(about: Mapping[str, Any]) -> int:
    """Bytes from the first to the last element of a tensor that is described so."""
    shape, stride = about["shape"], about["stride"]
    width = int(getattr(torch, about["dtype"]).itemsize)
    if any(type(n) is not int or n < 0 for n in (*shape, *stride)):
        raise ValueError("sizes and strides are numbers from 0 on")
    return width * span_of(shape, stride)


_REMEMBERED_WINDOWS = 31
_NATIVE_SECONDS = 5e-6
"""Seconds that an answer in machine code may save against the trusted cell's lightest one."""


class NullCell:
    """Trusted cells that get the contestants' questions: one whose launches do nothing, one that does nothing.

    The first one's windows have all that a launch's have: resuming, the question, the code that serves a
    launch, the answer, stopping. The second answers at once: no window can be shorter than its windows. No
    candidate can make these longer, since all are stopped meanwhile.
    """

    def __init__(self, cell: Cell, bare: Cell, rng: random.Random) -> None:
        self._launcher = WindowedLauncher(cell, PackFormat.OWN, rng)
        self._launcher.prepare("", "", Language.TORCH)
        self._bare = bare
        bare.ask("forecast_harness.verify.launch_cell:serve", {}, {})
        bare.freeze()
        self._windows: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED_WINDOWS))
        self._bare_windows: deque[float] = deque(maxlen=_REMEMBERED_WINDOWS)

    def measure(self, name: str, case: LaunchCase, returned: Sequence[Mapping[str, Any]]) -> float:
        """Seconds of one window of the workload `name`, where contestants return tensors of these forms."""
        self._bare_windows.append(
            self._bare.ask_in_window("forecast_harness.verify.launch_cell:window", {}).seconds
        )
        seconds = self._launcher.null_window(case, returned)
        self._windows[name].append(seconds)
        return seconds

    def forget(self) -> None:
        """Forget all windows so far: the cells were not yet warm."""
        self._windows.clear()
        self._bare_windows.clear()

    def typical_seconds(self, name: str) -> float:
        """The median of a workload's latest windows; 0 where there are none."""
        result = self._windows[name]
        return statistics.median(result) if result else 0.0

    def undisturbed_seconds(self, name: str) -> float:
        """Seconds of a workload's windows where nothing else wants the processor; 0 where there are none."""
        return _low(self._windows[name])

    def serving_seconds(self, name: str) -> float:
        """The seconds that replacing all of the code that serves a launch of `name` could gain, at most.

        A busy machine delays windows by more than that code takes, so the windows without delay count.
        """
        return max(0.0, self.undisturbed_seconds(name) - _low(self._bare_windows)) + _NATIVE_SECONDS


def _low(seconds: Sequence[float] | deque[float]) -> float:
    """The 20 % quantile; 0 of none."""
    ascending = sorted(seconds)
    return ascending[len(ascending) // 5] if ascending else 0.0
