"""Forecasts of a pack's Triton solutions by the shipped surrogate: of every kernel that they would launch.

A solution is called in a sandbox on tensors without memory, see `pack_cell`. Its time on a workload is
forecast as the sum of its kernels' times; what its torch code costs besides is left to the search's results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.features.ttir import assignment_key
from forecast_autotune.records import Argument, Candidate, Config, Device, Kernel, Problem, digest
from forecast_autotune.surrogates.base import Query
from forecast_autotune.surrogates.default import default
from forecast_harness.packs.schema import Format
from forecast_harness.sandbox.api import Job, Lane, Limits, Status
from forecast_harness.search.records import Node, Target
from forecast_harness.search.targets import pack_of
from forecast_harness.search.tuned import Config as TunedConfig
from forecast_harness.search.tuned import applied, configs_of, spread

MOST = 8
"""Configs of one source that are traced, the source as it stands among them."""
RANKED = 24
"""Configs of one source that are forecast to choose from."""
_KEPT = 4096
_LIMITS = Limits(wall_s=60.0, trusted_s=60.0)
_TRACE = "forecast_harness.search.pack_cell:main"


class PackTracer:
    """Traces and forecasts solutions of one pack. Answers are kept: they depend on the text alone."""

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

    def best(self, source: str, configs: Sequence[TunedConfig], n: int) -> tuple[TunedConfig, ...]:
        """Up to `n` of the configs to time: the most promising, and the one most unlike the first of all.

        Without forecasts, a spread over all of them.
        """
        told = [(c, self._forecast(applied(source, c))) for c in spread(configs, RANKED)]
        ranked = [(f[0] + 6.0 * f[1], i, c) for i, (c, f) in enumerate(told) if f is not None]
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
        found = [self._forecast(applied(source, c)) for c in spread([{}, *configs_of(source)], MOST)]
        told = [f for f in found if f is not None]
        return min(told, key=lambda f: f[0] + 6.0 * f[1], default=None)

    def _forecast(self, source: str) -> tuple[float, float] | None:
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
        if result.status is not Status.OK or not all(result.value):
            return None
        logs, runs = [], 1.0
        for launches in result.value:
            kernels = [self._kernel(x) for x in launches]
            logs.append(math.log2(sum(2.0**mean for mean, _ in kernels)))
            runs *= float(np.prod([1.0 - p for _, p in kernels]))
        # The same kernels at several sizes fail together.
        return float(np.mean(logs)), 1.0 - runs ** (1.0 / len(result.value))

    def _kernel(self, launch: dict[str, Any]) -> tuple[float, float]:
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
