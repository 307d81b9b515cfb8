"""Many launches in one window of a cell, on inputs that lie in the judge's memory and are new in each.

While all of the cell's processes are stopped, the judge looks at its clock, copies new inputs to memory that the
cell maps, resumes the cell and asks. After the answer it copies the outputs out of that memory, and looks at its
clock again. So whoever computes before has no inputs, and what is written afterwards does not count, also where
the device still works when the answer comes.

Where values mean the same in another order, launches have the inputs of one case, rotated by another number of
elements each: the whole of them is new, at the price of two copies on the device.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from forecast_harness.sandbox.jobs import CellAnswer
from forecast_harness.verify.launches.answers import check_answer, malformed_answers_as_forgery
from forecast_harness.verify.launches.arena import Arena, Slot, aligned_size, build_arena
from forecast_harness.verify.launches.launcher import DescriptorCell
from forecast_harness.verify.problems.problem import LaunchCase
from forecast_harness.verify.windows.exported_memory import ExportedMemory
from forecast_harness.verify.windows.output_pool import SLACK_BYTES

_ENTRIES = "forecast_harness.verify.windows.batch_serving"
_OUTPUT_SLACK = 1 << 12
"""Bytes that the outputs of a launch may take beyond twice what they have to."""
_GLIMPSE_BYTES = 1 << 12
_UNLIKE, _MOST = 0.05, 0.5
"""By how much two right results differ at the very most, and what share of elements is no accident."""


class BatchCell(DescriptorCell, Protocol):
    """A cell that can be asked within a window that begins and ends as told; see `sandbox.cell.Cell`."""

    def ask_in_window(self, entry: str, payload: Mapping[str, Any], reveal: Any, collect: Any) -> CellAnswer:
        """Resume it between `reveal` and `collect`; the answer's `seconds` are all in between."""


@dataclass(frozen=True)
class BatchDraw:
    """What the launches of a window are given, and where a few bytes of the outputs of each are looked at."""

    given: Sequence[Mapping[str, int] | LaunchCase]
    """Of each launch: by how many elements inputs are rotated, or another case."""
    output: float
    """Which output is looked at, as a share of all."""
    places: Sequence[float]
    """Where in it, by launch, as a share of its size."""


@dataclass(frozen=True)
class Glimpse:
    """A few bytes of one output of every launch, as they were when the window ended."""

    data: torch.Tensor
    """uint8, [launches, bytes]."""
    form: Slot
    """Dtype, shape and strides of the output."""

    def unlike(self, other: Glimpse) -> list[int]:
        """Launches of which most elements are unlike another cell's by far; none where forms differ."""
        one, two = self.form, other.form
        if (one.dtype, one.shape, one.stride) != (two.dtype, two.shape, two.stride):
            return []
        kind = getattr(torch, one.dtype)
        a, b = self.data.view(kind), other.data.view(kind)
        if kind.is_floating_point:  # of eight bits, too, which devices do not compare
            a, b = a.float(), b.float()
        near = a == b
        if kind.is_floating_point:
            usual = b.nan_to_num(0.0, 0.0, 0.0).square().mean(1, keepdim=True).sqrt()
            near = near | (a.isnan() & b.isnan()) | ((a - b).abs() <= _UNLIKE * (b.abs() + usual))
        found: list[int] = torch.nonzero(near.float().mean(1) < _MOST).flatten().tolist()
        return found


@dataclass(frozen=True)
class BatchInputs:
    """What the launches of a batch are given."""

    case: LaunchCase
    arena: Arena
    rotatable: tuple[str, ...]
    """Inputs that mean the same in another order; where there are none, each launch has a `fresh` case."""
    fresh: Callable[[], LaunchCase]
    """Another case of the same sizes."""

    def draw(self, count: int, rng: random.Random) -> BatchDraw:
        """What so many launches are given next."""
        given: list[Mapping[str, int] | LaunchCase] = []
        for _ in range(count):
            spans = ((s.name, s.span) for s in self.arena.slots if s.name in self.rotatable)
            turns = {name: rng.randrange(1, span) for name, span in spans}
            given.append(turns or replace(self.fresh(), layouts={}))
        return BatchDraw(given, rng.random(), [rng.random() for _ in range(count)])

    def case_of(self, given: Mapping[str, int] | LaunchCase) -> LaunchCase:
        """The case of one launch of a draw."""
        return given if isinstance(given, LaunchCase) else self._rotated(given)

    def _rotated(self, turns: Mapping[str, int]) -> LaunchCase:
        """The case whose inputs are rotated by so many elements."""
        tensors = {
            n: torch.roll(t.contiguous().reshape(-1), turns[n]).reshape(t.shape) if turns.get(n) else t
            for n, t in self.case.tensors.items()
        }
        return replace(self.case, tensors=tensors, quick=None, mutator=None)


@dataclass(frozen=True)
class CollectedLaunch:
    """A launch of a window: its case, and bytes that were read of it."""

    case: Callable[[], LaunchCase]
    data: torch.Tensor
    slots: Callable[[], list[Slot]]
    """Where outputs lie in `data`."""

    def read(self) -> tuple[LaunchCase, list[torch.Tensor]]:
        """The case and the outputs, on the host.

        Raises `CandidateFault` for outputs that are not where they may be, or none.
        """
        data = self.data.cpu()
        with malformed_answers_as_forgery():
            return self.case(), [slot.view(data) for slot in self.slots()]


class LaunchBatches:
    """Batches of launches of one case in one cell. Raises `ExportError` where memory cannot be shared."""

    def __init__(
        self, cell: BatchCell, name: str, given: BatchInputs, count: int, device: str, rng: random.Random
    ) -> None:
        """`count` launches in a window, on torch's `device`; no other batches of this cell have the `name`."""
        self._cell, self._name, self._given, self._device, self._rng = cell, name, given, device, rng
        self.count = count
        self._stride = aligned_size(given.arena.block.numel())
        self._room = aligned_size(2 * given.case.output_bytes + _OUTPUT_SLACK)
        self._inputs = ExportedMemory(count * self._stride, device)
        copied, pooled = count * self._room, count * aligned_size(given.case.output_bytes) + SLACK_BYTES
        self._outputs = ExportedMemory(copied if device == "cpu" else copied + pooled, device)
        self._pristine = given.arena.block.to(device)
        self._next = torch.empty(count * self._stride, dtype=torch.uint8, device=device)
        self._collected = torch.empty(
            self._stride if given.case.outputs else self._room, dtype=torch.uint8, device=device
        )
        self._chosen = 0
        """Which launch of a window is read: a secret until it ends."""
        self._last = given.draw(0, rng)
        self._told: tuple[list[Any], list[Any]] = ([], [])
        self._slots: list[list[Slot]] = []
        """Where outputs of each launch lie in the judge's memory; what is not `recorded` may lie elsewhere later."""
        self._looked_at: tuple[torch.Tensor, torch.Tensor, Slot] | None = None
        """Memory, places in it by launch, and the output's form."""
        self.glimpse: Glimpse | None = None
        """Of the last window; None for outputs with gaps."""
        self.recorded = False

    def open(self) -> None:
        """Have the cell map the memory; afterwards it is stopped. Raises `CandidateFault`."""
        self._cell.thaw()
        for name, memory in (("inputs", self._inputs), ("outputs", self._outputs)):
            asked = {"batch": self._name, "name": name, "bytes": memory.size}
            answer = self._cell.ask(f"{_ENTRIES}:attach", asked, {}, descriptor=memory.fd)
            check_answer("attach", answer)
            memory.forget_descriptor()
        self._cell.freeze()

    def arm(self, null: Sequence[Mapping[str, Any]] | None = None, *, record: bool = True) -> None:
        """Have the cell launch once, and record that where it can be and is wanted.

        `null`: forms of what a cell without a candidate returns. Afterwards the cell is stopped. Raises
        `CandidateFault`.
        """
        self._lay_out(self._given.draw(self.count, self._rng))
        self._reveal()
        self._cell.thaw()
        slots = [
            [_moved(s, n * self._stride).to_json() for s in self._given.arena.slots]
            for n in range(self.count)
        ]
        calls = [self._given.case.call] * self.count
        payload = {"batch": self._name, "slots": slots, "calls": calls, "room": self._room}
        payload |= {"null": null, "record": record}
        answer = self._cell.ask(f"{_ENTRIES}:arm", payload, {})
        self._cell.freeze()
        check_answer("arm_batch", answer)
        with malformed_answers_as_forgery():
            self._told = answer.value["outputs"], answer.value["places"]
            self.recorded = answer.value["recorded"]
            self._slots = [self._output_slots(self._told, n) for n in range(self.count)]

    @property
    def forms(self) -> list[dict[str, Any]]:
        """Of what a launch returned last: `dtype` and `shape` of each output."""
        return [{"dtype": d["dtype"], "shape": d["shape"]} for d in self._told[0][0] if "dtype" in d]

    def window(self, draw: BatchDraw) -> float:
        """Seconds of a window with these inputs, which the cell has not had. Raises `CandidateFault`."""
        self._lay_out(draw)
        answer = self._cell.ask_in_window(
            f"{_ENTRIES}:launches", {"batch": self._name}, self._reveal, self._collect
        )
        check_answer("batch", answer)
        if not self.recorded:
            with malformed_answers_as_forgery():
                self._told = answer.value["outputs"], answer.value["places"]
        return answer.seconds

    def bare_window(self, cell: BatchCell) -> float:
        """Seconds of a window around the question to another cell, which launches nothing."""
        return cell.ask_in_window(
            f"{_ENTRIES}:launches", {"batch": self._name}, self._reveal, self._collect
        ).seconds

    def collected(self) -> CollectedLaunch:
        """A launch of the last window that nobody was told of, as it was when the window ended."""
        return self._launch(self._chosen, self._collected.clone())

    def launch_now(self, n: int) -> tuple[CollectedLaunch, Glimpse | None]:
        """The launch n of the last window, and all that is glimpsed, as they are by now."""
        data = torch.empty_like(self._collected)
        self._copy_outputs(n, data)
        return self._launch(n, data), self._look()

    def _launch(self, n: int, data: torch.Tensor) -> CollectedLaunch:
        told, given = self._told, self._last.given[n]
        slots = self._slots[n] if self.recorded else None

        def found() -> list[Slot]:
            if self._given.case.outputs:
                return [s for s in self._given.arena.slots if s.output]
            lie = self._output_slots(told, n) if slots is None else slots
            return [replace(s, offset=at) for s, at in zip(lie, self._starts(lie, n), strict=True)]

        return CollectedLaunch(lambda: self._given.case_of(given), data, found)

    def _output_slots(self, told: tuple[list[Any], list[Any]], n: int) -> list[Slot]:
        """Where a launch's outputs lie by what was `told`. Raises what `malformed_answers_as_forgery` expects."""
        found, places = [], iter(told[1][n])
        first, end = (0, self._outputs.size) if self.recorded else (n * self._room, (n + 1) * self._room)
        for about in told[0][n]:
            if "problem" in about:
                raise ValueError(about["problem"])
            slot = Slot("output", about["dtype"], tuple(about["shape"]), tuple(about["stride"]), first)
            if slot.bytes:
                slot = replace(slot, offset=next(places))
            if slot.offset < first or slot.offset + slot.bytes > end:
                raise ValueError(f"an output lies at {slot.offset}, outside of the memory for it")
            found.append(slot)
        if sum(aligned_size(s.bytes) for s in found) > self._room:
            raise ValueError("outputs take more room than asked for")
        return found

    def _starts(self, slots: Sequence[Slot], n: int) -> list[int]:
        """Where outputs of that launch lie in what is collected of it."""
        if not self.recorded:
            return [s.offset - n * self._room for s in slots]
        return [0, *itertools.accumulate(aligned_size(s.bytes) for s in slots)][: len(slots)]

    def _lay_out(self, draw: BatchDraw) -> None:
        """Lay out the inputs of the next window, where no cell sees them, and choose what is read of it."""
        self._chosen, self._last = self._rng.randrange(self.count), draw
        for n, given in enumerate(draw.given):
            target = self._next[n * self._stride : n * self._stride + self._pristine.numel()]
            if isinstance(given, LaunchCase):
                arena = build_arena(given.tensors, given.outputs, {}, self._rng, noise=True)
                target.copy_(arena.block)
            else:
                self._rotate(target, given)
        self._looked_at = self._places(draw)
        self._synchronize()

    def _rotate(self, target: torch.Tensor, turns: Mapping[str, int]) -> None:
        target.copy_(self._pristine)
        for slot in self._given.arena.slots:
            if slot.name in turns:
                turn = turns[slot.name] * int(getattr(torch, slot.dtype).itemsize)
                cut, end = slot.offset + turn, slot.offset + slot.bytes
                target[cut:end].copy_(self._pristine[slot.offset : end - turn])
                target[slot.offset : cut].copy_(self._pristine[end - turn : end])

    def _places(self, draw: BatchDraw) -> tuple[torch.Tensor, torch.Tensor, Slot] | None:
        """What is looked at of each launch."""
        memory, listed = self._outputs.tensor, self._slots
        if self._given.case.outputs:
            outputs = [s for s in self._given.arena.slots if s.output]
            memory = self._inputs.tensor
            listed = [[_moved(s, n * self._stride) for s in outputs] for n in range(self.count)]
        if len(listed) != len(draw.places) or not listed[0]:
            return None
        chosen = [slots[int(draw.output * len(slots))] for slots in listed]
        form, width = chosen[0], int(getattr(torch, chosen[0].dtype).itemsize)
        size = min(_GLIMPSE_BYTES, form.bytes) // width * width
        if not size or not all(s.dense and s.bytes == form.bytes for s in chosen):
            return None
        first = [
            s.offset + int(share * ((form.bytes - size) // width + 1)) * width
            for s, share in zip(chosen, draw.places, strict=True)
        ]
        at = torch.tensor(first, device=memory.device)[:, None] + torch.arange(size, device=memory.device)
        return memory, at, replace(form, name="", offset=0)

    def _look(self) -> Glimpse | None:
        if self._looked_at is None:
            return None
        memory, at, form = self._looked_at
        return Glimpse(memory[at], form)

    def _reveal(self) -> None:
        self._inputs.tensor[: self._next.numel()].copy_(self._next)
        self._synchronize()

    def _collect(self) -> None:
        self._copy_outputs(self._chosen, self._collected)
        self.glimpse = self._look()
        self._synchronize()

    def _copy_outputs(self, n: int, target: torch.Tensor) -> None:
        size = target.numel()
        if self.recorded and not self._given.case.outputs:
            slots = self._slots[n]
            for slot, at in zip(slots, self._starts(slots, n), strict=True):
                lies = self._outputs.tensor[slot.offset : slot.offset + slot.bytes]
                target[at : at + slot.bytes].copy_(lies)
        else:
            source = self._inputs if self._given.case.outputs else self._outputs
            target.copy_(source.tensor[n * size : (n + 1) * size])

    def _synchronize(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()


def batch_inputs(
    case: LaunchCase, rotatable: Sequence[str], fresh: Callable[[], LaunchCase], rng: random.Random
) -> BatchInputs:
    """A case to be launched in batches; `rotatable`: inputs whose values mean the same in another order."""
    several = [n for n in rotatable if case.tensors[n].numel() > 1]
    arena = build_arena(case.tensors, case.outputs, {}, rng, noise=True)
    return BatchInputs(replace(case, layouts={}), arena, tuple(several), fresh)


def _moved(slot: Slot, by: int) -> Slot:
    return replace(slot, offset=slot.offset + by)
