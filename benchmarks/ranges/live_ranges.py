"""Claim: one config decided for a range of sizes is nearly as fast at each as the best config of that size.

    python -m benchmarks.ranges.live_ranges --out benchmarks/results/live_ranges.json [--only matmul softmax ...]

For every kernel of `RANGES`, on the device: `truth` measures every config at `--sizes` sizes,
evenly spaced on a log scale, each as a decision of its own in exhaustive mode. `robust` decides once for the range,
`bucket=Robust(argument, (low, high))` with its defaults, in a fresh store, at a call in the middle; the sizes at which
it measures are its own. `middle` decides at that middle size alone, in a fresh store. Each choice is looked up in
`truth`: its slow-down against the best config of every size. `interpolated` is what four of the sizes of `truth`
choose, with times between them interpolated: the choice of `robust` if it measured everything there.
`best_single` is the config that is best over all sizes in hindsight: no single config can be better.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import kernels
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say

LEAST_STEP = 16
"""Sizes are multiples of it, so that all of a range are compiled alike."""


@dataclass(frozen=True)
class KernelRange:
    """One kernel over a range of one argument."""

    kernel: str
    """Its name among `benchmarks.kernels`."""
    argument: str
    """The integer argument that varies; it is in the kernel's key."""
    low: int
    high: int
    shape: Callable[[int], tuple[int, ...]]
    """The shape that a case of this kernel is made for, at a size."""

    def sizes(self, count: int) -> list[int]:
        """At most `count` sizes, both ends among them, evenly on a log scale."""
        ratio = self.high / self.low
        exact = [self.low * ratio ** (i / (count - 1)) for i in range(count)]
        return sorted({LEAST_STEP * max(1, round(e / LEAST_STEP)) for e in exact})

    def case(self, size: int) -> kernels.Case:
        """The kernel at one size."""
        first = kernels.cases([self.kernel])[0]
        result = first.make
        assert isinstance(result, partial), f"{self.kernel} makes its arguments in a way of its own"
        name = f"{self.kernel}/{self.argument}={size}"
        return replace(first, name=name, make=partial(result.func, self.shape(size), *result.args[1:]))


RANGES: Sequence[KernelRange] = (
    KernelRange("matmul", "M", 16, 16384, lambda m: (m, 4096, 4096)),
    KernelRange("softmax", "n_rows", 16, 65536, lambda m: (m, 4096)),
    KernelRange("rms_norm", "xnumel", 16, 65536, lambda m: (m, 5120)),
    KernelRange("swiglu", "tokens", 16, 32768, lambda m: (m, 11008)),
    KernelRange("w8a16_matmul", "M", 16, 16384, lambda m: (m, 14336, 4096)),
    KernelRange("attention", "N_CTX", 128, 16384, lambda m: (1, 32, 8, m, 128)),
    KernelRange("bp_linear_gelu", "M", 16, 16384, lambda m: (m, 3072, 768)),
    KernelRange("fn_addmm_act", "M", 16, 16384, lambda m: (m, 4096, 1024)),
    KernelRange("fn_var_mean", "M", 16, 32768, lambda m: (m, 8192)),
    KernelRange("rows_geglu", "n_rows", 16, 16384, lambda m: (m, 14336)),
    KernelRange("rows_softmax_bwd", "n_rows", 16, 65536, lambda m: (m, 2048)),
    KernelRange("chunk_l2norm", "M", 16, 65536, lambda m: (m, 128)),
    KernelRange("srv_skinny_int8", "M", 16, 8192, lambda m: (m, 4096, 7168)),
    KernelRange("srv_token_quant_int8", "num_tokens", 16, 32768, lambda m: (m, 4096)),
    KernelRange("tem_fused_addmm_relu", "ks0", 16, 16384, lambda m: (m, 4096, 2048)),
)
"""Varying sizes are numbers of tokens, rows or time steps; all others are a layer's."""


NEAR_BEST = 0.05
NULL_RATIO = 8
"""Ends of a range in a dry run."""
COMPARED = ("best_single", "interpolated", "robust", "middle")
INTERPOLATED_SIZES = 4

Times = Sequence[Mapping[str, float]]
"""Milliseconds of every config that ran, by its text, at each size."""


def slowdown(times: Times, config: str) -> float | None:
    """Geometric mean over the sizes of a config's time over the best one's, less 1; None where it did not run."""
    if any(config not in at for at in times):
        return None
    return math.exp(statistics.mean(math.log(at[config] / min(at.values())) for at in times)) - 1.0


def best_single(times: Times) -> tuple[str, float]:
    """The config with the least slow-down over all sizes, and that."""
    shared = [c for c in times[0] if all(c in at for at in times)]
    result = {config: slowdown(times, config) for config in shared}
    config = min(result, key=lambda c: result[c] or 0.0)
    return config, result[config] or 0.0


def interpolated_choice(times: Times, sizes: Sequence[int]) -> str:
    """The config with the least mean logarithm of time over the sizes, by its times at a few of them."""
    shared = [c for c in times[0] if all(c in at for at in times)]
    x = np.log2(np.array(sizes, float))
    known = np.unique(np.round(np.linspace(0, len(sizes) - 1, INTERPOLATED_SIZES)).astype(int))
    means = {c: np.interp(x, x[known], [math.log2(times[i][c]) for i in known]).mean() for c in shared}
    return min(means, key=lambda c: float(means[c]))


def compared(times: Times, chosen: Mapping[str, str]) -> dict[str, Any]:
    """Slow-downs of what was chosen, of the best single config, and at the worst size of each."""
    single, least = best_single(times)
    configs = {"best_single": single, **chosen}
    result: dict[str, Any] = {"best_single": round(least, 5)}
    for name, config in chosen.items():
        slow = slowdown(times, config)
        result[name] = None if slow is None else round(slow, 5)
    worst = {
        name: round(max(at[config] / min(at.values()) for at in times) - 1.0, 5)
        for name, config in configs.items()
        if all(config in at for at in times)
    }
    return {**result, "worst": worst, "configs": configs}


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Geometric means over the kernels; `near` counts those that one config can serve within 5 %."""
    sound = [r for r in rows if all(r[n] is not None for n in COMPARED)]

    def mean(chosen: Sequence[Mapping[str, Any]], name: str) -> float | None:
        if not chosen:
            return None
        return round(math.exp(statistics.mean(math.log1p(r[name]) for r in chosen)) - 1.0, 5)

    near = [r for r in sound if r["best_single"] <= NEAR_BEST]
    return {
        "kernels": len(sound),
        "left_out": [r["kernel"] for r in rows if r not in sound],
        "sizes": [min(r["sizes"] for r in sound), max(r["sizes"] for r in sound)] if sound else [],
        "slowdown": {n: mean(sound, n) for n in COMPARED},
        "within_5_percent": {n: sum(r[n] <= NEAR_BEST for r in sound) for n in COMPARED},
        "where_best_single_within_5_percent": {"kernels": len(near), **{n: mean(near, n) for n in COMPARED}},
        "measurements": {
            "truth": statistics.median(r["measurements"]["truth"] for r in sound) if sound else None,
            "robust": statistics.median(r["measurements"]["robust"] for r in sound) if sound else None,
            "middle": statistics.median(r["measurements"]["middle"] for r in sound) if sound else None,
        },
        "seconds": {
            n: round(statistics.median(r["seconds"][n] for r in sound), 2) if sound else None
            for n in ("robust", "middle")
        },
    }


class LiveRange:
    """One kernel on the device."""

    def __init__(self, a: Namespace, where: str, entry: Any, folder: Path) -> None:
        self.a, self.where, self.entry, self.folder = a, where, entry, folder
        self.sizes: list[int] = entry.sizes(a.sizes)

    def _call(self, store: str, size: int, **options: Any) -> tuple[Any, float]:
        """Decide a call in the store of that name; the tuner and the seconds."""
        from benchmarks import kernels
        from benchmarks.lib.kernel_timing import tuned_call
        from forecast_autotune import autotune

        os.environ["FORECAST_AUTOTUNE_CACHE_DIR"] = str(self.folder / store)
        case = self.entry.case(size)
        listed = kernels.thinned(case, self.a.configs)
        tuner = autotune(listed, list(case.key), reset_to_zero=list(case.reset_to_zero), **options)(
            case.kernel
        )
        result = tuned_call(case, tuner, case.make(self.where), lambda: None)
        return tuner, float(result["seconds"])

    def truth(self) -> list[dict[str, float]]:
        """Times of every config at every size, by the config's text; sizes in an order by lot."""
        order = list(self.sizes)
        random.Random(self.a.seed).shuffle(order)
        result: dict[int, dict[str, float]] = {}
        for size in order:
            tuner, _ = self._call("truth", size, mode="exhaustive")
            given = {
                str(c): t[0] if isinstance(t, list | tuple) else t for c, t in tuner.configs_timings.items()
            }
            result[size] = {c: ms for c, ms in given.items() if math.isfinite(ms)}
        return [result[size] for size in self.sizes]

    def row(self) -> dict[str, Any]:
        """Everything of this kernel. Raises `RuntimeError` where no range was decided."""
        from forecast_autotune import Robust
        from forecast_autotune.store import Store

        entry, middle = self.entry, self.sizes[len(self.sizes) // 2]
        bucket = Robust(entry.argument, (entry.low, entry.high))
        with warnings.catch_warnings(record=True) as result:
            warnings.simplefilter("always")
            ranged, robust_s = self._call("robust", middle, bucket=bucket)
        if not str(ranged.decision.reason).startswith("one config for"):
            raise RuntimeError(f"no range was decided: {[str(w.message)[:300] for w in result]}")
        alone, middle_s = self._call("middle", middle)
        begin = time.perf_counter()
        times = self.truth()
        truth_s = time.perf_counter() - begin
        chosen = {"robust": str(ranged.best_config), "middle": str(alone.best_config)}
        return {
            "kernel": entry.kernel,
            "argument": entry.argument,
            "range": [entry.low, entry.high],
            "sizes": len(self.sizes),
            "at": self.sizes,
            "configs_listed": max(len(at) for at in times),
            **compared(times, {**chosen, "interpolated": interpolated_choice(times, self.sizes)}),
            "reason": str(ranged.decision.reason),
            "measurements": {
                name: sum(len(t.measurements) for t in Store(self.folder / name).tables())
                for name in ("truth", "robust", "middle")
            },
            "seconds": {
                "robust": round(robust_s, 3),
                "middle": round(middle_s, 3),
                "truth": round(truth_s, 1),
            },
            "ms": [{c: round(ms, 6) for c, ms in at.items()} for at in times],
        }


def run(a: Namespace) -> int:
    """All kernels asked for; 1 if one failed."""

    from benchmarks.lib import devices

    report = ResultFile(a, "live_ranges", a.seed)
    wanted = [e for e in RANGES if not a.only or e.kernel in a.only]
    if a.null:  # whose tensors lie in the host's memory
        wanted = [replace(e, high=e.low * NULL_RATIO) for e in wanted]
    rows, failed, begin = [], [], time.perf_counter()
    with devices.device(a.null) as meta:
        where = "cpu" if a.null else meta
        devices.warm_up_device(where)
        for entry in wanted:
            if time.perf_counter() - begin > a.seconds:
                say(f"time is up before {entry.kernel}")
                break
            with tempfile.TemporaryDirectory(prefix="live-range-", ignore_cleanup_errors=True) as folder:
                try:
                    row = LiveRange(a, where, entry, Path(folder)).row()
                except Exception as error:
                    failed.append(entry.kernel)
                    say(f"FAILED {entry.kernel}: {type(error).__name__}: {error}"[:600])
                    continue
            rows.append(row)
            report.add("kernels", row)
            say(
                f"{row['kernel']}: best single {row['best_single']}, robust {row['robust']}, middle {row['middle']}; "
                f"measured {row['measurements']}, {row['seconds']} s"
            )
    report.finish({**summarise(rows), "failed": failed})
    return int(bool(failed))


def main() -> int:
    command_line = parser(__doc__)
    command_line.add_argument("--only", nargs="*", default=[], metavar="KERNEL", help="of these kernels")
    command_line.add_argument("--sizes", type=int, default=16, help="sizes of the truth")
    command_line.add_argument("--configs", type=int, default=24, help="the most configs of a list, by lot")
    command_line.add_argument("--seed", type=int, default=0, help="of the order of sizes")
    command_line.add_argument("--seconds", type=float, default=1e9, help="begin no kernel after so many")
    return run(parse_arguments(command_line))


if __name__ == "__main__":
    sys.exit(main())
