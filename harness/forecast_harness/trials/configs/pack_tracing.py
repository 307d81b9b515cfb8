"""Forecasts of a pack's Triton solutions by the shipped surrogate: of every kernel that they would launch.

A solution is called in a sandbox on tensors without memory, see `pack_cell`. Its time on a workload is
forecast as the sum of its kernels' times; what its torch code costs besides is left to the search's results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.features.ttir.extraction import assignment_key
from forecast_autotune.records import Argument, Candidate, Config, Device, Kernel, Problem, digest
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.protocol import Query
from forecast_harness.records import Node, SearchTarget
from forecast_harness.sandbox.api import JobStatus, ResourceLimits, SandboxJob
from forecast_harness.sandbox.cpu_lanes import CpuLanes
from forecast_harness.targets.packs.schema import PackFormat
from forecast_harness.targets.search_target import pack_of
from forecast_harness.trials.configs.source_configs import SourceConfig as TunedConfig
from forecast_harness.trials.configs.source_configs import apply_config, configs_of, diverse_configs

MAX_TRACED_CONFIGS = 8
"""Configs of one source that are traced, the source as it stands among them."""
MAX_RANKED_CONFIGS = 24
"""Configs of one source that are forecast to choose from."""
_MAX_CACHED_FORECASTS = 4096
_MAX_CACHED_TRACES = 64
"""Sources whose IR is kept."""
_FILES_PER_JOB = 8
"""Configs of one source that a cell traces one after the other: to start a cell takes longer than to trace."""
_TRACE_LIMITS = ResourceLimits(wall_s=60.0, trusted_s=60.0)
_TRACE_JOB = "forecast_harness.trials.configs.pack_cell:main"
_LaunchRecord = dict[str, Any]
"""One launch of a kernel, as `trace_file` tells it."""


def _sources_to_forecast(source: str) -> list[str]:
    """A source as it stands, and in some of its configs."""
    request = diverse_configs([{}, *configs_of(source)], MAX_TRACED_CONFIGS)
    return [apply_config(source, c) for c in request]


class PackTracer:
    """Traces and forecasts solutions of one pack. Use from one thread at a time."""

    def __init__(self, target: SearchTarget, folder: Path | None = None) -> None:
        """`folder` is for scratch files; sandboxes start when they are first needed."""
        self._target = target
        self._device = Device.from_json(target.payload.get("device", {"name": "unknown"}))
        pack = pack_of(target)
        tensors = {
            **pack.definition.inputs,
            **(pack.definition.outputs if pack.definition.destination else {}),
        }
        constants = {n: a.value for n, a in pack.definition.axes.items() if a.value is not None}
        self._calls = [
            {n: [t.dtype, list(t.sizes({**constants, **w.axes}))] for n, t in tensors.items()}
            for w in pack.timed_workloads("cuda")
        ]
        self._is_native = pack.definition.format is PackFormat.OWN
        self._lanes = CpuLanes(folder, _TRACE_LIMITS)
        self._cached_forecasts: dict[str, tuple[float, float] | None] = {}
        """By id of the node: such answers depend on the text alone."""
        self._traces: dict[str, list[list[_LaunchRecord]]] = {}
        """Launches per call, by source with its config applied; none where that cannot be traced."""
        self._surrogate = default_surrogate()
        self.version = f"{self._surrogate.name}-{self._surrogate.version}"

    def prepare(self, nodes: Sequence[Node]) -> None:
        """Trace what `best_forecast` of these nodes will ask for, all together."""
        groups = []
        for node in nodes:
            if self._can_trace(node) and node.id not in self._cached_forecasts:
                with suppress(ForecastAutotuneError):
                    groups.append(_sources_to_forecast(node.source))
        with suppress(ForecastAutotuneError):  # what it meets there, `best_forecast` says of each
            self._trace(groups)

    def best_forecast(self, node: Node) -> tuple[float, float] | None:
        """(log2 ms, P(fails)) of a source's most promising config; None where nothing can be traced."""
        if not self._can_trace(node):
            return None
        if node.id not in self._cached_forecasts:
            if len(self._cached_forecasts) >= _MAX_CACHED_FORECASTS:
                self._cached_forecasts.clear()
            try:
                self._cached_forecasts[node.id] = self._best_forecast(node.source)
            except ForecastAutotuneError:
                self._cached_forecasts[node.id] = (
                    None  # odd CONFIGS or IR, or no sandbox here: the search goes on
                )
        return self._cached_forecasts[node.id]

    def best_configs(self, source: str, configs: Sequence[TunedConfig], n: int) -> tuple[TunedConfig, ...]:
        """Up to `n` of the configs to time: the most promising, and the one most unlike the first of all.

        Without forecasts, a spread over all of them.
        """
        request = diverse_configs(configs, MAX_RANKED_CONFIGS)
        launched = self._launches_of([apply_config(source, c) for c in request])
        answers = [self._sum_forecasts(calls) for calls in launched]
        ranked = [
            (f[0] + 6.0 * f[1], i, c) for i, (c, f) in enumerate(zip(request, answers, strict=True)) if f
        ]
        if len(configs) <= n or not ranked:
            return diverse_configs(configs, n)
        top = [c for _, _, c in sorted(ranked, key=lambda r: r[:2])[: n - (n > 2)]]
        rest = [c for c in diverse_configs(configs, len(top) + 1) if c not in top]
        return (*top, *rest[: n - len(top)])

    def close(self) -> None:
        """End the sandboxes."""
        self._lanes.close()

    def _can_trace(self, node: Node) -> bool:
        return self._is_native and node.language == "triton"

    def _best_forecast(self, source: str) -> tuple[float, float] | None:
        results = [self._sum_forecasts(calls) for calls in self._launches_of(_sources_to_forecast(source))]
        answers = [f for f in results if f is not None]
        return min(answers, key=lambda f: f[0] + 6.0 * f[1], default=None)

    def _launches_of(self, sources: Sequence[str]) -> list[list[list[_LaunchRecord]]]:
        """The launches of these configs of a source, each per call; empty for one that cannot be traced, or where any
        call launches nothing."""
        self._trace([sources])
        return [self._traces[s] for s in sources]

    def _trace(self, groups: Sequence[Sequence[str]]) -> None:
        """Have the traces of all texts of all groups; those of a group are one candidate's, and share cells."""
        missing = [[s for s in dict.fromkeys(group) if s not in self._traces] for group in groups]
        parts = [
            group[at : at + _FILES_PER_JOB]
            for group in missing
            for at in range(0, len(group), _FILES_PER_JOB)
        ]
        if not parts:
            return  # and nothing that was prepared together is forgotten before it is asked for
        traced = list(zip(parts, self._traced(parts), strict=True))
        # Files whose traces a cell's end has cost are traced in cells of their own.
        alone = [[source] for part, result in traced if result is None and len(part) > 1 for source in part]
        traced += zip(alone, self._traced(alone), strict=True)
        for part, result in traced:
            self._traces |= zip(part, result or [[]] * len(part), strict=True)
        request = {s for group in groups for s in group}
        for other in [s for s in self._traces if s not in request][:-_MAX_CACHED_TRACES]:
            del self._traces[other]

    def _traced(self, parts: Sequence[Sequence[str]]) -> list[list[list[list[_LaunchRecord]]] | None]:
        """For each part and text in it: what it launches, per call. None for a part whose cell gave no answer."""
        jobs = []
        for part in parts:
            files = {f"solution_{n}.py": source for n, source in enumerate(part)}
            payload = {
                "files": list(files),
                "entry": self._target.entry,
                "calls": self._calls,
                "arch": int(self._device.arch or 90),
            }
            jobs.append(SandboxJob(_TRACE_JOB, payload, files))
        results: list[list[list[list[_LaunchRecord]]] | None] = []
        for part, result in zip(parts, self._lanes.run(jobs), strict=True):
            answer: Any = result.value if result.status is JobStatus.OK else None
            answers = (
                isinstance(answer, list)
                and len(answer) == len(part)
                and all(isinstance(t, list) for t in answer)
            )
            results.append([calls if all(calls) else [] for calls in answer] if answers else None)
        return results

    def _sum_forecasts(self, calls: Sequence[Sequence[_LaunchRecord]]) -> tuple[float, float] | None:
        """(log2 ms, P(fails)), of all that it launches and of nothing that was timed."""
        if not calls:
            return None
        logs, runs = [], 1.0
        for launches in calls:
            kernels = [self._forecast_launch(x) for x in launches]
            logs.append(math.log2(sum(2.0**mean for mean, _ in kernels)))
            runs *= float(np.prod([1.0 - p for _, p in kernels]))
        # The same kernels at several sizes fail together.
        return float(np.mean(logs)), 1.0 - runs ** (1.0 / len(calls))

    def _forecast_launch(self, launch: _LaunchRecord) -> tuple[float, float]:
        """(log2 ms, P(fails)) of one launch."""
        config = Config.from_json(launch["config"])
        candidate = Candidate(config)
        kernel = Kernel(launch["kernel"], source_sha256=digest(launch["ttir"]))
        arguments = [Argument.from_json(a) for a in launch["arguments"]]
        problem = Problem.of(kernel, arguments, self._device)
        texts = {assignment_key(dict(config.kwargs)): launch["ttir"]}
        grids = {candidate: tuple(launch["grid"])}
        result = self._surrogate.forecast(Query(problem, [candidate], grids, ttir=texts))
        return float(result.mean[0]), float(result.p_fail[0])
