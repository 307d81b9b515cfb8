"""Many launches in one window of a cell, on inputs that lie in the judge's memory and are new in each.

While all of the cell's processes are stopped, the judge looks at its clock, copies new inputs to memory that the
cell maps, resumes the cell and asks. After the answer it copies the outputs out of that memory, and looks at its
clock again. So a candidate that computes before has no inputs, and bytes that it writes afterwards do not count, also
where the device still works when the answer comes.

Where values mean the same in another order, launches have the inputs of one case, rotated by another number of
elements each: the whole of them is new, at the price of two copies on the device.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch

from forecast_harness.clocks.paired_comparison import CANDIDATE, INCUMBENT, sign_interval
from forecast_harness.sandbox.cell import CandidateFault, Cell
from forecast_harness.sandbox.judge_process import JobContext
from forecast_harness.targets.packs.schema import Language, Pack, PackFormat, Workload
from forecast_harness.verify.answers import check_answer, malformed_answers_as_forgery
from forecast_harness.verify.blocks import Arena, Slot, aligned_size, build_arena
from forecast_harness.verify.examiner import SolutionExaminer
from forecast_harness.verify.exported_memory import SLACK_BYTES, ExportedMemory, ExportError
from forecast_harness.verify.launcher import Launcher
from forecast_harness.verify.problem import LaunchCase
from forecast_harness.verify.verdict import ContestantRejected, Reason, ReasonCode
from forecast_harness.verify.verification_job import reason_of_fault

_ENTRIES = "forecast_harness.verify.window_cell"
_OUTPUT_SLACK = 1 << 12
"""Bytes that the outputs of a launch may take beyond twice what they have to."""
_GLIMPSE_BYTES = 1 << 12
_UNLIKE, _MOST = 0.05, 0.5
"""The most by which two right results differ, and the share of elements beyond which that is no accident."""


@dataclass(frozen=True)
class BatchDraw:
    """The inputs of the launches of a window, and the places of a few bytes to read of each launch's outputs."""

    given: Sequence[Mapping[str, int] | LaunchCase]
    """By launch, by how many elements its inputs are rotated, or another case."""
    output: float
    """The output to read, as a share of all outputs."""
    places: Sequence[float]
    """The place in the output, by launch, as a share of its size."""


@dataclass(frozen=True)
class Glimpse:
    """A few bytes of one output of every launch, as they were when the window ended."""

    data: torch.Tensor
    """uint8, [launches, bytes]."""
    form: Slot
    """Dtype, shape and strides of the output."""

    def unlike(self, other: Glimpse) -> list[int]:
        """Launches of which most elements are unlike another cell's by far; none where forms differ."""
        a_form, b_form = self.form, other.form
        if (a_form.dtype, a_form.shape, a_form.stride) != (b_form.dtype, b_form.shape, b_form.stride):
            return []
        kind = getattr(torch, a_form.dtype)
        a, b = self.data.view(kind), other.data.view(kind)
        if kind.is_floating_point:  # of eight bits, too, which devices do not compare
            a, b = a.float(), b.float()
        is_near = a == b
        if kind.is_floating_point:
            usual = b.nan_to_num(0.0, 0.0, 0.0).square().mean(1, keepdim=True).sqrt()
            is_near = is_near | (a.isnan() & b.isnan()) | ((a - b).abs() <= _UNLIKE * (b.abs() + usual))
        results: list[int] = torch.nonzero(is_near.float().mean(1) < _MOST).flatten().tolist()
        return results


@dataclass(frozen=True)
class BatchInputs:
    """The inputs that the launches of a batch are drawn from."""

    case: LaunchCase
    arena: Arena
    rotatable: tuple[str, ...]
    """Inputs that mean the same in another order; where there are none, each launch has a `fresh` case."""
    fresh: Callable[[], LaunchCase]
    """Another case of the same sizes."""

    def draw(self, count: int, rng: random.Random) -> BatchDraw:
        """Draw the inputs of the next so many launches."""
        inputs: list[Mapping[str, int] | LaunchCase] = []
        for _ in range(count):
            spans = ((s.name, s.span) for s in self.arena.slots if s.name in self.rotatable)
            turns = {name: rng.randrange(1, span) for name, span in spans}
            inputs.append(turns or replace(self.fresh(), layouts={}))
        return BatchDraw(inputs, rng.random(), [rng.random() for _ in range(count)])

    def case_of(self, inputs: Mapping[str, int] | LaunchCase) -> LaunchCase:
        """The case of one launch of a draw."""
        return inputs if isinstance(inputs, LaunchCase) else self._rotated_case(inputs)

    def _rotated_case(self, turns: Mapping[str, int]) -> LaunchCase:
        """The case whose inputs are rotated by so many elements."""
        tensors = {
            n: torch.roll(t.contiguous().reshape(-1), turns[n]).reshape(t.shape) if turns.get(n) else t
            for n, t in self.case.tensors.items()
        }
        return replace(self.case, tensors=tensors, quick=None, mutator=None)


@dataclass(frozen=True)
class CollectedLaunch:
    """A launch of a window: its case, and the bytes of its outputs."""

    case: Callable[[], LaunchCase]
    data: torch.Tensor
    slots: Callable[[], list[Slot]]
    """The places of outputs in `data`."""

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
        self, cell: Cell, name: str, inputs: BatchInputs, count: int, device: str, rng: random.Random
    ) -> None:
        """`count` launches in a window, on torch's `device`; no other batches of this cell have the `name`."""
        self._cell, self._name, self._batch_inputs, self._device, self._rng = cell, name, inputs, device, rng
        self.count = count
        self._stride = aligned_size(inputs.arena.block.numel())
        self._room = aligned_size(2 * inputs.case.output_bytes + _OUTPUT_SLACK)
        self._inputs = ExportedMemory(count * self._stride, device)
        copies, pool = count * self._room, count * aligned_size(inputs.case.output_bytes) + SLACK_BYTES
        self._outputs = ExportedMemory(copies if device == "cpu" else copies + pool, device)
        self._pristine = inputs.arena.block.to(device)
        self._next = torch.empty(count * self._stride, dtype=torch.uint8, device=device)
        self._sample_data = torch.empty(
            self._stride if inputs.case.outputs else self._room, dtype=torch.uint8, device=device
        )
        self._sample_number = 0
        """The launch of a window that is read: a secret until the window ends."""
        self._last = inputs.draw(0, rng)
        self._descriptions: tuple[list[Any], list[Any]] = ([], [])
        self._slots: list[list[Slot]] = []
        """Places of each launch's outputs in the judge's memory; they may change where nothing is `recorded`."""
        self._glimpse_places: tuple[torch.Tensor, torch.Tensor, Slot] | None = None
        """Memory, places in it by launch, and the output's form."""
        self.glimpse: Glimpse | None = None
        """A glimpse of the last window; None for outputs with gaps."""
        self.recorded = False

    def open(self) -> None:
        """Have the cell map the memory; afterwards it is stopped. Raises `CandidateFault`."""
        self._cell.thaw()
        for name, memory in (("inputs", self._inputs), ("outputs", self._outputs)):
            request = {"batch": self._name, "name": name, "bytes": memory.size}
            answer = self._cell.ask(f"{_ENTRIES}:attach", request, {}, descriptor=memory.fd)
            check_answer("attach", answer)
            memory.forget_descriptor()
        self._cell.freeze()

    def arm(self, null: Sequence[Mapping[str, Any]] | None = None, *, record: bool = True) -> None:
        """Have the cell launch once, and record that if it can, and `record` says so.

        `null`: forms of the outputs of a cell without a candidate. Afterwards the cell is stopped. Raises
        `CandidateFault`.
        """
        self._lay_out(self._batch_inputs.draw(self.count, self._rng))
        self._reveal()
        self._cell.thaw()
        slots = [
            [_moved_slot(s, n * self._stride).to_json() for s in self._batch_inputs.arena.slots]
            for n in range(self.count)
        ]
        calls = [self._batch_inputs.case.call] * self.count
        payload = {"batch": self._name, "slots": slots, "calls": calls, "room": self._room}
        payload |= {"null": null, "record": record}
        answer = self._cell.ask(f"{_ENTRIES}:arm", payload, {})
        self._cell.freeze()
        check_answer("arm_batch", answer)
        with malformed_answers_as_forgery():
            self._descriptions = answer.value["outputs"], answer.value["places"]
            self.recorded = answer.value["recorded"]
            self._slots = [self._output_slots(self._descriptions, n) for n in range(self.count)]

    @property
    def forms(self) -> list[dict[str, Any]]:
        """The forms of the last launch's outputs: `dtype` and `shape` of each."""
        return [{"dtype": d["dtype"], "shape": d["shape"]} for d in self._descriptions[0][0] if "dtype" in d]

    def window(self, draw: BatchDraw) -> float:
        """Seconds of a window with these inputs, which the cell has not had. Raises `CandidateFault`."""
        self._lay_out(draw)
        answer = self._cell.ask_in_window(
            f"{_ENTRIES}:launches", {"batch": self._name}, self._reveal, self._collect
        )
        check_answer("batch", answer)
        if not self.recorded:
            with malformed_answers_as_forgery():
                self._descriptions = answer.value["outputs"], answer.value["places"]
        return answer.seconds

    def bare_window(self, cell: Cell) -> float:
        """Seconds of a window around the question to another cell, which launches nothing."""
        return cell.ask_in_window(
            f"{_ENTRIES}:launches", {"batch": self._name}, self._reveal, self._collect
        ).seconds

    def collected(self) -> CollectedLaunch:
        """A launch of the last window, chosen in secret, as it was when the window ended."""
        return self._launch(self._sample_number, self._sample_data.clone())

    def launch_now(self, n: int) -> tuple[CollectedLaunch, Glimpse | None]:
        """The launch n of the last window, and a glimpse of all launches, as they are by now."""
        data = torch.empty_like(self._sample_data)
        self._copy_outputs(n, data)
        return self._launch(n, data), self._look()

    def _launch(self, n: int, data: torch.Tensor) -> CollectedLaunch:
        descriptions, inputs = self._descriptions, self._last.given[n]
        slots = self._slots[n] if self.recorded else None

        def output_slots() -> list[Slot]:
            if self._batch_inputs.case.outputs:
                return [s for s in self._batch_inputs.arena.slots if s.output]
            places = self._output_slots(descriptions, n) if slots is None else slots
            return [replace(s, offset=at) for s, at in zip(places, self._starts(places, n), strict=True)]

        return CollectedLaunch(lambda: self._batch_inputs.case_of(inputs), data, output_slots)

    def _output_slots(self, descriptions: tuple[list[Any], list[Any]], n: int) -> list[Slot]:
        """The places of a launch's outputs, by its description. Raises the errors of `malformed_answers_as_forgery`."""
        result, places = [], iter(descriptions[1][n])
        first, end = (0, self._outputs.size) if self.recorded else (n * self._room, (n + 1) * self._room)
        for output in descriptions[0][n]:
            if "problem" in output:
                raise ValueError(output["problem"])
            slot = Slot("output", output["dtype"], tuple(output["shape"]), tuple(output["stride"]), first)
            if slot.bytes:
                slot = replace(slot, offset=next(places))
            if slot.offset < first or slot.offset + slot.bytes > end:
                raise ValueError(f"an output lies at {slot.offset}, outside of the memory for it")
            result.append(slot)
        if sum(aligned_size(s.bytes) for s in result) > self._room:
            raise ValueError("outputs take more room than asked for")
        return result

    def _starts(self, slots: Sequence[Slot], n: int) -> list[int]:
        """Offsets of a launch's outputs in the data that is collected of it."""
        if not self.recorded:
            return [s.offset - n * self._room for s in slots]
        return [0, *itertools.accumulate(aligned_size(s.bytes) for s in slots)][: len(slots)]

    def _lay_out(self, draw: BatchDraw) -> None:
        """Lay out the inputs of the next window, where no cell sees them, and choose the launch to read."""
        self._sample_number, self._last = self._rng.randrange(self.count), draw
        for n, inputs in enumerate(draw.given):
            target = self._next[n * self._stride : n * self._stride + self._pristine.numel()]
            if isinstance(inputs, LaunchCase):
                arena = build_arena(inputs.tensors, inputs.outputs, {}, self._rng, noise=True)
                target.copy_(arena.block)
            else:
                self._rotate(target, inputs)
        self._glimpse_places = self._places(draw)
        self._synchronize()

    def _rotate(self, target: torch.Tensor, turns: Mapping[str, int]) -> None:
        target.copy_(self._pristine)
        for slot in self._batch_inputs.arena.slots:
            if slot.name in turns:
                turn = turns[slot.name] * int(getattr(torch, slot.dtype).itemsize)
                cut, end = slot.offset + turn, slot.offset + slot.bytes
                target[cut:end].copy_(self._pristine[slot.offset : end - turn])
                target[slot.offset : cut].copy_(self._pristine[end - turn : end])

    def _places(self, draw: BatchDraw) -> tuple[torch.Tensor, torch.Tensor, Slot] | None:
        """Memory, indices and form of the bytes that a glimpse reads of each launch; None where there are none."""
        memory, slots_by_launch = self._outputs.tensor, self._slots
        if self._batch_inputs.case.outputs:
            outputs = [s for s in self._batch_inputs.arena.slots if s.output]
            memory = self._inputs.tensor
            slots_by_launch = [[_moved_slot(s, n * self._stride) for s in outputs] for n in range(self.count)]
        if len(slots_by_launch) != len(draw.places) or not slots_by_launch[0]:
            return None
        places = [slots[int(draw.output * len(slots))] for slots in slots_by_launch]
        form, width = places[0], int(getattr(torch, places[0].dtype).itemsize)
        size = min(_GLIMPSE_BYTES, form.bytes) // width * width
        if not size or not all(s.dense and s.bytes == form.bytes for s in places):
            return None
        first = [
            s.offset + int(share * ((form.bytes - size) // width + 1)) * width
            for s, share in zip(places, draw.places, strict=True)
        ]
        at = torch.tensor(first, device=memory.device)[:, None] + torch.arange(size, device=memory.device)
        return memory, at, replace(form, name="", offset=0)

    def _look(self) -> Glimpse | None:
        if self._glimpse_places is None:
            return None
        memory, at, form = self._glimpse_places
        return Glimpse(memory[at], form)

    def _reveal(self) -> None:
        self._inputs.tensor[: self._next.numel()].copy_(self._next)
        self._synchronize()

    def _collect(self) -> None:
        self._copy_outputs(self._sample_number, self._sample_data)
        self.glimpse = self._look()
        self._synchronize()

    def _copy_outputs(self, n: int, target: torch.Tensor) -> None:
        size = target.numel()
        if self.recorded and not self._batch_inputs.case.outputs:
            slots = self._slots[n]
            for slot, at in zip(slots, self._starts(slots, n), strict=True):
                output = self._outputs.tensor[slot.offset : slot.offset + slot.bytes]
                target[at : at + slot.bytes].copy_(output)
        else:
            source = self._inputs if self._batch_inputs.case.outputs else self._outputs
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


def _moved_slot(slot: Slot, by: int) -> Slot:
    return replace(slot, offset=slot.offset + by)


NULL, BARE = 2, 3
"""Cells without a candidate: one whose launches do nothing, and one that answers at once."""
_WARM_UP_ROUNDS, _FEWEST_ROUNDS, _ROUNDS_PER_LOOK = 3, 20, 5
_CONFIDENCE = 0.99
_CONTRADICTED_SHARE = 0.25
"""Windows contradict a claimed gain where theirs is, with confidence, below this share of it."""
_NATIVE_S = 5e-6
"""Seconds that an answer in machine code may save against the trusted cell's lightest one."""
_LEAST_SHARE = 0.02
"""The share of a window that launches take at least, so that a logarithm can be taken."""


class AuditVerdict(StrEnum):
    """The verdict of the judge's clock on a gain."""

    AGREES = "agrees"
    CONTRADICTS = "contradicts"
    UNCLEAR = "unclear"


class AuditUnavailable(Exception):
    """Windows could not be timed, through nobody's fault; the text says why."""


@dataclass
class WindowAudit:
    """Rounds of windows, and the verdict that they lead to.

    On a device, launches are timed inside the contestants' own processes: nothing else resolves a few
    microseconds, and nothing else is so easy to forge. So a candidate that is faster by that clock is launched
    once more beside the incumbent, many times in each of many windows that the judge alone clocks (see
    `LaunchBatches`), until these agree, contradict, or take too long.
    """

    claimed: float
    """The gain by the other clock: natural log of the ratio of times."""
    margin: float
    """A gain below this does not count."""
    windows: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    seconds: float = 0.0

    def run(self, cells: AuditedCells, rng: random.Random, most_rounds: int, most_s: float) -> AuditVerdict:
        """Run window after window, until the verdict is clear or the rounds or seconds are used up."""
        began = time.perf_counter()
        for n in range(_WARM_UP_ROUNDS + most_rounds):
            self._add_round(cells, rng)
            if n + 1 == _WARM_UP_ROUNDS:
                self.windows.clear()
            self.seconds = time.perf_counter() - began
            rounds = n + 1 - _WARM_UP_ROUNDS
            is_over = self.seconds > most_s
            if rounds < _FEWEST_ROUNDS or (rounds % _ROUNDS_PER_LOOK and not is_over):
                continue
            if self.verdict() is not AuditVerdict.UNCLEAR or is_over:
                break
        result = self.verdict()
        if result is AuditVerdict.AGREES:
            cells.check_outputs()
        return result

    def _add_round(self, cells: AuditedCells, rng: random.Random) -> None:
        for name in cells.workloads:
            order = [INCUMBENT, CANDIDATE, NULL, BARE]
            rng.shuffle(order)
            for which in order:
                self.windows.setdefault((which, name), []).append(cells.window(which, name))

    def verdict(self) -> AuditVerdict:
        """The verdict of all rounds so far."""
        low, high = sign_interval(self.differences(), _CONFIDENCE)
        if low > self.margin + self.serving_gain():
            return AuditVerdict.AGREES
        if high < _CONTRADICTED_SHARE * self.claimed:
            return AuditVerdict.CONTRADICTS
        return AuditVerdict.UNCLEAR

    @property
    def gain(self) -> float:
        """Natural log of the ratio of times, by the windows."""
        return statistics.median(self.differences())

    def differences(self) -> list[float]:
        """By round, the mean over workloads of the log of the incumbent's over the candidate's net seconds."""
        logs = []
        for name in self._names:
            idle = statistics.median(self.windows[NULL, name])
            pairs = zip(self.windows[INCUMBENT, name], self.windows[CANDIDATE, name], strict=True)
            logs.append([math.log(_net(theirs, idle) / _net(own, idle)) for theirs, own in pairs])
        return [statistics.fmean(d) for d in zip(*logs, strict=True)]

    def serving_gain(self) -> float:
        """The gain of replacing all code that serves a window, at most, as a natural log; see `NullCell`."""
        logs = []
        for name in self._names:
            null, bare = (sorted(self.windows[which, name]) for which in (NULL, BARE))
            saving = max(0.0, null[len(null) // 5] - bare[len(bare) // 5]) + _NATIVE_S
            theirs = statistics.median(self.windows[INCUMBENT, name])
            rest = 1 - saving / _net(theirs, statistics.median(null))
            logs.append(-math.log(rest) if rest > 0 else math.inf)
        return statistics.fmean(logs)

    @property
    def _names(self) -> list[str]:
        return sorted({name for _, name in self.windows})

    def to_json(self) -> Mapping[str, object]:
        """The comparison, for a verdict's facts."""
        low, high = sign_interval(self.differences(), _CONFIDENCE)
        return {
            "verdict": str(self.verdict()),
            "claimed": round(self.claimed, 5),
            "gain": round(self.gain, 5),
            "interval": [round(low, 5), round(high, 5)],
            "serving": round(min(self.serving_gain(), 99.0), 5),
            "rounds": len(self.differences()),
            "seconds": round(self.seconds, 2),
            "windows_us": {
                f"{which}:{name}": round(1e6 * statistics.median(result), 1)
                for (which, name), result in sorted(self.windows.items())
            },
        }


def _net(window_s: float, idle_s: float) -> float:
    return max(window_s - idle_s, _LEAST_SHARE * window_s)


_WINDOW_S = 20e-3
"""Seconds of launches in a window, where memory allows: what serving them costs is some 0.05 ms."""
_MOST_LAUNCHES, _MOST_DRAWN = 256, 4
"""The most launches in a window; and where each needs arguments that are drawn on the host."""
_MEMORY_SHARE = 0.1
"""The share of the device's free memory for one cell's inputs and outputs. Three cells launch, and the inputs are
there twice."""
_SAMPLES, _LEAST_SAMPLES = 6, 2
"""The candidate's windows of which one launch's outputs are compared with the right ones, in all, and of each
workload: chosen at random among all of them. A candidate that gains by wrong outputs has them in most windows."""
_CONTESTANTS = 2
_MOST_LOOKS = 6
"""Launches of an audit whose outputs are compared in full, as they seem to be wrong."""
_PROBES, _MOST_PROBE_S, _MOST_WAIT_S = 5, 3e-4, 1.0
"""Tiny pieces of work in a row that a device without other work does in so few seconds each, and the most seconds to
wait for that. Processes take turns of milliseconds on a device; nobody can say whose the other work is."""


class AuditedCells:
    """Windows of all four cells, of each workload: those of two judges, and two trusted ones."""

    def __init__(
        self,
        work: JobContext,
        stack: ExitStack,
        pack: Pack,
        judges: Sequence[SolutionExaminer],
        cells: Sequence[Cell],
        seconds: Mapping[str, float],
        workloads: Sequence[Workload],
        device: str,
        as_launched: Collection[str] = (),
    ) -> None:
        """`seconds`: of the incumbent's launch, by workload. Raises `ExportError`, `ContestantRejected`.

        `as_launched`: workloads that are not replayed, as the host's part of their launches counts.
        """
        self.workloads: Sequence[str] = [w.name for w in workloads]
        self._judges, self._device = judges, device
        self._samples: dict[str, list[CollectedLaunch]] = {name: [] for name in self.workloads}
        self._windows = dict.fromkeys(self.workloads, 0)
        """The candidate's windows so far."""
        self._null, self._bare = (stack.enter_context(work.cell()) for _ in range(2))
        Launcher(self._null, PackFormat.OWN, random.Random(), device).prepare("", "", Language.TORCH)
        self._null.freeze()
        self._bare.ask("forecast_harness.verify.launch_cell:serve", {"device": device}, {})
        self._bare.freeze()
        self._batches: dict[tuple[int, str], LaunchBatches] = {}
        self._inputs: dict[str, BatchInputs] = {}
        self._draws: dict[str, tuple[BatchDraw, dict[int, Glimpse | None]]] = {}
        """The inputs of both contestants at each workload, and glimpses of the contestants that have had them."""
        self._looks = _MOST_LOOKS
        self._probe = torch.zeros(64, device=device)
        rng = judges[CANDIDATE].rng
        for workload in workloads:
            case = judges[INCUMBENT].new_case(workload.axes)
            fresh = partial(judges[INCUMBENT].new_case, workload.axes)
            inputs = batch_inputs(case, rotatable_inputs(pack, case), fresh, rng)
            self._inputs[workload.name] = inputs
            share = _MEMORY_SHARE / len(workloads)
            count = batch_size(case, seconds[workload.name], device, share)
            if not inputs.rotatable:
                count = min(count, _MOST_DRAWN)
            for which, cell in ((INCUMBENT, cells[0]), (CANDIDATE, cells[1]), (NULL, self._null)):
                batches = LaunchBatches(cell, workload.name, inputs, count, device, rng)
                self._batches[which, workload.name] = batches
                with self._blame(which):
                    batches.open()
            self._arm(workload.name, record=workload.name not in as_launched)

    def _arm(self, workload: str, *, record: bool) -> None:
        """Arm both contestants: both are recorded, or neither, as a replay leaves the host's part out."""
        contestants = [self._batches[which, workload] for which in (INCUMBENT, CANDIDATE)]
        for which, batches in enumerate(contestants):
            with self._blame(which):
                batches.arm(record=record)
        can_replay = all(batches.recorded for batches in contestants)
        for which, batches in enumerate(contestants):
            if batches.recorded and not can_replay:
                with self._blame(which):
                    batches.arm(record=False)
        self._batches[NULL, workload].arm(contestants[INCUMBENT].forms, record=can_replay)

    @contextmanager
    def _blame(self, which: int) -> Iterator[None]:
        try:
            yield
        except CandidateFault as fault:
            raise ContestantRejected(which, [reason_of_fault(fault, self._judges[which])]) from fault

    def window(self, which: int, workload: str) -> float:
        """Seconds of one window."""
        if self._device != "cpu" and not self._is_idle():
            raise AuditUnavailable(
                f"the device was at work for {_MOST_WAIT_S:g} s when nobody was asked to be"
            )
        if which == BARE:
            return self._batches[NULL, workload].bare_window(self._bare)
        batches = self._batches[which, workload]
        inputs, rng = self._inputs[workload], self._judges[CANDIDATE].rng
        if which == NULL:
            return batches.window(inputs.draw(batches.count, rng))
        if workload not in self._draws or which in self._draws[workload][1]:
            self._draws[workload] = inputs.draw(batches.count, rng), {}
        draw, glimpses = self._draws[workload]
        with self._blame(which):
            seconds = batches.window(draw)
        glimpses[which] = batches.glimpse
        if which == CANDIDATE:
            self._sample(workload, batches)
        if len(glimpses) == _CONTESTANTS:
            self._compare(workload, glimpses[INCUMBENT], glimpses[CANDIDATE])
        return seconds

    def _compare(self, workload: str, theirs: Glimpse | None, own: Glimpse | None) -> None:
        """Compare in full the launches whose outputs are unlike the incumbent's on the same inputs."""
        unlike = [] if theirs is None or own is None else own.unlike(theirs)
        for n in self._judges[CANDIDATE].rng.sample(unlike, min(len(unlike), self._looks)):
            self._looks -= 1
            with self._blame(CANDIDATE):
                launch, now = self._batches[CANDIDATE, workload].launch_now(n)
                case, outputs = launch.read()
            self._check(case, outputs)
            if own is not None and now is not None and n in own.unlike(now):
                where = f"in a window of many launches: {case.label}"
                problem = "its outputs were written after the window had ended"
                raise ContestantRejected(CANDIDATE, [Reason(ReasonCode.CLOCK, problem, where)])

    def _sample(self, workload: str, batches: LaunchBatches) -> None:
        """Keep a window's sample with the same chance for all windows, so that nobody can foresee the choice."""
        samples, most = self._samples[workload], max(_LEAST_SAMPLES, _SAMPLES // len(self.workloads))
        self._windows[workload] += 1
        if len(samples) < most:
            samples.append(batches.collected())
        elif (place := self._judges[CANDIDATE].rng.randrange(self._windows[workload])) < most:
            samples[place] = batches.collected()

    def check_outputs(self) -> None:
        """Compare outputs of windows of the candidate with the right ones. Raises `ContestantRejected`."""
        for sample in itertools.chain(*self._samples.values()):
            with self._blame(CANDIDATE):
                case, outputs = sample.read()
            self._check(case, outputs)

    def _check(self, case: LaunchCase, outputs: Sequence[torch.Tensor]) -> None:
        finding, _ = self._judges[CANDIDATE].compare(case, outputs)
        if finding is not None:
            where = f"in a window of many launches: {case.label}"
            raise ContestantRejected(CANDIDATE, [Reason(*finding, where)])

    def _is_idle(self) -> bool:
        """Wait until nobody else uses the device, within limits: a stopped process may have left work there."""
        ends, quick = time.perf_counter() + _MOST_WAIT_S, 0
        while quick < _PROBES:
            began = time.perf_counter()
            self._probe.add_(1)
            torch.cuda.synchronize()
            now = time.perf_counter()
            quick = quick + 1 if now - began <= _MOST_PROBE_S else 0
            if now > ends:
                return False
        return True


def rotatable_inputs(pack: Pack, case: LaunchCase) -> list[str]:
    """Inputs whose values mean the same in another order: drawn one by one, by no `make`, no weights."""
    if pack.definition.format is not PackFormat.OWN or "def make" in pack.reference:
        return []
    specs = pack.definition.inputs
    return [n for n, t in case.tensors.items() if t.is_floating_point() and not specs[n].static]


def batch_size(case: LaunchCase, seconds: float, device: str, memory_share: float) -> int:
    """The number of launches in a window: those of a few milliseconds, within that share of free memory."""
    launch_bytes = max(1, case.input_bytes + 3 * case.output_bytes)
    free_bytes = torch.cuda.mem_get_info()[0] if device != "cpu" else 8 << 30
    fits = int(memory_share * free_bytes / launch_bytes)
    if fits < 1:
        raise ExportError("the device has too little memory left")
    return max(1, min(_MOST_LAUNCHES, fits, math.ceil(_WINDOW_S / max(seconds, 1e-7))))
