"""The trials of one solution, and what follows from each. Runs in the judge, beside no candidate code.

Checks and timings are one kind of launch at random places of one sequence, so a solution cannot tell which
outputs will be looked at. It gets fresh contents at the same addresses, nearly equal contents, equal contents
at other addresses, and memory full of NaN around and below everything.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from forecast_harness.packs.schema import Format, Language, Pack, Workload
from forecast_harness.sandbox.cell import CandidateFault
from forecast_harness.sandbox.jobs import Answer, Array, Fault
from forecast_harness.timing.plausible import clocks_disagree, impossible, slow_at_first
from forecast_harness.verify.arena import Arena, build, changed
from forecast_harness.verify.plan import Plan
from forecast_harness.verify.problem import Case, Draw, Problem
from forecast_harness.verify.verdict import Code, Reason

INSIDE = "forecast_harness.verify.inside"

_ALLOWED_OPERATIONS = [
    "empty",
    "zeros",
    "ones",
    "full",
    "fill",
    "zero_",
    "copy_",
    "_to_copy",
    "view",
    "reshape",
    "as_strided",
    "slice",
    "select",
    "transpose",
    "permute",
    "expand",
    "unsqueeze",
    "squeeze",
    "t",
    "alias",
    "detach",
    "clone",
    "set_",
    "arange",
    "resize_",
    "_reshape_alias",
    "is_pinned",
    "lift_fresh",
    "new_empty",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_strided",
    "new_empty_strided",
    "contiguous",
    "unbind",
    "split",
    "narrow",
    "_unsafe_view",
    "item",
    "_local_scalar_dense",
    "to",
    "scalar_tensor",
    "record_stream",
]
"""Operations that move or make data, but compute nothing: a launcher may use them on whole tensors."""


class Asked(Protocol):
    """What the judge needs of a `sandbox.Cell`: a process to ask."""

    def ask(self, entry: str, payload: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        """Call `module:function` there. Raises `CandidateFault` when the candidate fails."""


@dataclass
class Reply:
    """One launch as the judge sees it."""

    case: Case
    arena: Arena
    outputs: list[torch.Tensor]
    raw: Mapping[str, bytes]
    seconds: float
    outside: float
    reasons: list[Reason]
    operations: Mapping[str, int] = field(default_factory=dict)
    """Of the framework, if they were watched: name -> most elements that one call touched."""
    compiled: int = 0
    """Kernels compiled during the launch."""


class Judge:
    """Asks one cell, holding all state of one candidate's examination."""

    def __init__(
        self,
        pack: Pack,
        problem: Problem,
        cell: Asked,
        plan: Plan,
        seed: bytes,
    ) -> None:
        self._definition, self._problem, self._workloads = pack.definition, problem, pack.checked_workloads
        self._pack = pack
        self._cell, self.plan = cell, plan
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(self.rng.getrandbits(63))
        self.trials = 0
        self.worst = 0.0
        self._history: list[float] = []
        self._built = False
        self._state: Mapping[str, torch.Tensor] | None = None

    def prepare(self, file: str, entry: str, language: Language) -> list[Reason]:
        """Have the candidate imported; reasons to go no further."""
        self._language = language
        answer = self._cell.ask(
            f"{INSIDE}:prepare",
            {
                "file": file,
                "entry": entry,
                "language": str(language),
                "format": str(self._definition.format),
                "device": self.plan.device,
            },
            {},
        )
        with _sensible():
            return _harness(answer.value, "import")

    def examine(self, *, timed: bool = True) -> list[Reason]:
        """All trials, up to the first that finds something; its reasons, none if all is well.

        Without `timed`, launches in a row are left out, and with them all that clocks show.
        """
        for step in (self._variety, *([self._in_a_row] if timed else []), self._kernels):
            if reasons := step():
                return reasons
        return []

    def share(self, work: Workload) -> float:
        """The share of timed launches of a workload that are checked: large ones cost seconds each."""
        return self.plan.checked / (10 if work.large else 1)

    def new_case(
        self, axes: Mapping[str, Any] | None, regime: str = "normal", layout: str = "contiguous"
    ) -> Case:
        """Fresh arguments; None draws hidden axes."""
        return self._problem.case(axes, Draw(regime, layout, self.generator))

    def launch(self, case: Case, *, shift: int = 0, watch: str = "", repeat: Arena | None = None) -> Reply:
        """One launch with every check that needs no reference."""
        arena = repeat or build(case.tensors, case.outputs, case.layouts, self.rng, shift=shift)
        payload: dict[str, Any] = {
            "slots": [s.to_json() for s in arena.slots],
            "call": case.call,
            "output_bytes": case.output_bytes,
            "watch": watch,
        }
        arrays = {"block": Array("uint8", (arena.block.numel(),), arena.data())}
        if self._definition.format is Format.KERNELBENCH and self._state is not case.state:
            if not self._built:
                payload["init"] = case.call["init"]
                self._built = True
            arrays |= {f"state.{n}": _array(t) for n, t in case.state.items()}
            self._state = case.state
        begin = time.perf_counter()
        answer = self._cell.ask(f"{INSIDE}:launch", payload, arrays)
        outside = time.perf_counter() - begin
        self.trials += 1
        with _sensible():
            return self._reply(case, arena, answer, outside, watch)

    def _reply(self, case: Case, arena: Arena, answer: Answer, outside: float, watch: str) -> Reply:
        label = f"{self.trials}: {case.label}"
        reasons = _harness(answer.value, label)
        outputs, said = _outputs(answer, arena)
        reasons += [Reason(code, text, label) for code, text in said]
        if not watch:
            inputs, stray = changed(arena, answer.arrays["block"].data)
            if inputs:
                reasons.append(Reason(Code.MUTATED_INPUT, f"changed its input {', '.join(inputs)}", label))
            if stray:
                text = f"changed {stray} bytes outside every tensor"
                reasons.append(Reason(Code.OUT_OF_BOUNDS, text, label))
        seconds = float(answer.value["seconds"])
        if (
            self._language is Language.TRITON
            and not int(answer.value["kernels"])
            and any(t.numel() for t in outputs)
        ):
            reasons.append(Reason(Code.NO_KERNEL, "it launches no Triton kernel", label))
        operations = {str(n): int(size) for n, size in answer.value["operations"].items()}
        if not watch:
            self._history.append(seconds)
        raw = {n: a.data for n, a in answer.arrays.items()}
        compiled = int(answer.value["compiled"])
        return Reply(case, arena, outputs, raw, seconds, outside, reasons, operations, compiled)

    def checked(self, reply: Reply) -> list[Reason]:
        """The reasons of a launch, its values compared to the reference, too."""
        if reply.reasons:
            return reply.reasons
        finding, ratio = reply.case.check(reply.outputs)
        self.worst = max(self.worst, ratio)
        return [Reason(*finding, f"{self.trials}: {reply.case.label}")] if finding else []

    def _variety(self) -> list[Reason]:
        inputs = self._definition.inputs.values()
        regimes = sorted({v for t in inputs for v in t.values}) or ["normal"]
        layouts = sorted({v for t in inputs for v in t.layouts}) or ["contiguous"]
        ways = list(itertools.product(regimes, layouts))
        self.rng.shuffle(ways)
        for n in range(max(self.plan.cases, len(regimes), len(layouts))):
            # Every regime and every layout occurs, whatever the order that was drawn.
            regime, layout = ways[n % len(ways)]
            axes = None if n % 3 else self._workloads[(n // 3) % len(self._workloads)].axes
            shift = self.rng.choice((0, 0, self.rng.randrange(1, 64)))
            case = self.new_case(axes, regimes[n % len(regimes)] if n < len(regimes) else regime, layout)
            first = self.launch(case, shift=shift)
            if reasons := self.checked(first) or self._later(first):
                return reasons
            if n % 3 == 0 and (reasons := self.checked(self.launch(case.twin(self.generator), shift=shift))):
                return reasons
            if n % 3 == 1 and (reasons := self._repeated(first)):
                return reasons
        return []

    def _later(self, reply: Reply) -> list[Reason]:
        """Outputs are read when the solution returns, and once more: they must not have changed."""
        answer = self._cell.ask(f"{INSIDE}:again", {}, {})
        if {n: a.data for n, a in answer.arrays.items()} == reply.raw:
            return []
        text = "an output changed after the solution had returned"
        return [Reason(Code.LATE_WRITE, text, f"{self.trials}: {reply.case.label}")]

    def _repeated(self, first: Reply) -> list[Reason]:
        """Equal inputs at other addresses, between other bytes: right again, and equal if so promised."""
        second = self.launch(first.case, shift=self.rng.randrange(1, 64))
        if reasons := self.checked(second):
            return reasons
        if not self._problem.deterministic or not self._definition.deterministic:
            return []
        pairs = zip(first.outputs, second.outputs, strict=True)
        if all(torch.equal(_bits(a), _bits(b)) for a, b in pairs):
            return []
        text = "equal inputs gave different bits, and the definition promises equal ones"
        return [Reason(Code.NONDETERMINISTIC, text, f"{self.trials}: {first.case.label}")]

    def _kernels(self) -> list[Reason]:
        """Who computes: the solution's own kernels, or the framework?"""
        if self._language is Language.TORCH:
            return []
        case = self.new_case(self._workloads[0].axes)
        reply = self.launch(case, watch="operations")
        if reasons := self.checked(reply):
            return reasons
        label = f"{self.trials}: {case.label}"
        largest = max((t.numel() for t in reply.outputs), default=0)
        library = sorted(n for n, size in reply.operations.items() if _computes(n, size, largest))
        if library:
            return [Reason(Code.LIBRARY_COMPUTES, f"the framework computes: {', '.join(library)}", label)]
        if self._language is not Language.TRITON:
            return []
        try:
            silent = self.launch(self.new_case(self._workloads[0].axes), watch="off")
        except CandidateFault:
            return []  # what comes after the kernel could not do without it
        if not silent.reasons and silent.case.check(silent.outputs)[0] is None:
            text = "the result is right although no kernel ran, so the kernels are decoys"
            return [Reason(Code.NO_KERNEL, text, f"{self.trials}: {silent.case.label}")]
        return []

    def _in_a_row(self) -> list[Reason]:
        """Launches as they are timed, in a number the solution cannot know, and some of them checked."""
        timed = self._pack.timed_workloads(self.plan.device, self._language)
        work = timed[self.rng.randrange(len(timed))]
        count = self.plan.timed + self.rng.randrange(self.plan.timed + 1)
        chosen = {count - 1} | {n for n in range(count) if self.rng.random() < self.share(work)}
        replies: list[Reply] = []
        idle: list[float] = []
        case = self.new_case(work.axes)
        for n in range(count):
            case = self.new_case(work.axes) if n % 4 == 0 or n in chosen else case.twin(self.generator)
            if n % 2:
                idle.append(self.idle(case))
            reply = self.launch(case)
            if reasons := (self.checked(reply) if n in chosen else reply.reasons):
                return reasons
            if n:  # the first may compile
                if reasons := self.possible(reply):
                    return reasons
                replies.append(reply)
        return self.believable(replies, idle)

    def idle(self, case: Case) -> float:
        """Seconds of a question of the same size that launches nothing.

        To be asked where a launch would have been: a cell that was asked a moment ago answers sooner than
        one that has slept.
        """
        arena = build(case.tensors, case.outputs, case.layouts, self.rng)
        arrays = {"block": Array("uint8", (arena.block.numel(),), arena.data())}
        begin = time.perf_counter()
        self._cell.ask(f"{INSIDE}:idle", {"output_bytes": case.output_bytes}, arrays)
        return time.perf_counter() - begin

    def possible(self, reply: Reply) -> list[Reason]:
        """A reason if one timed launch was faster than the device can be, or compiled."""
        case = reply.case
        if reply.compiled:
            text = f"compiled {reply.compiled} kernels during a launch that is timed"
            return [Reason(Code.COMPILES_WHILE_TIMED, text, case.label)]
        said = impossible(reply.seconds, case.moved_bytes, case.flops, self.plan.peaks)
        return [Reason(Code.IMPOSSIBLE, said, case.label)] if said else []

    def believable(self, replies: Sequence[Reply], idle: Sequence[float]) -> list[Reason]:
        """Reasons not to believe the times of launches of one workload."""
        label = f"{len(replies)} timed launches"
        if not replies:
            return []
        said = clocks_disagree([r.seconds for r in replies], [r.outside for r in replies], idle)
        said = said or slow_at_first(self._history[1:])
        return [Reason(Code.CLOCK, said, label)] if said else []


@contextmanager
def _sensible() -> Iterator[None]:
    """Read an answer. The cell's own code never gives one that breaks the form: the candidate did."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CandidateFault(Fault.FORGED, f"an answer makes no sense: {error!r}") from error


def _computes(name: str, size: int, largest: int) -> bool:
    """Whether a framework operation does arithmetic on tensors of the problem's size."""
    plain = name.partition("::")[2].partition(".")[0]
    return plain not in _ALLOWED_OPERATIONS and size > 0 and size * 8 >= largest


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _array(tensor: torch.Tensor) -> Array:
    from forecast_harness.sandbox.tensors import pack

    return pack(tensor)


def _harness(value: Mapping[str, Any], label: str) -> list[Reason]:
    """What the cell noticed about its own process."""
    found, report = [], value["harness"]
    if report["patched"]:
        found.append(Reason(Code.PATCHED, f"replaced {', '.join(report['patched'])}", label))
    if report["flags"]:
        changes = ", ".join(f"{n} to {v}" for n, v in report["flags"].items())
        found.append(Reason(Code.GLOBAL_STATE, f"set {changes} for the whole process", label))
    if report["threads"]:
        found.append(Reason(Code.THREADS, f"left threads running: {report['threads']}", label))
    return found


def _outputs(answer: Answer, arena: Arena) -> tuple[list[torch.Tensor], list[tuple[Code, str]]]:
    """Tensors made of the bytes that came back, and what is wrong with their form."""
    given = [s for s in arena.slots if s.output]
    if given:
        data = torch.frombuffer(bytearray(answer.arrays["block"].data), dtype=torch.uint8)
        return [s.view(data).clone() for s in given], []
    outputs: list[torch.Tensor] = []
    said: list[tuple[Code, str]] = []
    for n, about in enumerate(answer.value["outputs"]):
        if "problem" in about:
            said.append((Code.WRONG_STRUCTURE, str(about["problem"])))
            continue
        if about["alias"]:
            said.append((Code.ALIASES_INPUT, f"output {n} lies in the memory of the inputs"))
        data = answer.arrays[f"out{n}"].data
        dtype = getattr(torch, about["dtype"])
        if not data:
            outputs.append(torch.empty(about["shape"], dtype=dtype))
            continue
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
        outputs.append(flat.as_strided(about["shape"], about["stride"]))
    return outputs, said
