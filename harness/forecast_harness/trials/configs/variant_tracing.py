"""Forecasts of a variant's configs by the shipped surrogate, from traced IR, and from timings.

All sources of a search are variants of one problem: what was timed of some of them moves the forecasts of the others.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np

from forecast_autotune.errors import ForecastAutotuneError, RecordError
from forecast_autotune.features.traced_texts import TracedTexts, decode_facts
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.features.ttir.facts import TtirFacts
from forecast_autotune.records import (
    LAUNCH_OPTIONS,
    Argument,
    Candidate,
    Config,
    Device,
    Kernel,
    Measurement,
    Outcome,
    Problem,
    digest,
)
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.protocol import Array, Query
from forecast_autotune.tuning.tracing import farthest_point_sample
from forecast_harness.records import Node, SearchTarget
from forecast_harness.sandbox.api import JobStatus, ResourceLimits, SandboxJob
from forecast_harness.sandbox.jobs import JobResult
from forecast_harness.sandbox.lane_pools import CpuLanes
from forecast_harness.targets.kernels.base_kernel import BaseKernel
from forecast_harness.targets.search_target import advice_of, configs_for, subjects_of
from forecast_harness.trials.configs.source_configs import work_of_a_warp

MAX_TRACED_ASSIGNMENTS = 16
"""The most assignments of one source that are traced; configs that differ in warps and stages alone have one trace."""
MAX_FORECAST_CONFIGS = 1024
"""The most configs of one source that are forecast, spread over longer lists."""
_RANKED_ASSIGNMENTS = 4
"""The assignments, among those traced, by which sources are ranked: to read what one of them does takes
milliseconds."""
MAX_KIN_TIMINGS = 64
"""The most timings of other sources, the latest, that a forecast heeds: those of eight sources, as a search times
them."""
_MOST_EXPLORED_WORK = 2.0
"""Times the work of a warp under the most promising configs that one drawn from the rest may have."""
UNTRACEABLE_P_FAIL = 0.9
"""P(fails) of a config that does not get as far as IR."""
_MAX_CACHED_FORECASTS = 4096


@dataclass(frozen=True)
class ConfigForecasts:
    """Forecasts of n configs, [n] each: log2 milliseconds, geometric mean over calls."""

    configs: tuple[Config, ...]
    mean: Array
    sd: Array
    p_fail: Array

    @property
    def order(self) -> list[int]:
        """Numbers of configs from the most promising to the least, failures charged as in `Forecasts.order`."""
        return [int(i) for i in np.argsort(self.mean + 6.0 * self.p_fail, kind="stable")]

    def excluding(self, configs: Collection[Config]) -> ConfigForecasts:
        """Forecasts of all other configs."""
        at = np.array([i for i, c in enumerate(self.configs) if c not in configs], dtype=np.intp)
        others = tuple(self.configs[i] for i in at)
        return ConfigForecasts(others, self.mean[at], self.sd[at], self.p_fail[at])


def is_compatible(own: Config, other: Config) -> bool:
    """Whether a source can run another's config: equal, but for parameters that either does not have."""
    ours, theirs = dict(own.kwargs), dict(other.kwargs)
    common = ours.keys() & theirs.keys()
    return all(ours[n] == theirs[n] for n in common) and all(
        getattr(own, n) == getattr(other, n) for n in LAUNCH_OPTIONS
    )


def most_promising(result: ConfigForecasts | None, configs: Sequence[Config], n: int) -> list[Config]:
    """Up to `n` of more than `n` configs; see `VariantTracer.best_configs`."""
    if result is None:
        return [c.config for c in farthest_point_sample([Candidate(c) for c in configs], n)]
    top = [result.configs[i] for i in result.order[: n - (n > 2)]]
    if n <= 2:
        return top
    rest = [c for c in configs if c not in set(top)]
    # A config that spills compiles for many times as long as all others, and a batch waits for it.
    most = _MOST_EXPLORED_WORK * max(map(work_of_a_warp, top))
    quick = [c for c in rest if work_of_a_warp(c) <= most]
    return [*top, farthest_point_sample([Candidate(c) for c in quick or rest], 1)[0].config]


class VariantTracer:
    """Traces and forecasts sources of one kernel target; answers are kept until something is learnt.

    Configs that are not traced when a source is first asked about say nothing of it until then. Use from one thread at
    a time, but for `prepare` and `prepare_source`.
    """

    def __init__(self, target: SearchTarget, folder: Path | None = None) -> None:
        """`folder` is for scratch files; sandboxes start when they are first needed."""
        self._target, self._subjects = target, subjects_of(target)
        self._device = Device.from_json(target.payload.get("device", {"name": "unknown"}))
        self._advice = advice_of(target)
        self._traces = SourceTraces.shared(target, folder)
        self._ranking_call = _largest_call(self._subjects)
        self._cached_forecasts: dict[str, ConfigForecasts | None] = {}
        self._ranks: dict[str, tuple[float, float] | None] = {}
        self._timings: dict[tuple[str, Config], Timing] = {}
        self.surrogate = default_surrogate()
        self.version = f"{self.surrogate.name}-{self.surrogate.version}"

    def trace_in(self, run: RunJobs, idle: Callable[[], int]) -> None:
        """See `SourceTraces`."""
        self._traces.trace_in(run, idle)

    def learn(self, source: str, timings: Mapping[Config, Timing]) -> None:
        """Have later forecasts heed timings of some of a source's configs; see `add_timings`.

        A call of a timing is a subject of the target, in its order.
        """
        add_timings(self._timings, {(source, c): t for c, t in timings.items()}, len(self._subjects))
        configs_of: dict[str, list[Config]] = {}
        for kin, config in self._timings:
            configs_of.setdefault(kin, []).append(config)
        self._traces.keep(configs_of)
        self._cached_forecasts.clear()
        self._ranks.clear()

    def forecast(self, source: str, configs: Sequence[Config]) -> ConfigForecasts | None:
        """Forecasts of `configs`, or of a spread over many; None where nothing can be traced or forecast."""
        if not configs:
            return None
        key = digest(source, [c.to_json() for c in configs])
        if key not in self._cached_forecasts:
            if len(self._cached_forecasts) >= _MAX_CACHED_FORECASTS:
                self._cached_forecasts.clear()
            try:
                self._cached_forecasts[key] = self._forecast(source, _spread(configs))
            except ForecastAutotuneError:
                self._cached_forecasts[key] = None  # no sandbox here, or odd IR: the search goes on without
        return self._cached_forecasts[key]

    def best_configs(
        self, source: str, configs: Sequence[Config], n: int, beside: Config | None = None
    ) -> list[Config]:
        """Up to `n` of the configs to time: the most promising, and one drawn from the rest by distance.

        First comes the one that `is_compatible` the rival's config `beside`, where there is one: whichever source is
        better, it should be seen under equal conditions. Without forecasts, a spread over all others.
        """
        first = _first(configs, beside)
        rest, count = [c for c in configs if c not in first], n - len(first)
        if count <= 0 or len(rest) <= count:
            return [*first, *rest[:count]]
        result = self.forecast(source, configs)
        return [*first, *most_promising(None if result is None else result.excluding(first), rest, count)]

    def prepare(self, nodes: Sequence[Node]) -> None:
        """Trace the configs that `best_forecast` of these nodes will read, all together: most are never timed."""
        sources = [n.source for n in nodes if n.source not in self._ranks]
        self._prepare(sources, _RANKED_ASSIGNMENTS, calls=self._ranking_call)

    def prepare_source(self, *sources: str, rival: str = "", beside: Config | None = None) -> None:
        """Trace, all together, the configs that forecasts of these sources will read.

        `rival`, `beside`: the source that they will be timed beside, and its config: timings of one source move the
        forecasts of others only where the timed configs are traced; configs drawn to explore often are not.
        """
        self._prepare(sources, MAX_TRACED_ASSIGNMENTS, rival, beside)

    def _prepare(
        self,
        sources: Sequence[str],
        assignments: int,
        rival: str = "",
        beside: Config | None = None,
        calls: Sequence[int] = (),
    ) -> None:
        request: dict[str, list[Config]] = {rival: [beside]} if rival and beside is not None else {}
        for source in sources:
            with suppress(RecordError):
                if configs := configs_for(self._target, source):
                    additions = [*_spread(configs, assignments), *_first(configs, beside)]
                    request[source] = list(dict.fromkeys([*request.get(source, []), *additions]))
        with suppress(ForecastAutotuneError):  # `best_forecast` of each node will meet it again
            self._traces.prepare(request, calls)

    def best_forecast(self, node: Node) -> tuple[float, float] | None:
        """(log2 ms, P(fails)) of a source's most promising config; None where it cannot be traced.

        Looks at a few configs at the largest call, or at all where the user's own `inputs` draw one: enough to rank
        sources, of which there are many.
        """
        if node.source not in self._ranks:
            if len(self._ranks) >= _MAX_CACHED_FORECASTS:
                self._ranks.clear()
            self._ranks[node.source] = self._rank(node.source)
        return self._ranks[node.source]

    def _rank(self, source: str) -> tuple[float, float] | None:
        # A broken contract, no sandbox here, or odd IR: the search goes on without.
        with suppress(ForecastAutotuneError):
            configs = _spread(configs_for(self._target, source), _RANKED_ASSIGNMENTS)
            if configs and (result := self._forecast(source, configs, self._ranking_call)) is not None:
                best = result.order[0]
                return float(result.mean[best]), float(result.p_fail[best])
        return None

    def close(self) -> None:
        """End the sandboxes."""
        self._traces.close()

    def _forecast(
        self, source: str, configs: Sequence[Config], calls: Sequence[int] = ()
    ) -> ConfigForecasts | None:
        """Forecasts at these calls, or at all calls."""
        traces = self._traces.get(source, configs, calls)
        at = calls or range(len(traces))
        if not traces or any(all(traces[n].configs[c].text is None for c in configs) for n in at):
            return None
        kin = self._kin_timings(source)
        # A source that is not traced yet says nothing here: many nodes may wait for this forecast.
        kin_traces = {s: self._traces.known(s) for s in {s for s, _ in kin}}
        means, variances, fails = [], [], []
        for call in at:
            own = traces[call]
            rows = {Candidate(c): own.configs[c] for c in configs}
            timings = dict[Candidate, Timing]()
            for (owner, config), timing in kin.items():
                if not is_known_at(timing, call):
                    continue
                # A config that cannot be traced says nothing: nobody knows which configs it is like.
                trace = kin_traces[owner][call].configs.get(config) if kin_traces[owner] else None
                if trace is not None and trace.text is not None:
                    candidate = Candidate(config) if owner == source else Candidate(config, digest(owner))
                    rows[candidate], timings[candidate] = trace, timing
            texts = TracedTexts(own.arguments)
            for candidate, trace in rows.items():
                if trace.text is not None:
                    texts.add(assignment_of(candidate), trace.text, {trace.grid: trace.facts})
            grids = {c: t.grid for c, t in rows.items() if t.grid is not None}
            kernel = Kernel(self._subjects[0].kernel, source=source, source_sha256=digest(source))
            problem = Problem.of(kernel, own.arguments, self._device)
            measurements = [to_measurement(problem.id, c, t, call) for c, t in timings.items()]
            advice = self._advice.get(source)
            query = Query(problem, list(rows), grids, measurements, ttir=texts, advice=advice)
            answer = self.surrogate.forecast(query)
            count, is_untraceable = len(configs), np.array([own.configs[c].text is None for c in configs])
            means.append(answer.mean[:count])
            variances.append(answer.sd[:count] ** 2)
            fails.append(np.where(is_untraceable, UNTRACEABLE_P_FAIL, answer.p_fail[:count]))
        mean = np.mean(means, axis=0)
        # Calls of one kernel err alike: no comfort from there being several.
        sd = np.sqrt(np.mean(variances, axis=0))
        logs = np.sum(np.log1p(-np.clip(fails, 0.0, 0.999)), axis=0)
        return ConfigForecasts(tuple(configs), mean, sd, 1.0 - np.exp(logs / math.sqrt(len(fails))))

    def _kin_timings(self, source: str) -> dict[tuple[str, Config], Timing]:
        """All timings of this source, and the latest of others."""
        others = [key for key in self._timings if key[0] != source][-MAX_KIN_TIMINGS:]
        own = [key for key in self._timings if key[0] == source]
        return {key: self._timings[key] for key in (*others, *own)}


def _first(configs: Sequence[Config], beside: Config | None) -> list[Config]:
    """The config that a source is timed in before all others: the one that suits its rival's, if there is one."""
    return [c for c in configs if beside is not None and is_compatible(c, beside)][:1]


def _spread(configs: Sequence[Config], assignments: int = MAX_TRACED_ASSIGNMENTS) -> list[Config]:
    """The configs of so many traces, as different as can be: those that are forecast."""
    by_assignment: dict[str, list[Config]] = {}
    for config in configs:
        by_assignment.setdefault(assignment_of(Candidate(config)), []).append(config)
    first = [Candidate(same[0]) for same in by_assignment.values()]
    assignments_to_trace = {assignment_of(c) for c in farthest_point_sample(first, assignments)}
    results = [c for c in configs if assignment_of(Candidate(c)) in assignments_to_trace]
    return results[:: -(-len(results) // MAX_FORECAST_CONFIGS)]


def _largest_call(subjects: Sequence[BaseKernel]) -> tuple[int, ...]:
    """The number of the call with the most elements; none where a call is drawn by the user's own `inputs`."""
    if any(s.inputs or not s.calls for s in subjects):
        return ()
    tensors = [[a for a in s.calls[0] if a.kind == "tensor"] for s in subjects]
    return (max(range(len(subjects)), key=lambda n: sum(math.prod(a.shape) for a in tensors[n])),)


_MOST_KEPT = 128
"""The latest sources, whose traces are kept whole; of others those of the configs named by `keep` are."""
TRACE_LIMITS = ResourceLimits(wall_s=120.0, trusted_s=120.0)
_TRACE_JOB = "forecast_harness.trials.race_job:trace"
_FEWEST_TOGETHER = 16
"""Configs of one source that one sandbox traces at least: its start takes as long as ten more configs."""
RunJobs = Callable[[Sequence[SandboxJob]], Sequence[JobResult]]
"""Does jobs in sandboxes, under `TRACE_LIMITS`."""


class ConfigTrace(NamedTuple):
    """The trace of one source at one call under one config."""

    text: str | None
    """None where it has no IR."""
    grid: tuple[int, ...] | None
    """None where it is not known."""
    facts: TtirFacts | None
    """Read from the text at the grid; None for a text that cannot be read, or none."""


@dataclass(frozen=True)
class CallTrace:
    """The traces of one source at one call, by config; none of a call at which nobody has traced it."""

    arguments: tuple[Argument, ...] = ()
    configs: Mapping[Config, ConfigTrace] = field(default_factory=dict)

    def only(self, configs: Collection[Config]) -> CallTrace:
        """The traces of these configs alone."""
        return CallTrace(self.arguments, {c: self.configs[c] for c in configs if c in self.configs})

    def joined(self, more: CallTrace) -> CallTrace:
        """The traces with those of other configs added."""
        return CallTrace(self.arguments or more.arguments, {**self.configs, **more.configs})


class SourceTraces:
    """A trace per call of the target, by source; none for a source that cannot be traced. Any thread may ask."""

    _shared: ClassVar[dict[str, tuple[SourceTraces, int]]] = {}
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, target: SearchTarget, folder: Path | None = None) -> None:
        """`folder` is for scratch files; sandboxes start when they are first needed."""
        self._subjects = [s.to_json() for s in subjects_of(target)]
        device = Device.from_json(target.payload.get("device", {"name": "unknown"}))
        self._arch = int(device.arch or 90)
        self._lanes = CpuLanes(folder, TRACE_LIMITS)
        self._run: RunJobs = self._lanes.run
        self._idle: Callable[[], int] = lambda: 0
        self._lock = threading.Lock()
        self._traces: dict[str, tuple[CallTrace, ...]] = {}
        self._tracing: dict[str, threading.Event] = {}
        """Sources that a thread is tracing: other threads wait for the event."""
        self._configs_to_keep: Mapping[str, Collection[Config]] = {}

    @classmethod
    def shared(cls, target: SearchTarget, folder: Path | None = None) -> SourceTraces:
        """The traces that all users of a target in this process share; the last `close` ends them."""
        key = digest(target.payload["subjects"], target.payload.get("device"))
        with cls._shared_lock:
            result, users = cls._shared.get(key) or (cls(target, folder), 0)
            cls._shared[key] = result, users + 1
        return result

    def trace_in(self, run: RunJobs, idle: Callable[[], int] = lambda: 0) -> None:
        """Trace in another owner's sandboxes from here on; `idle`: how many of them have nothing to do."""
        self._run, self._idle = run, idle

    def prepare(self, request: Mapping[str, Sequence[Config]], calls: Sequence[int] = ()) -> None:
        """Trace these configs where they are not traced yet, together: at these calls, or at all.

        Raises `ForecastAutotuneError` without a sandbox.
        """
        with self._lock:
            missing = {
                s: m
                for s, c in request.items()
                if s not in self._tracing and (m := self._missing(s, c, calls))
            }
            under_way = [self._tracing[s] for s in request if s in self._tracing]
            ours = {s: threading.Event() for s in missing}
            self._tracing |= ours
        try:
            count = self._idle() // max(1, len(missing))
            parts = [(s, part) for s, c in missing.items() for part in _parts(c, count)]
            results = self._run([self._job(source, configs, calls) for source, configs in parts])
            for (source, configs), result in zip(parts, results, strict=True):
                if result.status is not JobStatus.INFRA_ERROR:  # which says nothing about the source
                    self._add(source, self._read(result, configs, calls))
        finally:
            with self._lock:
                for source, event in ours.items():
                    del self._tracing[source]
                    event.set()
        for event in under_way:
            event.wait()

    def _missing(self, source: str, configs: Sequence[Config], calls: Sequence[int]) -> Sequence[Config]:
        """Configs that nobody has traced at one of these calls; none of a source that cannot be traced."""
        if (result := self._traces.get(source)) is None:
            return configs
        traces = [result[n].configs for n in self._at(calls)] if result else []
        return [c for c in configs if not all(c in trace for trace in traces)]

    def _at(self, calls: Sequence[int]) -> Sequence[int]:
        return calls or range(len(self._subjects))

    def get(self, source: str, configs: Iterable[Config], calls: Sequence[int] = ()) -> tuple[CallTrace, ...]:
        """A trace per call, which at these calls (or at all) has these configs, and perhaps more.

        Raises `ForecastAutotuneError` without a sandbox.
        """
        config_list = list(configs)
        self.prepare({source: config_list}, calls)
        with self._lock:
            known = self._traces.get(source)
            missing = self._missing(source, config_list, calls)
        if missing:  # others have traced less of it, or have failed
            (result,) = self._run([self._job(source, missing, calls)])
            traces = self._read(result, missing, calls)
            is_final = result.status is JobStatus.INFRA_ERROR or known
            return () if not traces and is_final else self._add(source, traces)
        self._add(source, ())  # the latest
        return known or ()

    def known(self, source: str) -> tuple[CallTrace, ...]:
        """A trace per call, of configs that were traced before: nothing is traced for it, and nobody is waited for."""
        with self._lock:
            return self._traces.get(source, ())

    def keep(self, configs: Mapping[str, Collection[Config]]) -> None:
        """Never forget these configs of these sources; configs of earlier calls may be forgotten again."""
        with self._lock:
            self._configs_to_keep = {source: tuple(those) for source, those in configs.items()}

    def close(self) -> None:
        """End the sandboxes, where nobody else shares them."""
        with self._shared_lock:
            for key, (result, users) in list(self._shared.items()):
                if result is self:
                    if users > 1:
                        self._shared[key] = result, users - 1
                        return
                    del self._shared[key]
        self._lanes.close()

    def _add(self, source: str, more: tuple[CallTrace, ...]) -> tuple[CallTrace, ...]:
        """The known traces with the new ones; the source is the latest one from here on."""
        with self._lock:
            before = self._traces.pop(source, ())
            union = tuple(a.joined(b) for a, b in zip(before, more, strict=True)) if before and more else ()
            self._traces[source] = result = union or more or before
            for old in list(self._traces)[:-_MOST_KEPT]:
                if (configs := self._configs_to_keep.get(old)) is None:
                    del self._traces[old]
                else:
                    self._traces[old] = tuple(trace.only(configs) for trace in self._traces[old])
        return result

    def _job(self, source: str, configs: Sequence[Config], calls: Sequence[int]) -> SandboxJob:
        payload = {
            "subjects": [self._subjects[n] for n in self._at(calls)],
            "source": source,
            "configs": [c.to_json() for c in configs],
            "arch": self._arch,
        }
        return SandboxJob(_TRACE_JOB, payload, {"variant.py": source})

    def _read(
        self, result: JobResult, configs: Sequence[Config], calls: Sequence[int]
    ) -> tuple[CallTrace, ...]:
        """The traces of every call, those at `calls` as they were traced; empty where they could not be."""
        if result.status is not JobStatus.OK:
            return ()
        with suppress(ValueError, TypeError, KeyError, IndexError, OverflowError):
            traces = dict(
                zip(self._at(calls), (_read_call(answer, configs) for answer in result.value), strict=True)
            )
            return tuple(traces.get(n, CallTrace()) for n in range(len(self._subjects)))
        return ()


def _parts(configs: Sequence[Config], most: int) -> list[Sequence[Config]]:
    """At most `most` parts of about equal size, fewer where they would be too small; one at least."""
    count = max(1, min(most, len(configs) // _FEWEST_TOGETHER))
    return [configs[n::count] for n in range(count)]


def _read_call(answer: Mapping[str, Any], configs: Sequence[Config]) -> CallTrace:
    facts = {int(number): decode_facts(facts_of_text) for number, facts_of_text in answer["facts"].items()}
    traces = {}
    for config, number, numbers in zip(configs, answer["which"], answer["grids"], strict=True):
        grid = None if numbers is None else tuple(map(int, numbers))
        text_and_facts = (None, None) if number is None else (answer["ttir"][number], facts[number][grid])
        traces[config] = ConfigTrace(text_and_facts[0], grid, text_and_facts[1])
    return CallTrace(tuple(Argument.from_json(a) for a in answer["arguments"]), traces)


MAX_TIMINGS = 256
"""Timings that are kept, the latest: the work of a forecast grows with the cube of their number."""
Timing: TypeAlias = Sequence[float] | Outcome
"""Seconds of one launch by number of the call (NaN where it was not timed), or its failure."""
K = TypeVar("K", bound=Hashable)


def add_timings(memory: dict[K, Timing], timings: Mapping[K, Timing], calls: int) -> None:
    """Add timings to a memory, and forget the oldest. A new timing replaces the known one.

    Timings that teach nothing are left out: without an entry for each call or a positive time, the harness' failures.
    """
    for key, timing in timings.items():
        if isinstance(timing, Outcome):
            sound = timing.is_label and timing is not Outcome.OK
        else:
            seconds = [s for s in timing if not math.isnan(s)]
            sound = len(timing) == calls and bool(seconds) and all(0 < s < math.inf for s in seconds)
        if sound:
            memory.pop(key, None)
            memory[key] = timing
    while len(memory) > MAX_TIMINGS:
        del memory[next(iter(memory))]


def is_known_at(timing: Timing, call: int) -> bool:
    """Whether a timing has a result for a call."""
    return isinstance(timing, Outcome) or not math.isnan(timing[call])


def to_measurement(problem: str, candidate: Candidate, timing: Timing, call: int) -> Measurement:
    """A timing as surrogates read it: at one call, in milliseconds."""
    if isinstance(timing, Outcome):
        return Measurement(problem, candidate, timing)
    return Measurement(problem, candidate, Outcome.OK, 1e3 * timing[call])
