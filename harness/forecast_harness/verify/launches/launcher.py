"""Launches as the judge asks for them: what is sent, what comes back, what that shows without a reference.

Small blocks travel with every question, and all bytes come back with the answer. Large ones lie in the cell
(see `held`): the judge sends what changed in them, the answer has digests, and whether the bytes themselves
are read is decided afterwards. What was read must have the digests that were told at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from forecast_autotune.errors import RecordError
from forecast_harness.clocks.devices import EVENTS_PROTOCOL
from forecast_harness.sandbox.jobs import CellAnswer, TensorBytes, tensor_to_bytes
from forecast_harness.targets.packs.schema import Language, PackFormat
from forecast_harness.verify.cell_limits import MAX_LAUNCH_BYTES, oversize_message
from forecast_harness.verify.cost_control import PhaseTimer
from forecast_harness.verify.launches.answers import check_answer, malformed_answers_as_forgery
from forecast_harness.verify.launches.arena import Arena, build_arena
from forecast_harness.verify.launches.outputs import (
    LaunchOutputs,
    process_findings,
    read_outputs,
    stray_writes,
)
from forecast_harness.verify.launches.resident_block import ResidentBlock, block_name, byte_array
from forecast_harness.verify.problems.problem import LaunchCase
from forecast_harness.verify.verdict import Reason, ReasonCode

if TYPE_CHECKING:
    import torch

CELL_ENTRIES = "forecast_harness.verify.inside"
MAX_INLINE_BYTES = 1 << 20
"""Bytes of arguments and outputs up to which all of them travel with every launch."""
_SEED_BITS = 62
_BLOCK_CHECK_SHARE = 0.5
"""Of the large launches whose outputs are read, the share whose inputs and canaries are, too."""


class CellClient(Protocol):
    """What the judge needs of a `sandbox.cell.Cell`: a process to ask."""

    def ask(self, entry: str, payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes]) -> CellAnswer:
        """Call `module:function` there. Raises `CandidateFault` when the candidate fails."""


@runtime_checkable
class StoppableCell(Protocol):
    """A cell whose processes can be stopped."""

    def freeze(self) -> None:
        """Stop all of its processes."""

    def thaw(self) -> None:
        """Resume them."""


class DescriptorCell(StoppableCell, Protocol):
    """A cell that can be handed a descriptor with a question, of memory to map."""

    def ask(
        self,
        entry: str,
        payload: Mapping[str, Any],
        arrays: Mapping[str, TensorBytes],
        *,
        descriptor: int | None = None,
    ) -> CellAnswer:
        """Ask while all of its processes run."""


@dataclass(frozen=True)
class LaunchTimes:
    """How long one launch took."""

    seconds: float
    """As the cell says."""
    total_seconds: float
    """Of all launches between question and answer, as the cell says."""
    wall_seconds: float
    """From question to answer, by the judge's clock."""
    protocol: str
    """How the cell timed it: `host`, or as `clocks.devices` does."""


@dataclass
class LaunchResult:
    """One launch as the judge sees it."""

    case: LaunchCase
    number: int
    """Of the launch, from 1."""
    seconds: float
    total_seconds: float
    wall_seconds: float
    protocol: str
    """All as in `LaunchTimes`."""
    reasons: list[Reason]
    compiled: int = 0
    """Kernels compiled during the launch."""
    operations: Mapping[str, int] = field(default_factory=dict)
    """Of the framework, if they were watched: name -> most elements that one call touched."""
    outputs: LaunchOutputs | None = None
    """None until they are read."""
    digests: list[int] = field(default_factory=list)
    """Of the block but for its outputs, then of each output, as they were told at once."""
    seed: int = 0
    """Of the outputs' digests."""
    described: Any = None
    """The outputs as they were described at once."""

    @property
    def trial(self) -> str:
        """Which launch it was, for reasons."""
        return f"{self.number}: {self.case.label}"

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Its outputs. Raises `ValueError` before they are read."""
        if self.outputs is None:
            raise ValueError(f"launch {self.trial} has not been read")
        return self.outputs.tensors

    @property
    def times(self) -> LaunchTimes:
        """What is kept of hundreds of launches."""
        return LaunchTimes(self.seconds, self.total_seconds, self.wall_seconds, self.protocol)


class Launcher:
    """Puts launches to one cell."""

    def __init__(
        self,
        cell: CellClient,
        kind: PackFormat,
        rng: random.Random,
        device: str,
        spent: PhaseTimer | None = None,
    ) -> None:
        """`spent` is told what went into blocks, into launches, and into waiting for answers."""
        self._cell, self._format, self._rng, self._device = cell, kind, rng, device
        self._phase_timer = spent or PhaseTimer()
        self._language = Language.TORCH
        self._state: Mapping[str, torch.Tensor] | None = None
        self._built = False
        self._residents: dict[str, ResidentBlock] = {}
        self._pages = rng.getrandbits(_SEED_BITS)
        self.trials = 0

    windowed = False
    """Whether launches see their inputs within the window alone that the judge's clock counts."""
    reveals_late = False
    """Whether changes of inputs come with the launch's own question, and the cell is stopped between questions.

    For cells on a device: whoever watches what is placed sees nothing of the next launch before it is asked for.
    """

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
        reply, answer = self._asked(case, payload, {"block": byte_array(arena.data())})
        with malformed_answers_as_forgery():
            self._take(reply, answer, arena, stray=not watch)
        return reply

    def timed(self, case: LaunchCase, protocol: str = "") -> LaunchResult:
        """One launch of which nothing is read yet but digests, where the case is large."""
        if not is_large(case):
            return self.launch(case, protocol=protocol)
        resident, changes = self._resident(case, placed=not self.reveals_late)
        seed = self._rng.getrandbits(_SEED_BITS)
        about = {**launch_payload(case, resident.arena, protocol), "watch": ""}
        payload = {**about, "held": resident.name, "seed": seed, **changes[0]}
        reply, answer = self._asked(case, payload, dict(changes[1]))
        with malformed_answers_as_forgery():
            reply.described, reply.seed = answer.value["outputs"], seed
            reply.digests = [int(n) for n in answer.value["digests"]]
            untouched = reply.digests[0] == resident.digest
            odd = any("problem" in d or d["alias"] for d in reply.described) and not case.outputs
        if odd or not untouched:
            self.read(reply)
            if not untouched and not reply.reasons:
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
        """Let the cell hold a large case as it is now, so that its next launch need not wait for that."""
        if not self.reveals_late:
            self._resident(case)

    def idle(self, case: LaunchCase, protocol: str = "") -> float:
        """Seconds of a question of the same size that launches nothing.

        To be asked where a launch would have been: a cell that was asked a moment ago answers sooner than
        one that has slept.
        """
        if is_large(case):
            known = self._residents.get(block_name(case)) if self.reveals_late else None
            resident = known or self._resident(case)[0]  # what is asked next must not be told now
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
        """The answer, and how long it took to come."""
        if self.reveals_late and isinstance(self._cell, StoppableCell):
            self._cell.thaw()
        begin = time.perf_counter()
        try:
            answer = self._cell.ask(f"{CELL_ENTRIES}:{question}", payload, arrays)
        finally:
            taken = time.perf_counter() - begin
            self._phase_timer.add(question, taken)
        if self.reveals_late and isinstance(self._cell, StoppableCell):
            self._cell.freeze()
        check_answer(question, answer)
        return answer, taken

    def _build(self, case: LaunchCase, shift: int = 0) -> Arena:
        with self._phase_timer.phase("build"):
            return build_arena(case.tensors, case.outputs, case.layouts, self._rng, shift=shift)

    def _must_fit(self, case: LaunchCase) -> None:
        # What a foreign task returns is not known beforehand, and `output_bytes` a generous guess.
        size = case.input_bytes + (case.output_bytes if self._format is PackFormat.OWN else 0)
        if size > MAX_LAUNCH_BYTES:
            raise RecordError(oversize_message(case.label, size))

    def _asked(
        self, case: LaunchCase, payload: dict[str, Any], arrays: dict[str, TensorBytes]
    ) -> tuple[LaunchResult, CellAnswer]:
        """Ask for a launch; the reply without its outputs."""
        self._add_parameters(case, payload, arrays)
        answer, outside = self._ask("launch", payload, arrays)
        return self._reply(case, answer, outside), answer

    def _add_parameters(
        self, case: LaunchCase, payload: dict[str, Any], arrays: dict[str, TensorBytes]
    ) -> bool:
        """Add what a module is built from, and its parameters; whether there is anything to add."""
        if self._format is not PackFormat.KERNELBENCH or self._state is case.state:
            return False
        if not self._built:
            payload["init"] = case.call["init"]
            self._built = True
        arrays |= {f"state.{n}": tensor_to_bytes(t) for n, t in case.state.items()}
        self._state = case.state
        return True

    def _reply(self, case: LaunchCase, answer: CellAnswer, outside: float) -> LaunchResult:
        """What an answer about one more launch says, but for its outputs."""
        self.trials += 1
        with malformed_answers_as_forgery():
            value = answer.value
            reply = LaunchResult(
                case,
                self.trials,
                float(value["seconds"]),
                float(value["whole"]),
                outside,
                str(value["protocol"]),
                [],
                int(value["compiled"]),
                {str(n): int(size) for n, size in value["operations"].items()},
            )
            self._phase_timer.add(
                "inside", max(0.0, min(reply.total_seconds, outside))
            )  # it may have said anything
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
        """Fill in outputs, and what is wrong with them and with the block."""
        reply.outputs, said = read_outputs(answer, arena)
        reply.reasons += [Reason(code, text, reply.trial) for code, text in said]
        if stray:
            found = stray_writes(arena, answer.arrays["block"].data)
            reply.reasons += [Reason(code, text, reply.trial) for code, text in found]

    def _resident(
        self, case: LaunchCase, *, placed: bool = True
    ) -> tuple[ResidentBlock, tuple[dict[str, Any], Mapping[str, TensorBytes]]]:
        """What the cell holds for this case, and what is left to tell it: nothing, where that is `placed`.

        Raises `RecordError` if it is too large.
        """
        self._must_fit(case)
        name = block_name(case)
        with self._phase_timer.phase("build"):
            resident = self._residents.get(name)
            if resident is None or resident.case is not case or resident.is_outdated:
                resident = self._residents[name] = ResidentBlock(case, self._rng, self._pages)
            payload, arrays = resident.update() or ({}, {})
        if payload and placed:
            self._ask("place", {"name": name, **payload}, arrays)
            return resident, ({}, {})
        return resident, (payload, arrays)


def is_large(case: LaunchCase) -> bool:
    """Whether the case's bytes are not sent with every launch.

    Outputs with gaps between their elements always are: the gaps are nobody's, and have no digest.
    """
    gapless = all(case.layouts.get(n) != "padded" for n in case.outputs)
    return gapless and case.input_bytes + case.output_bytes > MAX_INLINE_BYTES


def launch_payload(case: LaunchCase, arena: Arena, protocol: str) -> dict[str, Any]:
    """What every question about a launch says: the slots, the call, how it is timed."""
    slots = [s.to_json() for s in arena.slots]
    return {"slots": slots, "output_bytes": case.output_bytes, "protocol": protocol, "call": case.call}
