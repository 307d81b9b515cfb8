"""Seconds that the host tool would have taken for a decision on this machine, from the candidates that were compiled.

A saving is a prediction less what was spent, and is claimed only where the prediction can be trusted.
All constants of tuning without us are here, each with what it was read from.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from forecast_autotune.records import Candidate, Measurement, Problem
from forecast_autotune.surrogates.protocol import Array

SOLO_COMPILE_RATIO = 0.48
"""Compile seconds of a config alone, per second of one among 16 that compile on 16 cores without a pause:
`triton.autotune` compiled 72 matmul configs in 31.4 s, a harvest's children in 65.8 s of their own."""
HOST_COMPILE_RATIO = 1.15
"""Compile seconds of `triton.autotune`, one config after the other in the user's process, per second that
`forecast_compile_seconds` makes of the first children of a decision. Eight runs of `benchmarks.tuning.matmul72`
(H200, 16 cores) had 0.9 to 1.4."""
HOST_TIMING_S = 0.114
"""Seconds for one config under `do_bench` with its defaults (25 ms of warm-up, 100 ms), kernels below a
millisecond: 7.6 to 8.2 s for 70 compiled configs (second shape of `benchmarks.tuning.matmul72`, eight runs)."""
EXHAUSTIVE_TIMING_S = 0.13
"""The same as replay counts it for its exhaustive baseline, kernels of all lengths."""
HOST_RUNS = 7.0
"""Launches per config that `do_bench` makes besides: the first, five for its estimate, and one of each loop."""
STUB_S = 0.29
"""Seconds for a C launcher of one signature in the user's process (Triton up to 3.8, gcc)."""
LAST_TRITON_WITH_STUBS = (3, 8)

MIN_COMPILED = 3
"""Compilations that a prediction needs at least."""
MAX_EXTRAPOLATED_SHARE = 0.5
"""Most of the predicted compile seconds that may fall to configs with far larger tiles per thread than any that
was compiled: their seconds grow without bounds where registers spill."""
COMPILE_CPU_S = "compile_cpu_s"
"""In a measurement's `extra`: seconds of processors for its compilation. A compilation among more children than
there are free cores waits for one, which one after the other they would not."""
USER_BENCHMARK = "user-do-bench"
"""Protocol of times that a user's own benchmark function took."""
_CACHED_S = 0.03
"""A compilation that is quicker has found its binary in a cache."""

_TILE_SLOPE, _TILE_KNEE, _MAX_TILE = 1.15, 5.3, 10.0
"""Seconds of a config relative to a small one of its kernel: 1 + 2 ** (slope * (t - knee)), t = log2 of tile
elements per thread. Fitted to 18 exhaustive tables of ten kernels on an H200, where the seven largest of a list
take as long as all others; larger tiles than the last number are counted as such."""
_MIN_BLOCK = 8
"""Integer parameters below this are counts, not tile sizes."""
_EXTRAPOLATED = 1.0
"""Tiles this much (log2) larger than the largest compiled one are extrapolated to."""


def _log2_tile(candidate: Candidate) -> float:
    """log2 of tile elements per thread: of its two largest block sizes, whatever they are called."""
    sizes = [
        value
        for _, value in candidate.config.kwargs
        if isinstance(value, int) and not isinstance(value, bool) and value >= _MIN_BLOCK
    ]
    tile = math.prod(sorted(sizes)[-2:])
    return min(_MAX_TILE, math.log2(tile) - math.log2(32 * max(1, candidate.config.num_warps)))


def forecast_compile_seconds(
    candidates: Sequence[Candidate], seconds: Mapping[Candidate, float]
) -> Array | None:
    """Seconds of each candidate, [n], by the `seconds` of those that were compiled; None without trust.

    Compiled ones keep their own. There is no trust in fewer than `MIN_COMPILED` of them, nor where the larger
    part of the sum is an extrapolation.
    """
    known = {c: s for c, s in seconds.items() if s >= _CACHED_S}
    if len(known) < MIN_COMPILED or not len(candidates):
        return None
    tiles = np.array([_log2_tile(c) for c in candidates])
    seen = np.array([_log2_tile(c) for c in known])
    level = sum(known.values()) / float(_curve(seen).sum())
    forecast = level * _curve(tiles)
    far = tiles > float(seen.max()) + _EXTRAPOLATED
    trusted = float(forecast[far].sum()) <= MAX_EXTRAPOLATED_SHARE * float(forecast.sum())
    for row, candidate in enumerate(candidates):
        forecast[row] = known.get(candidate, forecast[row])
    return forecast if trusted else None


def _curve(tiles: Array) -> Array:
    return np.asarray(1.0 + np.exp2(_TILE_SLOPE * (tiles - _TILE_KNEE)))


def triton_autotune_seconds(
    candidates: Sequence[Candidate],
    measured: Mapping[Candidate, Measurement],
    *,
    failing: int = 0,
    triton: str = "",
) -> float | None:
    """Seconds in which `triton.autotune` would compile and time the candidates, one after the other.

    `measured` is what happened to candidates of this decision, `failing` how many others are known not to run:
    these, and those of `measured` that failed, cost their compilation but no timing. `triton` is its release;
    up to 3.8 a launcher is built besides. Where most of `measured` had binaries already, so would have Triton, and
    nothing is compiled. None where there is no trust: fewer than `MIN_COMPILED` compilations or times known, or
    a list whose slowest compilations are unlike any that was seen.
    """
    ran = [m.ms for m in measured.values() if m.ok]
    if len(ran) < MIN_COMPILED:
        return None
    failed = failing + sum(not m.ok for m in measured.values())
    timing = max(0, len(candidates) - failed) * (HOST_TIMING_S + HOST_RUNS * statistics.median(ran) / 1000.0)
    compiled = {c: s for c, m in measured.items() if (s := _seconds_alone(m)) >= _CACHED_S}
    if len(compiled) * 2 < len(measured):
        return timing
    forecast = forecast_compile_seconds(candidates, compiled)
    if forecast is None:
        return None
    return timing + HOST_COMPILE_RATIO * float(forecast.sum()) + (STUB_S if _builds_stubs(triton) else 0.0)


def _seconds_alone(m: Measurement) -> float:
    """Seconds of a compilation that nothing waits beside: those of its processors, where they were counted."""
    computed = m.extra.get(COMPILE_CPU_S)
    if isinstance(computed, int | float) and not isinstance(computed, bool):
        return min(float(computed), m.compile_s or 0.0)
    return m.compile_s or 0.0


def _builds_stubs(release: str) -> bool:
    try:
        return tuple(int(part) for part in release.split(".")[:2]) <= LAST_TRITON_WITH_STUBS
    except ValueError:
        return False


def seconds_saved(
    problem: Problem,
    candidates: Sequence[Candidate],
    measured: Mapping[Candidate, Measurement],
    *,
    known: Collection[Candidate] = (),
    refused: int = 0,
    wall_s: float,
) -> float:
    """Seconds that `triton.autotune` would have taken on top of the `wall_s` of a decision; 0 without trust.

    `measured` is what happened in the decision, `known` what was known before: nobody measures it again, and Triton
    knows nothing of sources other than the user's. `refused` is how many candidates cannot run. Nothing is said of
    other languages, nor where the user's own benchmark function times, as nobody knows for how long.
    """
    protocols = {m.protocol for m in measured.values()}
    if problem.kernel.language != "triton" or any(name.startswith(USER_BENCHMARK) for name in protocols):
        return 0.0
    before = {c for c in known if c not in measured}
    listed = [c for c in candidates if c.is_base_variant and c not in before]
    base = {c: m for c, m in measured.items() if c.is_base_variant}
    predicted = triton_autotune_seconds(
        listed, base, failing=refused, triton=dict(problem.toolchain).get("triton", "")
    )
    return 0.0 if predicted is None else max(0.0, predicted - wall_s)
