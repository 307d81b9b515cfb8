"""The cells of a contest on a device, opened for windows of the judge: contestants, and two without a candidate."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from forecast_harness.clocks.paired_comparison import CANDIDATE, INCUMBENT
from forecast_harness.sandbox.cell import CandidateFault, Cell
from forecast_harness.sandbox.judge_process import JobContext
from forecast_harness.targets.packs.schema import Language, Pack, PackFormat, Workload
from forecast_harness.verify.judge import SolutionJudge
from forecast_harness.verify.launches.launcher import Launcher
from forecast_harness.verify.problems.problem import LaunchCase
from forecast_harness.verify.verdict import Reason, ReasonCode
from forecast_harness.verify.verification_job import reason_of_fault
from forecast_harness.verify.windows.exported_memory import ExportError
from forecast_harness.verify.windows.launch_batches import (
    BatchDraw,
    BatchInputs,
    CollectedLaunch,
    Glimpse,
    LaunchBatches,
    batch_inputs,
)
from forecast_harness.verify.windows.window_audit import BARE, NULL, AuditUnavailable

_WINDOW_S = 20e-3
"""Seconds of launches in a window, where memory allows: what serving them costs is some 0.05 ms."""
_MOST_LAUNCHES, _MOST_DRAWN = 256, 4
"""In a window; and where each needs arguments that are drawn on the host."""
_MEMORY_SHARE = 0.1
"""Of the device's free memory: what one cell's inputs and outputs may take. Three cells launch, and the inputs are
there twice."""
_SAMPLES, _LEAST_SAMPLES = 6, 2
"""The candidate's windows of which one launch's outputs are compared with what is right, in all, and of each workload:
chosen at random among all of them. Who gains by wrong outputs has them in most windows."""
_CONTESTANTS = 2
_MOST_LOOKS = 6
"""Launches of an audit that are looked at closer, as they seem to be wrong."""
_PROBES, _MOST_PROBE_S, _MOST_WAIT_S = 5, 3e-4, 1.0
"""Tiny pieces of work in a row that a device without other work does in so few seconds each, and how long is waited
for that. Processes take turns of milliseconds on a device; whose the other work is cannot be told."""


class AuditRejected(Exception):
    """A contestant gave a reason to stop."""

    def __init__(self, which: int, reasons: Sequence[Reason]) -> None:
        super().__init__(f"contestant {which}: {reasons}")
        self.which, self.reasons = which, list(reasons)


class AuditedCells:
    """`ClockedCells` over the cells of two judges."""

    def __init__(
        self,
        work: JobContext,
        stack: ExitStack,
        pack: Pack,
        judges: Sequence[SolutionJudge],
        cells: Sequence[Cell],
        seconds: Mapping[str, float],
        workloads: Sequence[Workload],
        device: str,
        as_launched: Collection[str] = (),
    ) -> None:
        """`seconds`: of the incumbent's launch, by workload. Raises `ExportError`, `AuditRejected`.

        `as_launched`: workloads that are not replayed, as the host's part of their launches counts.
        """
        self.workloads: Sequence[str] = [w.name for w in workloads]
        self._judges, self._device = judges, device
        self._samples: dict[str, list[CollectedLaunch]] = {name: [] for name in self.workloads}
        self._windows = dict.fromkeys(self.workloads, 0)
        """Of the candidate, so far."""
        self._null, self._bare = (stack.enter_context(work.cell()) for _ in range(2))
        Launcher(self._null, PackFormat.OWN, random.Random(), device).prepare("", "", Language.TORCH)
        self._null.freeze()
        self._bare.ask("forecast_harness.verify.bare_answers:serve", {"device": device}, {})
        self._bare.freeze()
        self._batches: dict[tuple[int, str], LaunchBatches] = {}
        self._given: dict[str, BatchInputs] = {}
        self._draws: dict[str, tuple[BatchDraw, dict[int, Glimpse | None]]] = {}
        """Of each workload: what both contestants are given, and what was seen of those who have had it."""
        self._looks = _MOST_LOOKS
        self._probe = torch.zeros(64, device=device)
        rng = judges[CANDIDATE].rng
        for work_load in workloads:
            case = judges[INCUMBENT].new_case(work_load.axes)
            fresh = partial(judges[INCUMBENT].new_case, work_load.axes)
            given = batch_inputs(case, rotatable_inputs(pack, case), fresh, rng)
            self._given[work_load.name] = given
            share = _MEMORY_SHARE / len(workloads)
            count = batch_size(case, seconds[work_load.name], device, share)
            if not given.rotatable:
                count = min(count, _MOST_DRAWN)
            for which, cell in ((INCUMBENT, cells[0]), (CANDIDATE, cells[1]), (NULL, self._null)):
                batches = LaunchBatches(cell, work_load.name, given, count, device, rng)
                self._batches[which, work_load.name] = batches
                with self._blamed(which):
                    batches.open()
            self._arm(work_load.name, record=work_load.name not in as_launched)

    def _arm(self, workload: str, *, record: bool) -> None:
        """All are recorded, or none: a replay leaves the host's part out."""
        contestants = [self._batches[which, workload] for which in (INCUMBENT, CANDIDATE)]
        for which, one in enumerate(contestants):
            with self._blamed(which):
                one.arm(record=record)
        recorded = all(one.recorded for one in contestants)
        for which, one in enumerate(contestants):
            if one.recorded and not recorded:
                with self._blamed(which):
                    one.arm(record=False)
        self._batches[NULL, workload].arm(contestants[INCUMBENT].forms, record=recorded)

    @contextmanager
    def _blamed(self, which: int) -> Iterator[None]:
        try:
            yield
        except CandidateFault as fault:
            raise AuditRejected(which, [reason_of_fault(fault, self._judges[which])]) from fault

    def window(self, which: int, workload: str) -> float:
        """Seconds of one window."""
        if self._device != "cpu" and not self._is_idle():
            raise AuditUnavailable(
                f"the device was at work for {_MOST_WAIT_S:g} s when nobody was asked to be"
            )
        if which == BARE:
            return self._batches[NULL, workload].bare_window(self._bare)
        batches = self._batches[which, workload]
        given, rng = self._given[workload], self._judges[CANDIDATE].rng
        if which == NULL:
            return batches.window(given.draw(batches.count, rng))
        if workload not in self._draws or which in self._draws[workload][1]:
            self._draws[workload] = given.draw(batches.count, rng), {}
        draw, seen = self._draws[workload]
        with self._blamed(which):
            seconds = batches.window(draw)
        seen[which] = batches.glimpse
        if which == CANDIDATE:
            self._sample(workload, batches)
        if len(seen) == _CONTESTANTS:
            self._compare(workload, seen[INCUMBENT], seen[CANDIDATE])
        return seconds

    def _compare(self, workload: str, theirs: Glimpse | None, own: Glimpse | None) -> None:
        """Look closer at launches whose outputs are unlike the incumbent's on the same inputs."""
        unlike = [] if theirs is None or own is None else own.unlike(theirs)
        for n in self._judges[CANDIDATE].rng.sample(unlike, min(len(unlike), self._looks)):
            self._looks -= 1
            with self._blamed(CANDIDATE):
                launch, now = self._batches[CANDIDATE, workload].launch_now(n)
                case, outputs = launch.read()
            self._check(case, outputs)
            if own is not None and now is not None and n in own.unlike(now):
                where = f"in a window of many launches: {case.label}"
                said = "its outputs were written after the window had ended"
                raise AuditRejected(CANDIDATE, [Reason(ReasonCode.CLOCK, said, where)])

    def _sample(self, workload: str, batches: LaunchBatches) -> None:
        """Keep a window with the same chance for all, so that nobody can tell which are kept in the end."""
        kept, most = self._samples[workload], max(_LEAST_SAMPLES, _SAMPLES // len(self.workloads))
        self._windows[workload] += 1
        if len(kept) < most:
            kept.append(batches.collected())
        elif (place := self._judges[CANDIDATE].rng.randrange(self._windows[workload])) < most:
            kept[place] = batches.collected()

    def check_outputs(self) -> None:
        """Compare outputs of windows of the candidate with what is right. Raises `AuditRejected`."""
        for sample in itertools.chain(*self._samples.values()):
            with self._blamed(CANDIDATE):
                case, outputs = sample.read()
            self._check(case, outputs)

    def _check(self, case: LaunchCase, outputs: Sequence[torch.Tensor]) -> None:
        finding, _ = self._judges[CANDIDATE].compare(case, outputs)
        if finding is not None:
            where = f"in a window of many launches: {case.label}"
            raise AuditRejected(CANDIDATE, [Reason(*finding, where)])

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
    known = pack.definition.inputs
    return [n for n, t in case.tensors.items() if t.is_floating_point() and not known[n].static]


def batch_size(case: LaunchCase, seconds: float, device: str, memory_share: float) -> int:
    """How many launches a window has: those of a few milliseconds, as far as that share of free memory reaches."""
    each = max(1, case.input_bytes + 3 * case.output_bytes)
    free = torch.cuda.mem_get_info()[0] if device != "cpu" else 8 << 30
    fits = int(memory_share * free / each)
    if fits < 1:
        raise ExportError("the device has too little memory left")
    return max(1, min(_MOST_LAUNCHES, fits, math.ceil(_WINDOW_S / max(seconds, 1e-7))))
