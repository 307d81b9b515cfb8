"""Seconds that Inductor would have taken to tune an operation in its own way, less those spent on it here.

Inductor compiles all choices of an operation in its pool of processes while it lowers the rest of the graph, and
then times them one after the other. Seconds of workers run side by side: their sum is nobody's waiting time.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forecast_autotune.records import Candidate
from forecast_autotune.tuning.host_seconds import forecast_compile_seconds
from forecast_integrations.inductor.choices.templates import TEMPLATE

RECOMPILE_RATIO = 0.85
"""Seconds for a choice that the process compiles once more by itself, per second that a worker took beside the few
others that were chosen: ViT, BERT and Llama in `benchmarks.inductor.whole_models` had 0.83, 0.76 and 1.1 (torch 2.11,
CUDA 13, 16 cores). It does so where the assemblers' releases differ (see `hooks.assembler`)."""


@dataclass
class OperationSeconds:
    """Where the seconds of one operation went, in wall time."""

    benchmark: float = 0.0
    """Timing choices."""
    benchmarked: int = 0
    """How many were timed in that."""
    later_rounds: float = 0.0
    """Waiting for compilations of rounds after the first, which Inductor does not have."""

    def add_benchmark(self, seconds: float, choices: int) -> None:
        """Count one benchmark of so many choices."""
        self.benchmark += seconds
        self.benchmarked += choices


def inductor_seconds_saved(
    candidates: Sequence[Candidate],
    compiled: Mapping[Candidate, float],
    left_out: Collection[Candidate],
    spent: OperationSeconds,
    *,
    forecast_s: float,
    workers: int,
    compiles_twice: bool,
) -> float:
    """Seconds that Inductor would have taken on top for all `candidates`; 0 where nothing can be said of it.

    `compiled` is seconds that a worker took per compiled choice, `left_out` what was neither compiled nor timed,
    `forecast_s` what forecasts took. `workers` compile at once. With `compiles_twice` the process compiles each
    choice again by itself, alone, which Inductor does unless workers and process share an assembler. Little is
    claimed of lists that fit the pool: further compilation takes the time of all work over all workers.
    """
    templates = [c for c in candidates if c.variant.startswith(TEMPLATE)]
    forecast = forecast_compile_seconds(templates, compiled)
    if forecast is None or not spent.benchmarked:
        return 0.0
    seconds = dict(zip(templates, map(float, forecast), strict=True))
    pool = sum(s for c, s in seconds.items() if c in left_out) / max(1, workers)
    alone = RECOMPILE_RATIO * sum(seconds.values()) if compiles_twice else 0.0
    timing = len(left_out) * spent.benchmark / spent.benchmarked
    return max(0.0, pool + alone + timing - spent.later_rounds - forecast_s)


def compile_workers() -> int:
    """How many choices Inductor compiles at once."""
    from torch._inductor import config

    return int(config.compile_threads or 1)


VARIABLE = "TRITON_PTXAS_PATH"
"""Where Triton looks for an assembler first; compile workers set it for themselves."""
_VERSION_S = 5.0
"""Seconds within which an assembler has to name its release."""


def inductor_compiles_twice() -> bool:
    """Whether Inductor without us would compile each choice in a worker, and in this process once more."""
    from torch._inductor.runtime import compile_tasks

    named = os.environ.get(VARIABLE, "")
    # Up to torch 2.11 it is in torch/bin, later one folder further down.
    above = Path(compile_tasks.__file__).absolute().parents[1:3]
    return named in [str(folder / "bin" / "ptxas") for folder in above] and _releases_differ(named)


@functools.cache
def _releases_differ(path: str) -> bool:
    try:
        from triton.backends import nvidia

        bundled = str(Path(nvidia.__file__ or "").parent / "bin" / "ptxas")
        releases = [
            subprocess.check_output([each, "--version"], timeout=_VERSION_S, stderr=subprocess.DEVNULL)
            for each in (path, bundled)
        ]
    except (ImportError, OSError, subprocess.SubprocessError):
        return False
    return releases[0] != releases[1]
