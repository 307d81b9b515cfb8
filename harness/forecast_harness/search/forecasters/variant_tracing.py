"""Forecasts of a variant's configs by the shipped surrogate, from IR that a sandbox traces, and from timings.

All sources of a search are variants of one problem: what was timed of some of them moves the forecasts of the
others. A source that nobody has verified is imported in a cell only. Tracing needs no device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forecast_autotune.errors import ForecastAutotuneError, RecordError
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.records import Argument, Candidate, Config, Device, Kernel, Problem, digest
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.protocol import Array, Query
from forecast_autotune.tuning.preparation.tracing import farthest_point_sample
from forecast_harness.sandbox.api import JobStatus, ResourceLimits, SandboxJob
from forecast_harness.sandbox.jobs import JobResult
from forecast_harness.search.forecasters.timings import Timing, add_timings, to_measurement
from forecast_harness.search.forecasters.tracing_lanes import TracingLanes
from forecast_harness.search.records import Node, SearchTarget
from forecast_harness.search.targets import advice_of, configs_for, subjects_of

MAX_TRACED_ASSIGNMENTS = 48
"""Of one source; configs that differ in warps and stages alone have one trace."""
MAX_FORECAST_CONFIGS = 1024
"""Of one source, spread over longer lists."""
UNTRACEABLE_P_FAIL = 0.9
"""P(fails) of a config that does not get as far as IR."""
_MAX_CACHED_FORECASTS = 4096
_MAX_CACHED_TRACES = 16
"""Sources without timings whose IR is kept; of those with timings it is, of what was timed."""
_TRACE_LIMITS = ResourceLimits(wall_s=120.0, trusted_s=120.0)
_TRACE_JOB = "forecast_harness.search.judging.kernel_race:trace"


@dataclass(frozen=True)
class ConfigForecasts:
    """Of n configs, [n] each: log2 milliseconds, geometric mean over calls."""

    configs: tuple[Config, ...]
    mean: Array
    sd: Array
    p_fail: Array

    @property
    def order(self) -> list[int]:
        """From the most promising to the least, failures charged as in `surrogates.base`."""
        return [int(i) for i in np.argsort(self.mean + 6.0 * self.p_fail, kind="stable")]

    def excluding(self, configs: Collection[Config]) -> ConfigForecasts:
        """Those of all other configs."""
        at = np.array([i for i, c in enumerate(self.configs) if c not in configs], dtype=np.intp)
        left = tuple(self.configs[i] for i in at)
        return ConfigForecasts(left, self.mean[at], self.sd[at], self.p_fail[at])


@dataclass(frozen=True)
class _SubjectTrace:
    """What one source is at one call, by config; None where a config has no IR, or no grid is known."""

    arguments: tuple[Argument, ...]
    texts: dict[Config, str | None]
    grids: dict[Config, tuple[int, ...] | None]

    def keep_only(self, configs: Collection[Config]) -> None:
        """Forget all other configs."""
        for found in (self.texts, self.grids):
            for config in [c for c in found if c not in configs]:
                del found[config]


def is_compatible(own: Config, other: Config) -> bool:
    """Whether a source can run another's config: equal, but for parameters that either does not have."""
    mine, theirs = dict(own.kwargs), dict(other.kwargs)
    common = mine.keys() & theirs.keys()
    options = ("num_warps", "num_stages", "num_ctas", "maxnreg")
    return all(mine[n] == theirs[n] for n in common) and all(
        getattr(own, n) == getattr(other, n) for n in options
    )


def most_promising(found: ConfigForecasts | None, configs: Sequence[Config], n: int) -> list[Config]:
    """Up to `n` of more than `n` configs; see `VariantTracer.best_configs`."""
    if found is None:
        return [c.config for c in farthest_point_sample([Candidate(c) for c in configs], n)]
    top = [found.configs[i] for i in found.order[: n - (n > 2)]]
    rest = [Candidate(c) for c in configs if c not in set(top)]
    return top if n <= 2 else [*top, farthest_point_sample(rest, 1)[0].config]


class VariantTracer:
    """Traces and forecasts sources of one kernel target; answers are kept until something is learnt.

    Until then they depend on the text alone. Use from one thread at a time.
    """

    def __init__(self, target: SearchTarget, folder: Path | None = None) -> None:
        """`folder` is for scratch files; sandboxes start when they are first needed."""
        self._target, self._subjects = target, subjects_of(target)
        self._device = Device.from_json(target.payload.get("device", {"name": "unknown"}))
        self._advice = advice_of(target)
        self._lanes = TracingLanes(folder, _TRACE_LIMITS)
        self._cached_forecasts: dict[str, ConfigForecasts | None] = {}
        self._traces: dict[str, tuple[_SubjectTrace, ...]] = {}
        """Of each subject, by source; none for a source that cannot be traced."""
        self._timings: dict[tuple[str, Config], Timing] = {}
        self.surrogate = default_surrogate()
        self.version = f"{self.surrogate.name}-{self.surrogate.version}"

    def start(self) -> None:
        """Open the sandboxes in the background, which takes seconds."""
        self._lanes.start()

    def learn(self, source: str, timings: Mapping[Config, Timing]) -> None:
        """Have forecasts from now on heed what became of some of a source's configs; see `add_timings`.

        A call of a timing is a subject of the target, in its order.
        """
        add_timings(self._timings, {(source, c): t for c, t in timings.items()}, len(self._subjects))
        for other, configs in self._by_source().items():
            for trace in self._traces.get(other, ()):
                trace.keep_only(configs)
        self._cached_forecasts.clear()

    def forecast(self, source: str, configs: Sequence[Config]) -> ConfigForecasts | None:
        """Forecasts of `configs`, or of a spread over many; None where nothing can be traced or forecast."""
        if not configs:
            return None
        key = _forecast_key(source, configs)
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
        first = [c for c in configs if beside is not None and is_compatible(c, beside)][:1]
        rest, left = [c for c in configs if c not in first], n - len(first)
        if left <= 0 or len(rest) <= left:
            return [*first, *rest[:left]]
        found = self.forecast(source, configs)
        return [*first, *most_promising(None if found is None else found.excluding(first), rest, left)]

    def prepare(self, nodes: Sequence[Node]) -> None:
        """Trace what `best_forecast` of these nodes will ask for, all together."""
        asked: dict[str, list[Config]] = {}
        for node in nodes:
            with suppress(RecordError):
                configs = configs_for(self._target, node.source)
                known = _forecast_key(node.source, configs) in self._cached_forecasts
                if configs and not known and node.source not in self._traces:
                    asked[node.source] = _spread(configs)
        with suppress(ForecastAutotuneError):  # what it meets there, `best_forecast` says of each
            results = self._lanes.run([self._trace_job(s, c) for s, c in asked.items()])
            self._forget_old_traces()
            for (source, configs), result in zip(asked.items(), results, strict=True):
                self._traces[source] = _read_traces(result, configs, ())

    def best_forecast(self, node: Node) -> tuple[float, float] | None:
        """(log2 ms, P(fails)) of a source's most promising config; None where it cannot be traced."""
        try:
            configs = configs_for(self._target, node.source)
        except RecordError:
            return None  # it breaks the contract, which the judge will say
        found = self.forecast(node.source, configs)
        if found is None:
            return None
        best = found.order[0]
        return float(found.mean[best]), float(found.p_fail[best])

    def close(self) -> None:
        """End the sandboxes."""
        self._lanes.close()

    def _forecast(self, source: str, configs: Sequence[Config]) -> ConfigForecasts | None:
        traces = self._traces_of(source, configs)
        if not traces or any(all(t.texts[c] is None for c in configs) for t in traces):
            return None
        timed = {s: self._traces_of(s, c) for s, c in self._by_source().items()}
        means, variances, fails = [], [], []
        for call, own in enumerate(traces):
            rows = {Candidate(c): (own, c) for c in configs}
            timings = dict[Candidate, Timing]()
            for (other, config), timing in self._timings.items():
                # One that cannot be traced says nothing: of what it is alike is not known.
                if timed[other] and timed[other][call].texts[config] is not None:
                    candidate = Candidate(config) if other == source else Candidate(config, digest(other))
                    rows[candidate], timings[candidate] = (timed[other][call], config), timing
            texts = {assignment_of(c): s for c, (t, x) in rows.items() if (s := t.texts[x]) is not None}
            grids = {c: g for c, (t, x) in rows.items() if (g := t.grids[x]) is not None}
            kernel = Kernel(self._subjects[0].kernel, source=source, source_sha256=digest(source))
            problem = Problem.of(kernel, own.arguments, self._device)
            measured = [to_measurement(problem.id, c, t, call) for c, t in timings.items()]
            advice = self._advice.get(source)
            query = Query(problem, list(rows), grids, measured, ttir=texts, advice=advice)
            answer = self.surrogate.forecast(query)
            count, failed = len(configs), np.array([own.texts[c] is None for c in configs])
            means.append(answer.mean[:count])
            variances.append(answer.sd[:count] ** 2)
            fails.append(np.where(failed, UNTRACEABLE_P_FAIL, answer.p_fail[:count]))
        mean = np.mean(means, axis=0)
        # Calls of one kernel err alike: no comfort from there being several.
        sd = np.sqrt(np.mean(variances, axis=0))
        logs = np.sum(np.log1p(-np.clip(fails, 0.0, 0.999)), axis=0)
        return ConfigForecasts(tuple(configs), mean, sd, 1.0 - np.exp(logs / math.sqrt(len(traces))))

    def _by_source(self) -> dict[str, list[Config]]:
        """Configs with timings."""
        found: dict[str, list[Config]] = {}
        for source, config in self._timings:
            found.setdefault(source, []).append(config)
        return found

    def _traces_of(self, source: str, configs: Iterable[Config]) -> tuple[_SubjectTrace, ...]:
        """A trace per subject that has these configs, and perhaps more. Empty where that fails.

        Raises `ForecastAutotuneError` without a sandbox.
        """
        found = self._traces.pop(source, None)
        missing = [c for c in configs if found is None or (found and c not in found[0].texts)]
        if missing:
            (result,) = self._lanes.run([self._trace_job(source, missing)])
            found = _read_traces(result, missing, found or ())
            self._forget_old_traces()
        self._traces[source] = found or ()
        return found or ()

    def _forget_old_traces(self) -> None:
        timed = {s for s, _ in self._timings}
        for other in [s for s in self._traces if s not in timed][:-_MAX_CACHED_TRACES]:
            del self._traces[other]

    def _trace_job(self, source: str, configs: Sequence[Config]) -> SandboxJob:
        payload = {
            "subjects": [s.to_json() for s in self._subjects],
            "source": source,
            "configs": [c.to_json() for c in configs],
            "arch": int(self._device.arch or 90),
        }
        return SandboxJob(_TRACE_JOB, payload, {"variant.py": source})


def _forecast_key(source: str, configs: Sequence[Config]) -> str:
    return digest(source, [c.to_json() for c in configs])


def _spread(configs: Sequence[Config]) -> list[Config]:
    """The configs that are forecast: those of as many traces as are made, as different as can be."""
    alike: dict[str, list[Config]] = {}
    for config in configs:
        alike.setdefault(assignment_of(Candidate(config)), []).append(config)
    first = [Candidate(same[0]) for same in alike.values()]
    chosen = {assignment_of(c) for c in farthest_point_sample(first, MAX_TRACED_ASSIGNMENTS)}
    kept = [c for c in configs if assignment_of(Candidate(c)) in chosen]
    return kept[:: -(-len(kept) // MAX_FORECAST_CONFIGS)]


def _read_traces(
    result: JobResult, configs: Sequence[Config], before: tuple[_SubjectTrace, ...]
) -> tuple[_SubjectTrace, ...]:
    """The traces before, with more configs; empty where these could not be traced."""
    if result.status is not JobStatus.OK:
        return ()
    made = before or tuple(
        _SubjectTrace(tuple(Argument.from_json(a) for a in said["arguments"]), {}, {})
        for said in result.value
    )
    for trace, said in zip(made, result.value, strict=True):
        grids = [None if g is None else tuple(g) for g in said["grids"]]
        trace.texts.update(zip(configs, said["ttir"], strict=True))
        trace.grids.update(zip(configs, grids, strict=True))
    return made
