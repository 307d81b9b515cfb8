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
"""Children that take longer are killed, and their share is traced here. Cores are shared, and a long kernel takes a
quarter of a second even on an idle host."""
_POLL_S = 0.25
_NICE = 2
"""Niceness of tracing children, between that of the main process and of compiling children, which depend on them."""


@dataclass(frozen=True)
class _TraceJob:
    """One assignment to trace, and to read at these launch grids."""

    name: str
    candidate: Candidate
    grids: tuple[Grid, ...]
    text: str | CompressedText | None
    """The text of an earlier trace, which the child only reads."""


@dataclass(frozen=True)
class _Reader:
    """The work of a child on its share of the jobs, with one answer per job's name."""

    call: KernelCall
    arguments: tuple[Argument, ...]

    def answer(self, jobs: Sequence[_TraceJob]) -> dict[str, list[Any] | None]:
        """[compressed text, its length, facts as `encode_facts` gives them]; None where there is no TTIR."""
        texts: dict[str, str | CompressedText | None] = {job.name: job.text for job in jobs}
        texts |= self.trace([job for job in jobs if job.text is None])
        answers: dict[str, list[Any] | None] = {}
        for job in jobs:
            text = texts[job.name]
            if text is None:
                answers[job.name] = None
                continue
            whole = text.expand() if isinstance(text, CompressedText) else text
            facts = encode_facts(whole, self.arguments, job.grids)
            compressed = CompressedText.of(whole) if job.text is None else None
            answers[job.name] = [compressed and compressed.data, compressed and compressed.characters, facts]
        return answers

    def _assignment(self, job: _TraceJob) -> dict[str, object]:
        """The meta-parameters of a job; host-side descriptors are set for it, as it is traced next."""
        self.call.set_descriptors(job.candidate)
        return {
            **self.call.configs[job.candidate].kwargs,
            **self.call.under_heuristics(job.candidate)[1],
        }

    def trace(self, jobs: Sequence[_TraceJob]) -> dict[str, str | None]:
        """Texts by assignment; None where there is none."""
        call = self.call
        kwargs = {k: v for k, v in call.kwargs.items() if k not in ("grid", "warmup")}
        own = [job for job in jobs if job.candidate.variant not in call.functions]
        fn = call.under_heuristics(own[0].candidate)[0] if own else None
        texts: list[str | FeatureError] = [
            text for _, text in trace_many(fn, call.args, kwargs, map(self._assignment, own))
        ]
        variants = [job for job in jobs if job.candidate.variant in call.functions]
        texts += [_trace_variant(call, job.candidate) for job in variants]
        return {
            job.name: text if isinstance(text, str) else None
            for job, text in zip([*own, *variants], texts, strict=True)
        }


class ChildTracer:
    """Traces candidates of one call, in children where that pays; a `BackgroundTracer`."""

    def __init__(
        self,
        call: KernelCall,
        texts: TracedTexts,
        workers: int,
        problem: Problem,
        grids: Mapping[Candidate, tuple[int, ...]],
    ) -> None:
        """Texts are remembered in `texts`; about `workers` children trace at once, none if that is one.

        The facts of `problem` come along, for `grids` that depend on the candidate. Other shapes of the same kind have
        the same texts; an assignment that cannot be traced has none.
        """
        self._call, self._texts, self._workers = call, texts, workers
        self._problem, self._grids = problem, grids
        self._reader = _Reader(call, problem.arguments)
        self._children = ForkedChildren(_NICE)
        self._dispatchers: list[Dispatcher] = []
        self._in_children: dict[str, _TraceJob] = {}
        self._open_jobs: dict[str, _TraceJob] = {}
        """Jobs for this process, done while a caller waits."""
        self._answers = TracedTexts(problem.arguments)

    def __call__(self, candidates: Sequence[Candidate]) -> TracedTexts:
        """TTIR by assignment, traced before this returns; untraceable ones are left out."""
        self._queue(candidates)
        self._start_children(least=2)
        while self._in_children:
            self._listen(_POLL_S)
        self._work_here(len(self._open_jobs))
        return self.poll(0.0)

    def start(self, candidates: Sequence[Candidate]) -> None:
        """Begin to trace in children; without those, `poll` traces one assignment at a time.

        Known candidates that no child reads are read before this returns.
        """
        self._queue(candidates)
        self._start_children(least=1)
        if all(job.text is not None for job in self._open_jobs.values()):
            self._work_here(len(self._open_jobs))

    def poll(self, timeout_s: float) -> TracedTexts:
        """Texts and facts that have come since the last time, waiting for some for at most `timeout_s` seconds."""
        limit = time.perf_counter() + timeout_s
        while self._in_children:
            wait = 0.0 if len(self._answers) or self._open_jobs else max(0.0, limit - time.perf_counter())
            self._listen(wait)
            if wait == 0.0:
                break
        if self._open_jobs and not len(self._answers):
            self._work_here(1)
        answers, self._answers = self._answers, TracedTexts(self._problem.arguments)
        return answers

    @property
    def outstanding(self) -> int:
        """Assignments that have no answer yet."""
        return len(self._in_children) + len(self._open_jobs)

    def close(self) -> None:
        """Kill the children and forget what was asked."""
        self._close_children()
        self._in_children.clear()
        self._open_jobs.clear()

    def _close_children(self) -> None:
        self._children.close()
        for dispatcher in self._dispatchers:
            dispatcher.close()
        self._dispatchers.clear()

    def _queue(self, candidates: Sequence[Candidate]) -> None:
        """Add a job for each assignment of the candidates."""
        by_name: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            by_name.setdefault(assignment_of(candidate), []).append(candidate)
        for name, group in by_name.items():
            if self._call.depends_on_call(group[0]):
                self._texts.pop(name, None)
            text = self._texts.stored(name) if name in self._texts else None
            grids = tuple(dict.fromkeys(self._grids.get(c, self._problem.grid) for c in group))
            self._open_jobs[name] = _TraceJob(name, group[0], grids, text)

    def _start_children(self, least: int) -> None:
        """Give the open jobs to children if that pays: for `least` traces, or for long texts to read."""
        traces = sum(job.text is None for job in self._open_jobs.values())
        characters = sum(_length(job.text) for job in self._open_jobs.values())
        too_little = traces < least and characters <= READ_HERE_CHARACTERS
        if too_little or self._workers < 2 or not can_fork():
            return
        try:
            _ = self._call.computed  # here, before the fork
            answer = without_device(self._reader.answer)
        except RuntimeError:  # no driver here: a child could not know the target
            return
        jobs = list(self._open_jobs.values())
        count = _children_for(len(jobs), self._workers)
        shares = [jobs[i::count] for i in range(count)]
        dispatcher = Dispatcher({"share": lambda i: answer(shares[i])}, len(shares), _NICE)
        self._dispatchers.append(dispatcher)
        for i, share in enumerate(shares):
            task = DispatchedTask(dispatcher, "share", i) if len(shares) > 1 else None
            with contextlib.suppress(OSError):
                self._children.start(share, partial(answer, share), task)
                for job in share:
                    self._in_children[job.name] = self._open_jobs.pop(job.name)
        if traces:
            # After the fork, as children that need it now load it side by side; those to come find it here.
            load_front_end()

    def _listen(self, timeout_s: float) -> None:
        """Collect answers of children for at most `timeout_s`; a failed child's jobs return to this process."""
        children = self._children.finished(timeout_s)[0]
        for child, _ in children:
            with contextlib.suppress(ValueError):
                self._add_answers(child.answer())
            self._reopen(child.tag)
        for child in self._children.overdue(_TIMEOUT_S):
            if child in self._children.overdue(_timeout_s(child.tag)):
                self._children.kill(child)
                self._reopen(child.tag)
        if not len(self._children):
            self._close_children()

    def _reopen(self, jobs: Iterable[_TraceJob]) -> None:
        for job in jobs:
            if (own_job := self._in_children.pop(job.name, None)) is not None:
                self._open_jobs[job.name] = own_job

    def _work_here(self, count: int) -> None:
        """Do `count` of the open jobs in this process."""
        jobs = [self._open_jobs.pop(name) for name in list(self._open_jobs)[:count]]
        texts = self._reader.trace([job for job in jobs if job.text is None])
        for job in jobs:
            text = job.text
            if text is None and (new := texts[job.name]) is not None:
                text = self._texts[job.name] = new
            if text is not None:
                self._answers.add(job.name, text)
                for grid in job.grids:
                    self._answers.facts(job.name, self._answers.arguments, grid)

    def _add_answers(self, answers: Mapping[str, list[Any] | None]) -> None:
        for name, answer in answers.items():
            self._in_children.pop(name, None)
            if answer is None:
                continue
            data, characters, facts = answer
            if data is not None:
                self._texts.add(name, CompressedText(data, characters))
            if name in self._texts:
                self._answers.add(name, self._texts.stored(name), decode_facts(facts))


def _children_for(jobs: int, workers: int) -> int:
    """Return the number of children for so many jobs: one each, up to 1.5 times the workers.

    With 18 jobs for 16 children two would have two, and take twice as long as the others.
    """
    return jobs if jobs <= 1.5 * workers else workers


def _timeout_s(jobs: Sequence[_TraceJob]) -> float:
    """Seconds for a child with these jobs."""
    return _TIMEOUT_S + _TIMEOUT_PER_JOB_S * len(jobs)


def _trace_variant(call: KernelCall, candidate: Candidate) -> str | FeatureError:
    """Return the text of a variant's candidate, or the error that prevents it."""
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
