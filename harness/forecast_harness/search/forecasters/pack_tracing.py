"""Forecasts of a pack's Triton solutions by the shipped surrogate: of every kernel that they would launch.

A solution is called in a sandbox on tensors without memory, see `pack_cell`. Its time on a workload is
forecast as the sum of its kernels' times; what its torch code costs besides is left to the search's results.
Where each call launches one kernel, what was timed of solutions that launch one with the same arguments
moves the forecasts too, as if all were variants of one kernel. How a time of several kernels divides among
them is not known, so it teaches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.features.ttir.walk import assignment_key, assignment_of
from forecast_autotune.records import Argument, Candidate, Config, Device, Kernel, Problem, digest
from forecast_autotune.surrogates.default import default
from forecast_autotune.surrogates.protocol import Array, Query
from forecast_harness.packs.schema import Format
from forecast_harness.sandbox.api import Job, Lane, Limits, Status
from forecast_harness.search.forecasters.timings import Timing, measurement, remember
from forecast_harness.search.records import Node, Target
from forecast_harness.search.targets import pack_of
from forecast_harness.search.tuned import Config as TunedConfig
from forecast_harness.search.tuned import applied, configs_of, spread

MOST = 8
"""Configs of one source that are traced, the source as it stands among them."""
RANKED = 24
"""Configs of one source that are forecast to choose from."""
_KEPT = 4096
_TRACES = 64
"""Sources without timings whose IR is kept."""
_LIMITS = Limits(wall_s=60.0, trusted_s=60.0)
_TRACE = "forecast_harness.search.pack_cell:main"
_Launch = dict[str, Any]
"""One launch of a kernel, as `pack_cell.trace` tells it."""


@dataclass(frozen=True)
class _Alone:
    """The only kernel that a call launches."""

    kernel: str
    config: Config
    arguments: tuple[Argument, ...]
    """Of the call; meta-parameters are the config's."""
    grid: tuple[int, ...]
    ttir: str

    @classmethod
    def of(cls, launches: Sequence[_Launch]) -> _Alone | None:
        """None where there are several."""
        if len(launches) != 1:
            return None
        (said,) = launches
        arguments = tuple(Argument.from_json(a) for a in said["arguments"] if a["kind"] != "constexpr")
        config = Config.from_json(said["config"])
        return cls(said["kernel"], config, arguments, tuple(said["grid"]), said["ttir"])


class PackTracer:
    """Traces and forecasts solutions of one pack. Use from one thread at a time."""

    def __init__(self, target: Target, folder: Path | None = None) -> None:
        """`folder` is for scratch files; the sandbox starts when it is first needed."""
        self._target, self._folder = target, folder
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
        self._own = pack.definition.format is Format.OWN
        self._lane: Lane | None = None
        self._known: dict[str, tuple[float, float] | None] = {}
        """By id of the node: such answers depend on the text alone."""
        self._traces: dict[str, list[list[_Launch]]] = {}
        """Launches per call, by source with its config applied; none where that cannot be traced."""
        self._timed: dict[tuple[str, str], Timing] = {}
        """By source and source with a config applied."""
        self._surrogate = default()
        self.version = f"{self._surrogate.name}-{self._surrogate.version}"

    def best_of(self, node: Node) -> tuple[float, float] | None:
        """(log2 ms, P(fails)) of a source's most promising config; None where nothing can be traced."""
        if not self._own or node.language != "triton":
            return None
        if node.id not in self._known:
            if len(self._known) >= _KEPT:
                self._known.clear()
            try:
                self._known[node.id] = self._best(node.source)
            except ForecastAutotuneError:
                self._known[node.id] = None  # odd CONFIGS or IR, or no sandbox here: the search goes on
        return self._known[node.id]

    def learn(self, source: str, timings: Sequence[tuple[TunedConfig, Timing]]) -> None:
        """Have choices from now on heed what was timed of some of a source's configs; see `remember`.

        A call of a timing is a workload that is timed on a device, in the pack's order. Raises `RecordError`
        for a config that names no constant of the source.
        """
        if self._own:  # no other can be called on tensors without memory
            remember(self._timed, {(source, applied(source, c)): t for c, t in timings}, len(self._calls))

    def best(self, source: str, configs: Sequence[TunedConfig], n: int) -> tuple[TunedConfig, ...]:
        """Up to `n` of the configs to time: the most promising, and the one most unlike the first of all.

        Without forecasts, a spread over all of them.
        """
        asked = spread(configs, RANKED)
        launched = [self._launched(applied(source, c)) for c in asked]
        told = self._learnt(source, launched) or [self._summed(calls) for calls in launched]
        ranked = [(f[0] + 6.0 * f[1], i, c) for i, (c, f) in enumerate(zip(asked, told, strict=True)) if f]
        if len(configs) <= n or not ranked:
            return spread(configs, n)
        top = [c for _, _, c in sorted(ranked, key=lambda r: r[:2])[: n - (n > 2)]]
        rest = [c for c in spread(configs, len(top) + 1) if c not in top]
        return (*top, *rest[: n - len(top)])

    def close(self) -> None:
        """End the sandbox."""
        if self._lane is not None:
            self._lane.close()
        self._lane = None

    def _best(self, source: str) -> tuple[float, float] | None:
        asked = spread([{}, *configs_of(source)], MOST)
        found = [self._summed(self._launched(applied(source, c))) for c in asked]
        told = [f for f in found if f is not None]
        return min(told, key=lambda f: f[0] + 6.0 * f[1], default=None)

    def _launched(self, source: str) -> list[list[_Launch]]:
        """What it launches, per call; empty where that cannot be traced, or any call launches nothing."""
        if source not in self._traces:
            self._traces[source] = self._traced(source)
            timed = {s for _, s in self._timed}
            for other in [s for s in self._traces if s not in timed and s != source][:-_TRACES]:
                del self._traces[other]
        return self._traces[source]

    def _traced(self, source: str) -> list[list[_Launch]]:
        if self._lane is None:
            self._lane = Lane(scratch=self._folder, environment={"TRITON_INTERPRET": "0"})
            self._lane.__enter__()
        payload = {
            "file": "solution.py",
            "entry": self._target.entry,
            "calls": self._calls,
            "arch": int(self._device.arch or 90),
        }
        result = self._lane.run(Job(_TRACE, payload, {"solution.py": source}), _LIMITS)
        fine = result.status is Status.OK and all(result.value)
        return list(result.value) if fine else []

    def _summed(self, calls: Sequence[Sequence[_Launch]]) -> tuple[float, float] | None:
        """(log2 ms, P(fails)), of all that it launches and of nothing that was timed."""
        if not calls:
            return None
        logs, runs = [], 1.0
        for launches in calls:
            kernels = [self._kernel(x) for x in launches]
            logs.append(math.log2(sum(2.0**mean for mean, _ in kernels)))
            runs *= float(np.prod([1.0 - p for _, p in kernels]))
        # The same kernels at several sizes fail together.
        return float(np.mean(logs)), 1.0 - runs ** (1.0 / len(calls))

    def _learnt(
        self, source: str, launched: Sequence[Sequence[Sequence[_Launch]]]
    ) -> list[tuple[float, float] | None] | None:
        """(log2 ms, P(fails)) of each config of a source, given what was timed; None for what has no trace.

        None at all where the timings say nothing of some call, or of some config: levels of forecasts with
        and without timings do not compare.
        """
        places = [i for i, calls in enumerate(launched) if calls]
        listed = range(len(self._calls) if places else 0)
        calls_of_own = [[x for i in places if (x := _Alone.of(launched[i][n])) is not None] for n in listed]
        for own in calls_of_own:
            if len({x.config for x in own}) < len(places) or len({x.arguments for x in own}) > 1:
                return None
        timed = [(s, t, self._launched(text)) for (s, text), t in self._timed.items()]
        means, runs = list[Array](), list[Array]()
        for number, own in enumerate(calls_of_own):
            rows = {Candidate(one.config): one for one in own}
            timings = dict[Candidate, Timing]()
            for other, timing, calls in timed:
                kin = _Alone.of(calls[number]) if calls else None
                if kin is None or kin.arguments != own[0].arguments:
                    continue
                candidate = Candidate(kin.config) if other == source else Candidate(kin.config, digest(other))
                rows.setdefault(candidate, kin)
                timings[candidate] = timing
            if not timings:
                return None
            kernel = Kernel(own[0].kernel, source_sha256=digest(source))
            problem = Problem.of(kernel, own[0].arguments, self._device)
            texts = {assignment_of(c): one.ttir for c, one in rows.items()}
            measured = [measurement(problem.id, c, t, number) for c, t in timings.items()]
            grids = {c: one.grid for c, one in rows.items()}
            found = self._surrogate.forecast(Query(problem, list(rows), grids, measured, ttir=texts))
            means.append(found.mean[: len(own)])
            runs.append(1.0 - found.p_fail[: len(own)])
        if not means:
            return None
        fails = 1.0 - np.prod(runs, axis=0) ** (1.0 / len(runs))
        told = zip(np.mean(means, axis=0).tolist(), fails.tolist(), strict=True)
        by_place = dict(zip(places, told, strict=True))
        return [by_place.get(i) for i in range(len(launched))]

    def _kernel(self, launch: _Launch) -> tuple[float, float]:
        """(log2 ms, P(fails)) of one launch."""
        config = Config.from_json(launch["config"])
        candidate = Candidate(config)
        kernel = Kernel(launch["kernel"], source_sha256=digest(launch["ttir"]))
        arguments = [Argument.from_json(a) for a in launch["arguments"]]
        problem = Problem.of(kernel, arguments, self._device)
        texts = {assignment_key(dict(config.kwargs)): launch["ttir"]}
        grids = {candidate: tuple(launch["grid"])}
        found = self._surrogate.forecast(Query(problem, [candidate], grids, ttir=texts))
        return float(found.mean[0]), float(found.p_fail[0])
