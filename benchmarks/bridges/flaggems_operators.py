"""Claim: FlagGems' operators tune in a part of the time through us, and run as fast as with its own policy.

    python -m benchmarks.bridges.flaggems_operators --out FILE.json [--repeats 3] [--only mm,amax]

Needs `flag_gems` beside the package (`pip install --no-deps flag_gems sqlalchemy greenlet`). Every operator at every
shape runs in processes of its own, FlagGems' default policy and ours in turns, each with empty caches and an empty
database: the seconds of the first call, and the median time of later ones, which are recorded as a graph where they
can be, as a launch takes the host longer than most of these kernels run. Operators whose tuners chose the same
configs have no regret: their times differ by noise.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.lib.bridges.turns import run_in_turns
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser

ARMS = ("own", "ours")
CLAIM = "flaggems_operators"
TIMEOUT_S = 900.0


def operators() -> dict[str, Callable[[Any], Callable[[], object]]]:
    """By name: a function of the device that makes the inputs and gives the call."""
    import torch

    half = torch.float16

    def tensor(where: Any, *shape: int, dtype: Any = half) -> Any:
        return torch.randn(shape, device=where, dtype=dtype)

    def of(function: Callable[..., object], *shapes: tuple[int, ...], **options: Any) -> Any:
        def make(where: Any) -> Callable[[], object]:
            given = [tensor(where, *shape) for shape in shapes]
            return lambda: function(*given, **options)

        return make

    return {
        "mm": of(torch.mm, (4096, 4096), (4096, 4096)),
        "mm_skinny": of(torch.mm, (16, 4096), (4096, 14336)),
        "bmm": of(torch.bmm, (32, 1024, 128), (32, 128, 1024)),
        "addmm": of(torch.addmm, (4096,), (2048, 4096), (4096, 4096)),
        "baddbmm": of(torch.baddbmm, (32, 512, 512), (32, 512, 128), (32, 128, 512)),
        "mv": of(torch.mv, (8192, 8192), (8192,)),
        "amax": of(torch.amax, (8192, 4096), dim=1),
        "max": of(torch.max, (8192, 4096), dim=1),
        "min": of(torch.min, (8192, 4096), dim=1),
        "mean": of(torch.mean, (8192, 4096), dim=1),
        "all": of(torch.all, (8192, 4096), dim=1),
        "any": of(torch.any, (8192, 4096), dim=1),
        "aminmax": of(lambda x: torch.aminmax(x, dim=1), (8192, 4096)),
        "sum": of(torch.sum, (8192, 4096), dim=1),
        "prod": of(torch.prod, (8192, 4096), dim=1),
        "exponential": of(lambda x: x.exponential_(), (8192, 4096)),
        "conj_physical": lambda where: partial(
            torch.conj_physical, tensor(where, 4096, 4096, dtype=torch.complex64)
        ),
        "attention": of(attention, *3 * [(4, 16, 2048, 64)]),
    }


def attention(query: Any, key: Any, value: Any) -> object:
    """FlagGems' own, which it does not put in the place of torch's."""
    from flag_gems.ops.attention import scaled_dot_product_attention_forward  # type: ignore[import-not-found]

    return scaled_dot_product_attention_forward(query, key, value)


def tune(given: dict[str, Any]) -> dict[str, Any]:
    """One operator under one arm, in this process."""
    import flag_gems  # type: ignore[import-not-found]
    import torch
    from flag_gems.utils.libentry import LibTuner  # type: ignore[import-not-found]

    from forecast_integrations.flaggems.policy import enable_flaggems

    if given["arm"] == "ours":
        enable_flaggems()
    run = LibTuner.run
    seen: dict[str, dict[str, Any]] = {}

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched = run(self, *args, **kwargs)
        timings = getattr(self, "configs_timings", None) or {}
        seen[self.__name__] = {
            "configs": len(self.configs),
            "timed": len(timings),
            "chosen": str(self.best_config),
        }
        return launched

    LibTuner.run = noted
    call = operators()[given["operator"]]("cuda")
    torch.cuda.synchronize()
    with flag_gems.use_gems():
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        ms, clock = latency(call)
    return {"tune_s": seconds, "ms": ms, "clock": clock, "tuners": seen}


def latency(call: Callable[[], object]) -> tuple[float, str]:
    """Median milliseconds of a call, and how it was timed: `graph`, or `launches`, which hold the host's part."""
    from triton.testing import do_bench, do_bench_cudagraph

    try:
        return float(do_bench_cudagraph(call, rep=200, return_mode="median")), "graph"
    except RuntimeError:  # something in it cannot be recorded
        return float(do_bench(call, warmup=100, rep=400, return_mode="median")), "launches"


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios by operator, medians over the repeats, and their geometric means over those that tuned anything."""
    by_operator: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["operator"] for row in rows):
        own, ours = ([r for r in rows if r["operator"] == name and r["arm"] == arm] for arm in ARMS)
        if not own or not ours or not any(r["tuners"] for r in own):
            continue
        middle: Callable[[list[dict[str, Any]], str], float] = lambda some, key: statistics.median(  # noqa: E731
            r[key] for r in some
        )
        same = len({json.dumps(chosen_of(r), sort_keys=True) for r in (*own, *ours)}) == 1
        by_operator[name] = {
            "seconds_ratio": round(middle(own, "tune_s") / middle(ours, "tune_s"), 3),
            "same_choice": same,
            "regret": 0.0 if same else round(middle(ours, "ms") / middle(own, "ms") - 1, 4),
            "own_s": round(middle(own, "tune_s"), 3),
            "ours_s": round(middle(ours, "tune_s"), 3),
        }
    result = list(by_operator.values())
    if not result:
        return {"operators": 0}
    return {
        "operators": len(result),
        "same_choice": sum(f["same_choice"] for f in result),
        "seconds_ratio": round(statistics.geometric_mean(f["seconds_ratio"] for f in result), 3),
        "latency_ratio": round(statistics.geometric_mean(1 + f["regret"] for f in result), 4),
        "worst_regret": max(f["regret"] for f in result),
        "by_operator": by_operator,
    }


def chosen_of(row: dict[str, Any]) -> dict[str, str]:
    """Return what the tuners of a run chose, by name."""
    return {name: tuner["chosen"] for name, tuner in row["tuners"].items()}


def main() -> int:
    command_line = parser(__doc__)
    command_line.add_argument("--repeats", type=int, default=3)
    command_line.add_argument("--only", default="", help="comma-separated operators")
    arguments = parse_arguments(command_line)
    if arguments.child:
        print(json.dumps(tune(arguments.given)), flush=True)
        return 0
    result = ResultFile(arguments, CLAIM)
    rows = run_in_turns(
        result,
        arguments,
        __file__,
        [n for n in arguments.only.split(",") if n] or list(operators()),
        ARMS,
        subject="operator",
        given={},
        environment=lambda folder, _: {
            "FLAGGEMS_DB_URL": f"sqlite:///{folder / 'tuned.db'}",
            "FLAGGEMS_CACHE_DIR": str(folder),
            "GEMS_VENDOR": os.environ.get("GEMS_VENDOR", "nvidia"),
        },
        timeout_s=TIMEOUT_S,
    )
    result.finish(summary_of(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
