"""Claim: TileLang's kernels tune in a part of the time of its own tuner, and run as fast.

    python -m benchmarks.bridges.tilelang_examples --out FILE.json [--repeats 3] [--only matmul] [--arms forecast]

Needs `tilelang` beside the package, and CUDA's compiler. Five kernels, each with the list that its author would write,
are tuned by TileLang's own `AutoTuner` (which compiles and times all, on all cores), by ours measuring all, and by ours
with forecasts; every run in a process of its own with empty caches. Then what they chose is timed in turns, in one
process a kernel, one of them twice: the noise.
"""

from __future__ import annotations

import contextlib
import json
import logging
import statistics
import sys
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.lib.bridges.turns import (
    medians_in_turns,
    ratios_to,
    retime_choices,
    run_in_turns,
)
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser

CLAIM = "tilelang_examples"
ARMS = ("AutoTuner", "exhaustive", "forecast")
KERNELS = ("add", "softmax", "row_sums", "matvec", "matmul")
TIMEOUT_S = 600.0
ROUNDS = 100
"""Launches of each choice when they are timed in turns."""
TOLERANCE = 5e-3
"""Tolerance of outputs in float16, relative to the largest."""


def tune(given: dict[str, Any]) -> dict[str, Any]:
    """One kernel by one tuner, in this process."""
    import torch

    from benchmarks.lib.bridges.tilelang_kernels import EXAMPLES
    from forecast_integrations.tilelang.kernel import device_launches

    logging.getLogger("tilelang").setLevel(logging.ERROR)
    example = EXAMPLES[given["kernel"]]
    arguments, expected = example.tensors("cuda")
    torch.cuda.synchronize()
    tuner = theirs if given["arm"] == "AutoTuner" else partial(ours, mode=given["arm"])
    begin = time.perf_counter()
    compiled, result = tuner(example, arguments, expected)
    seconds = time.perf_counter() - begin
    compiled(*arguments.values())
    for name, wanted in expected.items():
        torch.testing.assert_close(
            arguments[name], wanted, atol=TOLERANCE * float(wanted.abs().max()), rtol=0
        )
    ms = statistics.median(device_launches(lambda: compiled(*arguments.values())))
    return {"tune_s": seconds, "ms": ms, **result}


def theirs(example: Any, arguments: dict[str, Any], _: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """TileLang's own tuner with its defaults; it checks no outputs, which costs it nothing."""
    from tilelang.autotuner import AutoTuner

    configs = [dict(config.kwargs) for config in example.space]
    tuner = AutoTuner.from_kernel(kernel=example.build, configs=configs)
    tuner.set_compile_args(target="cuda")
    tuner.set_profile_args(supply_prog=lambda *_: list(arguments.values()), skip_check=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # it writes a log where it runs
        result = tuner.run()
    return result.kernel, {
        "config": dict(result.config),
        "candidates": len(configs),
        "measured": len(configs),
    }


def ours(
    example: Any, arguments: dict[str, Any], expected: dict[str, Any], mode: str
) -> tuple[Any, dict[str, Any]]:
    """Our tuner with an empty store, in a mode."""
    from forecast_autotune import Mode, Settings, Store
    from forecast_autotune.languages import tune_language
    from forecast_integrations.tilelang.kernel import TileLangKernel

    kernel = TileLangKernel(example.build, arguments, expected, target="cuda", tolerance=TOLERANCE)
    store = Store(None)
    settings = Settings(mode=Mode.EXHAUSTIVE) if mode == "exhaustive" else Settings()
    tuned = tune_language(kernel, example.space, store=store, settings=settings)
    failed = [m for m in store.measurements(kernel.problem) if not m.ok]
    return tuned.compiled, {
        "config": dict(tuned.decision.chosen.config.kwargs),
        "candidates": tuned.decision.candidates,
        "measured": tuned.decision.measured,
        "failed": len(failed),
        "first_failure": str(failed[0].extra.get("message", "")) if failed else "",
    }


def retime(given: dict[str, Any]) -> dict[str, Any]:
    """Median milliseconds of one kernel under each of some configs, in turns; the first once more."""
    from benchmarks.lib.bridges.tilelang_kernels import EXAMPLES
    from forecast_autotune import Config
    from forecast_integrations.tilelang.kernel import TileLangKernel

    example = EXAMPLES[given["kernel"]]
    arguments, expected = example.tensors("cuda")
    kernel = TileLangKernel(example.build, arguments, expected, target="cuda")
    compile_once = cache(kernel.compile)  # which takes seconds; several runs may choose the same
    results = [compile_once(Config.of(config)) for config in given["configs"]]
    return medians_in_turns([partial(one, *arguments.values()) for one in results], ROUNDS)


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Our forecasts against TileLang's tuner and against measuring all ourselves."""
    shares = {
        arm: statistics.fmean(r["measured"] / r["candidates"] for r in rows if r["arm"] == arm)
        for arm in dict.fromkeys(r["arm"] for r in rows)
    }
    return {
        **ratios_to(rows, subject="kernel", ours="forecast", others=("AutoTuner", "exhaustive")),
        "measured": {arm: round(share, 3) for arm, share in shares.items()},
        "seconds": {
            arm: round(statistics.fmean(r["tune_s"] for r in rows if r["arm"] == arm), 2) for arm in shares
        },
    }


def main() -> int:
    command_line = parser(__doc__)
    command_line.add_argument("--repeats", type=int, default=3)
    command_line.add_argument("--only", default="", help="comma-separated kernels")
    command_line.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    arguments = parse_arguments(command_line)
    if arguments.child:
        roles = {"tune": tune, "retime": retime}
        print(json.dumps(roles[arguments.child](arguments.given)), flush=True)
        return 0
    result = ResultFile(arguments, CLAIM)
    rows = run_in_turns(
        result,
        arguments,
        __file__,
        [n for n in arguments.only.split(",") if n] or KERNELS,
        arguments.arms,
        subject="kernel",
        given={},
        environment=lambda folder, _: fresh_caches(folder),
        timeout_s=TIMEOUT_S,
    )
    timed = retime_choices(
        result, arguments, __file__, rows, subject="kernel", environment=fresh_caches, timeout_s=TIMEOUT_S
    )
    result.finish(summary_of(timed))
    return 0


def fresh_caches(folder: Path) -> dict[str, str]:
    """TileLang's, below a folder."""
    return {"TILELANG_CACHE_DIR": str(folder / "tilelang"), "TILELANG_PRINT_ON_COMPILATION": "0"}


if __name__ == "__main__":
    sys.exit(main())
