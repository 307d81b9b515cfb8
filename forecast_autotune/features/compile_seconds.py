"""How long a candidate will compile, before it does: a linear formula on facts of its TTIR.

Compilers take time for every operation of a thread: many operations, large tiles on few warps and deep pipelines
compile for seconds where their neighbours take tenths. The weights are fitted to recorded compilations by
`forecast_train.surrogate.compile_seconds`; compilations of a decision then correct the level
(`CompileSeconds.level`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from forecast_autotune.errors import RecordError
from forecast_autotune.features.cost import Array
from forecast_autotune.features.ttir.facts import TtirFacts

ASSET = "compile_seconds.json"
FEATURES = (
    "operations",
    "tile",
    "live",
    "accumulator",
    "dots",
    "dot_work",
    "stages",
    "warps",
    "depth",
    "elementwise",
    "integer",
    "special",
    "reduced",
    "loaded",
    "stored",
    "converted",
    "levels",
    "pipelined",
    "exchanged",
    "scanned",
    "vectors",
    "dot_stages",
    "operations_tile",
)
_LEAST_S, _MOST_S = 0.05, 120.0
_LATE, _LATE_SHARE = 1.5, 0.55
"""log2 beyond the median where the tail of compile seconds is that of a power law, and the inverse of its index, which
is what such a law has ahead for each second behind it: of 91 recorded candidates that were late by a doubling 69 %
ended before they were late by another one. Taken whole from the start, it gives up more than its seconds are worth.
"""


def _log(value: float) -> float:
    return math.log2(1.0 + max(value, 0.0))


def compile_features(facts: TtirFacts, warps: int, stages: int) -> list[float]:
    """Numbers in the order of `FEATURES`; counts are per thread and iteration, as logarithms."""
    threads = 32.0 * max(1, warps)
    once = threads * max(facts.iterations, 1.0)
    tile = _log(facts.largest_tile / threads)
    dots = float(facts.dot_ops > 0)
    return [
        _log(facts.ops),
        tile,
        _log(facts.live_bytes / 4.0 / threads),
        _log(facts.accumulator_bytes / 4.0 / threads),
        dots,
        _log(facts.dot_flops / once),
        float(stages),
        math.log2(max(1, warps)),
        float(facts.loop_depth),
        _log(facts.elementwise / once),
        _log(facts.integer_ops / once),
        _log(facts.special / once),
        _log(facts.reduce_elements / once),
        _log(facts.load_bytes / once),
        _log(facts.store_bytes / threads),
        _log(facts.conversions / once),
        facts.load_levels,
        _log(facts.pipelined_bytes / 1024.0),
        _log(facts.reduced_bytes),
        _log(facts.scan_elements / once),
        _log(facts.largest_tile / threads / max(facts.mean_contiguous, 1.0)),
        stages * dots,
        _log(facts.ops) * tile / 5.0,
    ]


def stage_doublings(backend: str, release: str) -> float:
    """Doublings of AMD's compile seconds with each stage beyond two, for a large tile.

    From two stages to five of 128 x 128 x 128 it takes 12 to 20 times as long by Triton 3.9, and 2 to 3 times before.
    """
    if backend != "hip":
        return 0.0
    return 0.4 if release.startswith(("3.4", "3.5", "3.6", "3.7", "3.8")) else 1.2


def deep_log2_seconds(facts: TtirFacts, stages: int, doublings: float) -> float:
    """The addition of such stages to log2(seconds) of a candidate, in full where an iteration loads 64 KiB or more."""
    return doublings * max(0, min(stages, 6) - 2) * min(1.0, facts.direct_bytes / 65536.0)


@dataclass(frozen=True)
class CompileSeconds:
    """Weights of the formula, and its errors: all in log2(seconds)."""

    weights: tuple[float, ...]
    """Weights in the order of `FEATURES`."""
    intercept: float
    kernel_sd: float
    """Standard deviation of a kernel's mean error, on a machine like that of the recordings."""
    config_sd: float
    """Standard deviation of a candidate's error from its kernel's mean."""

    def __post_init__(self) -> None:
        if len(self.weights) != len(FEATURES):
            raise RecordError(
                f"the formula of compile seconds needs {len(FEATURES)} weights, got {len(self.weights)}: fit it "
                "again with `forecast_train.surrogate.compile_seconds.fit_compile_seconds`"
            )

    def log2_seconds(self, features: Sequence[Sequence[float]]) -> Array:
        """Medians of log2(seconds) for rows of `compile_features`, shape [n]."""
        if not len(features):
            return np.zeros(0)
        result = np.asarray(features, float) @ np.array(self.weights) + self.intercept
        return np.asarray(np.clip(result, math.log2(_LEAST_S), math.log2(_MOST_S)))

    def level(self, errors: Sequence[float]) -> float:
        """The correction of the formula's log2(seconds) of a kernel, from `errors` (true - formula) of its candidates.

        The posterior mean of a normal level under normal errors.
        """
        if not len(errors):
            return 0.0
        return float(np.sum(errors)) / (len(errors) + (self.config_sd / self.kernel_sd) ** 2)


def remaining_seconds(log2_median: float, sd: float, elapsed_s: float) -> float:
    """Expected seconds until a compilation ends that has run for `elapsed_s`, if its log2 is normal but for its tail.

    The mean of a log-normal variable beyond a threshold, less the threshold; but at least a share of `elapsed_s` that
    grows with the delay: a compilation that is long overdue does not end soon.
    """
    mu, sigma = log2_median * math.log(2), max(sd, 1e-3) * math.log(2)
    mean = math.exp(mu + sigma**2 / 2)
    if elapsed_s <= 0.0:
        return mean
    late = math.log2(elapsed_s) - log2_median
    z = late * math.log(2) / sigma
    beyond = _upper_tail(z)
    if beyond < 1e-6:
        return elapsed_s
    least = _LATE_SHARE * elapsed_s * min(1.0, max(0.0, late / _LATE))
    return max(least, mean * _upper_tail(z - sigma) / beyond - elapsed_s)


def _upper_tail(z: float) -> float:
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def parse_compile_seconds(text: str) -> CompileSeconds:
    """Read a file of `forecast_train.surrogate.compile_seconds`. Raises `RecordError` for another text."""
    try:
        data = json.loads(text)
        weights = tuple(float(data["weights"][name]) for name in FEATURES)
        result = CompileSeconds(
            weights, float(data["intercept"]), float(data["kernel_sd"]), float(data["config_sd"])
        )
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"no formula of compile seconds: {error!r}") from error
    if not all(map(math.isfinite, (*result.weights, result.intercept, result.kernel_sd, result.config_sd))):
        raise RecordError("a formula of compile seconds holds finite numbers only")
    return result


@cache
def shipped_compile_seconds() -> CompileSeconds:
    """The formula inside the package."""
    path = files("forecast_autotune") / "assets" / ASSET
    return parse_compile_seconds(path.read_text(encoding="utf-8"))
