"""Claim: Helion's autotuner finds as fast a config by our forecasts as by its own searches, in less time.

    python -m benchmarks.bridges.helion_examples --out FILE.json [--repeats 3] [--only softmax] [--arms ForecastSearch]

Needs `helion` beside the package (`pip install --no-deps helion filecheck psutil`). Kernels of five kinds are tuned by
Helion's default search, its pattern search and ours, each in processes of its own with empty caches, at the same
effort and with the same limit of wall seconds. Then what the searches chose is timed in turns, in one process a
kernel, one of them twice: the noise.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.lib.bridges.turns import (
    medians_in_turns,
    ratios_to,
    retime_choices,
    run_in_turns,
)
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser

CLAIM = "helion_examples"
ARMS = ("LFBOTreeSearch", "PatternSearch", "ForecastSearch")
KERNELS = ("add", "softmax", "layer_norm", "matmul", "row_sums")
TIMEOUT_S = 1200.0
ROUNDS = 100
"""Launches of each choice when they are timed in turns."""


def make_kernel(name: str, **settings: Any) -> tuple[Any, tuple[Any, ...], Callable[..., Any]]:
    """A Helion kernel, its arguments and what it should compute."""
    import torch

    from benchmarks.lib.bridges import helion_kernels

    kernel, shapes, reference = helion_kernels.KERNELS[name]
    args = tuple(torch.randn(shape, device="cuda", dtype=torch.float16) for shape in shapes)
    import helion  # type: ignore[import-not-found]

    return helion.kernel(kernel, static_shapes=True, **settings), args, reference


def tune(given: dict[str, Any]) -> dict[str, Any]:
    """One kernel under one search, in this process."""
    import torch
    from triton.testing import do_bench

    from forecast_integrations.helion.search import enable_helion

    enable_helion()
    settings = {"autotune_effort": given["effort"], "autotune_budget_seconds": given["seconds"]}
    kernel, args, reference = make_kernel(given["kernel"], **settings)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    config = kernel.autotune(args)
    seconds = time.perf_counter() - begin
    result = kernel(*args)
    torch.testing.assert_close(result, reference(*args), atol=2e-2, rtol=2e-2)
    ms = float(do_bench(lambda: kernel(*args), warmup=200, rep=500, return_mode="median"))
    return {"tune_s": seconds, "ms": ms, "config": str(config)}


def retime(given: dict[str, Any]) -> dict[str, Any]:
    """Median milliseconds of one kernel under each of some configs, in turns; the first once more."""
    kernel, args, _ = make_kernel(given["kernel"])
    bound = kernel.bind(args)
    results = [bound.compile_config(parsed_config(text), allow_print=False) for text in given["configs"]]
    return medians_in_turns([partial(one, *args) for one in results], ROUNDS)


def parsed_config(text: str) -> Any:
    """A Helion config from what `str` gives of it: `Config(name=value, ...)` with literal values."""
    import helion

    call = ast.parse(text.removeprefix("helion."), mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError(f"a config is written as Config(name=value, ...), got {text[:80]!r}")
    return helion.Config(**{str(k.arg): ast.literal_eval(k.value) for k in call.keywords})


def main() -> int:
    command_line = parser(__doc__)
    command_line.add_argument("--repeats", type=int, default=3)
    command_line.add_argument("--only", default="", help="comma-separated kernels")
    command_line.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    command_line.add_argument("--effort", default="quick", choices=("quick", "full"))
    command_line.add_argument("--seconds", type=int, default=300, help="limit of one search")
    arguments = parse_arguments(command_line)
    if arguments.child:
        roles = {"tune": tune, "retime": retime}
        print(json.dumps(roles[arguments.child](arguments.given)), flush=True)
        return 0
    result = ResultFile(arguments, CLAIM)
    timed = retime_choices(
        result,
        arguments,
        __file__,
        tune_in_turns(result, arguments),
        subject="kernel",
        environment=lambda folder: {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
        timeout_s=TIMEOUT_S,
    )
    result.finish(summary_of(timed))
    return 0


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ours against each of Helion's searches."""
    return ratios_to(rows, subject="kernel", ours=ARMS[-1], others=ARMS[:-1])


def tune_in_turns(result: ResultFile, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what the searches of all arms choose, each in a process of its own."""
    return run_in_turns(
        result,
        arguments,
        __file__,
        [n for n in arguments.only.split(",") if n] or KERNELS,
        arguments.arms,
        subject="kernel",
        given={"effort": arguments.effort, "seconds": arguments.seconds},
        environment=lambda folder, arm: {
            "HELION_AUTOTUNER": arm,
            "HELION_CACHE_DIR": str(folder / "helion"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "HELION_SKIP_CACHE": "1",
        },
        timeout_s=TIMEOUT_S,
    )


if __name__ == "__main__":
    sys.exit(main())
