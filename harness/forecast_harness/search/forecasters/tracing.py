"""Forecasts of a variant's configs by the shipped surrogate, from IR that a sandbox traces.

A source that nobody has verified is imported in a cell only. Tracing needs no device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forecast_autotune.errors import ForecastAutotuneError, RecordError
from forecast_autotune.features.ttir import assignment_key
from forecast_autotune.records import Argument, Candidate, Config, Device, Kernel, Problem, digest
from forecast_autotune.surrogates.base import Array, Query
from forecast_autotune.surrogates.default import default
from forecast_autotune.tracing import spread
from forecast_harness.sandbox.api import Job, Lane, Limits, Status
from forecast_harness.search.records import Node, Target
from forecast_harness.search.targets import configs_for, subjects_of

MOST = 48
"""Configs of one source that are traced, spread over longer lists."""
UNTRACEABLE = 0.9
"""P(fails) of a config that does not get as far as IR."""
_KEPT = 4096
_LIMITS = Limits(wall_s=120.0, trusted_s=120.0)
_TRACE = "forecast_harness.search.kernel_race:trace"


@dataclass(frozen=True)
class Forecasts:
    """Of n configs, [n] each: log2 milliseconds, geometric mean over calls."""

    configs: tuple[Config, ...]
    mean: Array
    sd: Array
    p_fail: Array

    @property
    def order(self) -> list[int]:
        """From the most promising to the least, failures charged as in `surrogates.base`."""
        return [int(i) for i in np.argsort(self.mean + 6.0 * self.p_fail, kind="stable")]


def promising(found: Forecasts | None, configs: Sequence[Config], n: int) -> list[Config]:
    """Up to `n` of more than `n` configs; see `Tracer.best`."""
    if found is None:
        return [c.config for c in spread([Candidate(c) for c in configs], n)]
    top = [found.configs[i] for i in found.order[: n - (n > 2)]]
    rest = [Candidate(c) for c in configs if c not in set(top)]
    return top if n <= 2 else [*top, spread(rest, 1)[0].config]


class Tracer:
    """Traces and forecasts sources of one kernel target. Answers are kept: they depend on the text alone."""

    def __init__(self, target: Target, folder: Path | None = None) -> None:
        """`folder` is for scratch files; the sandbox starts when it is first needed."""
        self._target, self._subjects, self._folder = target, subjects_of(target), folder
        self._device = Device.from_json(target.payload.get("device", {"name": "unknown"}))
        self._lane: Lane | None = None
        self._known: dict[str, Forecasts | None] = {}
        self.surrogate = default()
        self.version = f"{self.surrogate.name}-{self.surrogate.version}"

    def forecast(self, source: str, configs: Sequence[Config]) -> Forecasts | None:
        """Forecasts of a spread over `configs`; None where nothing can be traced or forecast."""
        if not configs:
            return None
        key = digest(source, [c.to_json() for c in configs])
        if key not in self._known:
            if len(self._known) >= _KEPT:
                self._known.clear()
            candidates = [Candidate(c) for c in configs]
            chosen = spread(candidates, MOST) if len(candidates) > MOST else candidates
            try:
                self._known[key] = self._forecast(source, [c.config for c in chosen])
            except ForecastAutotuneError:
                self._known[key] = None  # no sandbox here, or odd IR: the search goes on without
        return self._known[key]

    def best(self, source: str, configs: Sequence[Config], n: int) -> list[Config]:
        """Up to `n` of the configs to time: the most promising, and one drawn from the rest by distance.

        Without forecasts, a spread over all of them.
        """
        if len(configs) <= n:
            return list(configs)
        return promising(self.forecast(source, configs), configs, n)

    def best_of(self, node: Node) -> tuple[float, float] | None:
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
        """End the sandbox."""
        if self._lane is not None:
            self._lane.close()
        self._lane = None

    def _forecast(self, source: str, configs: Sequence[Config]) -> Forecasts | None:
        payload = {
            "subjects": [s.to_json() for s in self._subjects],
            "source": source,
            "configs": [c.to_json() for c in configs],
            "arch": int(self._device.arch or 90),
        }
        result = self._opened().run(Job(_TRACE, payload, {"variant.py": source}), _LIMITS)
        if result.status is not Status.OK:
            return None
        means, variances, fails = [], [], []
        for said in result.value:
            failed = np.array([text is None for text in said["ttir"]])
            if failed.all():
                return None
            kernel = Kernel(self._subjects[0].kernel, source=source, source_sha256=digest(source))
            arguments = [Argument.from_json(a) for a in said["arguments"]]
            candidates = [Candidate(c) for c in configs]
            texts = {
                assignment_key(dict(c.kwargs)): text
                for c, text in zip(configs, said["ttir"], strict=True)
                if text is not None
            }
            grids = {c: tuple(g) for c, g in zip(candidates, said["grids"], strict=True) if g is not None}
            problem = Problem.of(kernel, arguments, self._device)
            answer = self.surrogate.forecast(Query(problem, candidates, grids, ttir=texts))
            means.append(answer.mean)
            variances.append(answer.sd**2)
            fails.append(np.where(failed, UNTRACEABLE, answer.p_fail))
        count = len(means)
        mean = np.mean(means, axis=0)
        # Calls of one kernel err alike: no comfort from there being several.
        sd = np.sqrt(np.mean(variances, axis=0))
        p_fail = 1.0 - np.exp(np.sum(np.log1p(-np.clip(fails, 0.0, 0.999)), axis=0) / math.sqrt(count))
        return Forecasts(tuple(configs), mean, sd, p_fail)

    def _opened(self) -> Lane:
        if self._lane is None:
            lane = Lane(scratch=self._folder, environment={"TRITON_INTERPRET": "0"})
            lane.__enter__()
            self._lane = lane
        return self._lane
