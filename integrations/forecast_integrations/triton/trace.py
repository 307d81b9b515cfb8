"""TTIR of a live call's candidates: remembered, and traced and read in children.

A child answers with what its parent needs for a forecast, the facts, and with the compressed text for later
shapes. To trace or to read a long kernel takes tens of milliseconds, in which the parent can do something else.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from forecast_autotune.features.candidate_list import Grid
from forecast_autotune.features.trace import load_front_end, trace_many
from forecast_autotune.features.traced_texts import CompressedText, TracedTexts, decode_facts, encode_facts
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.features.ttir.parser import FeatureError
from forecast_autotune.records import Argument, Candidate, Problem
from forecast_autotune.tuning.tracing import READ_HERE_CHARACTERS
from forecast_integrations.triton.compile.children import DispatchedTask, Dispatcher, ForkedChildren
from forecast_integrations.triton.compile.pool import can_fork, without_device
from forecast_integrations.triton.problem.call import KernelCall

_TIMEOUT_S, _TIMEOUT_PER_JOB_S = 20.0, 2.0
"""Children that take longer are given up, and their share is traced here. Cores are shared, and long kernels
take a quarter of a second each where nobody else has work."""
_POLL_S = 0.25
_NICE = 2
"""Children yield to the main process, and those that compile to them: compilations depend on their answers."""


@dataclass(frozen=True)
class _TraceJob:
    """One assignment to trace, and to read at these launch grids."""

    name: str
    candidate: Candidate
    grids: tuple[Grid, ...]
    text: str | CompressedText | None
    """Where it was traced before, and is only to be read."""


@dataclass(frozen=True)
class _Reader:
    """The work of a child on its share of the jobs; it answers for each by name."""

    call: KernelCall
    arguments: tuple[Argument, ...]

    def answer(self, jobs: Sequence[_TraceJob]) -> dict[str, list[Any] | None]:
        """[compressed text, its length, facts as `encode_facts` gives them]; None where there is no TTIR."""
        texts: dict[str, str | CompressedText | None] = {job.name: job.text for job in jobs}
        texts |= self.traced([job for job in jobs if job.text is None])
        answers: dict[str, list[Any] | None] = {}
        for job in jobs:
            text = texts[job.name]
            if text is None:
                answers[job.name] = None
                continue
            whole = text.expand() if isinstance(text, CompressedText) else text
            facts = encode_facts(whole, self.arguments, job.grids)
            packed = CompressedText.of(whole) if job.text is None else None
            answers[job.name] = [packed and packed.data, packed and packed.characters, facts]
        return answers

    def _assignment(self, job: _TraceJob) -> dict[str, object]:
        """The meta-parameters of a job; host-side descriptors are set for it, as it is traced next."""
        self.call.set_descriptors(job.candidate)
        return {
            **self.call.configs[job.candidate].kwargs,
            **self.call.under_heuristics(job.candidate)[1],
        }

    def traced(self, jobs: Sequence[_TraceJob]) -> dict[str, str | None]:
        """Texts by assignment; None where there is none."""
        call = self.call
        kwargs = {k: v for k, v in call.kwargs.items() if k not in ("grid", "warmup")}
        own = [job for job in jobs if job.candidate.variant not in call.functions]
        fn = call.under_heuristics(own[0].candidate)[0] if own else None
        texts: list[str | FeatureError] = [
            text for _, text in trace_many(fn, call.args, kwargs, map(self._assignment, own))
        ]
        others = [job for job in jobs if job.candidate.variant in call.functions]
        texts += [_trace_variant(call, job.candidate) for job in others]
        return {
            job.name: text if isinstance(text, str) else None
            for job, text in zip([*own, *others], texts, strict=True)
        }


class ChildTracer:
    """Traces candidates of one call, in children where that pays; a `BackgroundTracer`."""

    def __init__(
        self,
        call: KernelCall,
        known: TracedTexts,
        workers: int,
        problem: Problem,
        grids: Mapping[Candidate, tuple[int, ...]],
    ) -> None:
        """Texts are remembered in `known`; about `workers` children trace at once, none if that is one.

        The facts of `problem` come along, for `grids` that depend on the candidate. Other shapes of the same kind have
        the same texts; an assignment that cannot be traced has none.
        """
        self._call, self._known, self._workers = call, known, workers
        self._problem, self._grids = problem, grids
        self._reader = _Reader(call, problem.arguments)
        self._children = ForkedChildren(_NICE)
        self._dispatchers: list[Dispatcher] = []
        self._in_children: dict[str, _TraceJob] = {}
        self._left: dict[str, _TraceJob] = {}
        """To be done in this process, when somebody waits."""
        self._done = TracedTexts(problem.arguments)

    def __call__(self, wanted: Sequence[Candidate]) -> TracedTexts:
        """TTIR by assignment, traced before this returns; untraceable ones are left out."""
        self._queue(wanted)
        self._start_children(least=2)
        while self._in_children:
            self._listen(_POLL_S)
        self._work_here(len(self._left))
        return self.poll(0.0)

    def start(self, wanted: Sequence[Candidate]) -> None:
        """Begin to trace in children; without those, `poll` traces one assignment at a time.

        Known candidates that no child reads are read before this returns.
        """
        self._queue(wanted)
        self._start_children(least=1)
        if all(job.text is not None for job in self._left.values()):
            self._work_here(len(self._left))

    def poll(self, timeout_s: float) -> TracedTexts:
        """Texts and facts that have come since the last time, waiting for some for at most `timeout_s` seconds."""
        limit = time.perf_counter() + timeout_s
        while self._in_children:
            wait = 0.0 if len(self._done) or self._left else max(0.0, limit - time.perf_counter())
            self._listen(wait)
            if wait == 0.0:
                break
        if self._left and not len(self._done):
            self._work_here(1)
        done, self._done = self._done, TracedTexts(self._problem.arguments)
        return done

    @property
    def outstanding(self) -> int:
        """Assignments that have no answer yet."""
        return len(self._in_children) + len(self._left)

    def close(self) -> None:
        """Kill the children and forget what was asked."""
        self._close_children()
        self._in_children.clear()
        self._left.clear()

    def _close_children(self) -> None:
        self._children.close()
        for dispatcher in self._dispatchers:
            dispatcher.close()
        self._dispatchers.clear()

    def _queue(self, wanted: Sequence[Candidate]) -> None:
        """Jobs for what is wanted."""
        by_name: dict[str, list[Candidate]] = {}
        for candidate in wanted:
            by_name.setdefault(assignment_of(candidate), []).append(candidate)
        for name, some in by_name.items():
            if self._call.depends_on_call(some[0]):
                self._known.pop(name, None)
            text = self._known.stored(name) if name in self._known else None
            grids = tuple(dict.fromkeys(self._grids.get(c, self._problem.grid) for c in some))
            self._left[name] = _TraceJob(name, some[0], grids, text)

    def _start_children(self, least: int) -> None:
        """Hand what is left to children if that pays: for `least` traces, or for long texts to read."""
        traces = sum(job.text is None for job in self._left.values())
        characters = sum(_length(job.text) for job in self._left.values())
        few = traces < least and characters <= READ_HERE_CHARACTERS
        if few or self._workers < 2 or not can_fork():
            return
        try:
            _ = self._call.computed  # here, before the fork
            answer = without_device(self._reader.answer)
        except RuntimeError:  # no driver here: a child could not know the target
            return
        jobs = list(self._left.values())
        count = _children_for(len(jobs), self._workers)
        shares = [jobs[i::count] for i in range(count)]
        dispatcher = Dispatcher({"share": lambda i: answer(shares[i])}, len(shares), _NICE)
        self._dispatchers.append(dispatcher)
        for i, share in enumerate(shares):
            dispatched = DispatchedTask(dispatcher, "share", i) if len(shares) > 1 else None
            with contextlib.suppress(OSError):
                self._children.start(share, partial(answer, share), dispatched)
                for job in share:
                    self._in_children[job.name] = self._left.pop(job.name)
        if traces:
            # After the fork, as children that need it now load it side by side; those to come find it here.
            load_front_end()

    def _listen(self, timeout_s: float) -> None:
        """Hear children for that long at most. Jobs that one could not answer are left for this process."""
        ended = self._children.finished(timeout_s)[0]
        for child, _ in ended:
            with contextlib.suppress(ValueError):
                self._take(child.answer())
            self._leave(child.tag)
        for child in self._children.overdue(_TIMEOUT_S):
            if child in self._children.overdue(_timeout_s(child.tag)):
                self._children.kill(child)
                self._leave(child.tag)
        if not len(self._children):
            self._close_children()

    def _leave(self, jobs: Iterable[_TraceJob]) -> None:
        for job in jobs:
            if (kept := self._in_children.pop(job.name, None)) is not None:
                self._left[job.name] = kept

    def _work_here(self, count: int) -> None:
        """Do so many of the jobs that are left in this process."""
        jobs = [self._left.pop(name) for name in list(self._left)[:count]]
        traced = self._reader.traced([job for job in jobs if job.text is None])
        for job in jobs:
            text = job.text
            if text is None and (new := traced[job.name]) is not None:
                text = self._known[job.name] = new
            if text is not None:
                self._done.add(job.name, text)
                for grid in job.grids:
                    self._done.facts(job.name, self._done.arguments, grid)

    def _take(self, answers: Mapping[str, list[Any] | None]) -> None:
        for name, answer in answers.items():
            self._in_children.pop(name, None)
            if answer is None:
                continue
            data, characters, facts = answer
            if data is not None:
                self._known.add(name, CompressedText(data, characters))
            if name in self._known:
                self._done.add(name, self._known.stored(name), decode_facts(facts))


def _children_for(jobs: int, workers: int) -> int:
    """How many children do so many jobs: one each, up to half as many again as there are workers.

    With 18 jobs for 16 children two would have two, and take twice as long as the others.
    """
    return jobs if jobs <= 1.5 * workers else workers


def _timeout_s(jobs: Sequence[_TraceJob]) -> float:
    """Seconds for a child with these jobs."""
    return _TIMEOUT_S + _TIMEOUT_PER_JOB_S * len(jobs)


def _trace_variant(call: KernelCall, candidate: Candidate) -> str | FeatureError:
    """The text of another source's candidate, or why there is none."""
    try:
        function = call.functions[candidate.variant]
        kernel, args, kwargs, meta = function.trace_inputs(call.args, call.kwargs, call.configs[candidate])
    except Exception as error:
        return FeatureError(f"{candidate} cannot be bound: {error!r}")
    ((_, text),) = trace_many(kernel, args, kwargs, [meta])
    return text


def _length(text: str | CompressedText | None) -> int:
    if text is None:
        return 0
    return text.characters if isinstance(text, CompressedText) else len(text)
