"""Claim: torch.compile's choice for the range of a dynamic size is nearer to each size's best than that of one size.

    python -m benchmarks.inductor.dynamic_ranges --out FILE [--layers 4096x4096 ...] [--seconds 80] [--null]

A linear layer (inputs x outputs, bfloat16) is compiled with max-autotune for a dynamic number of rows, declared to be
2 to 8192. Arm `range` decides for that range; `hint_N` as Inductor does, for N rows, which are those of the first call.
`range` meets the middle one of these. `static_N` is compiled for N rows alone, at a few of the sizes; `eager` is not
compiled. Every compilation has fresh caches and an empty store. All arms are timed in turns at every power of two of
rows; the best of a size is the fastest of all arms there. A layer is not begun once `--seconds` are over.

`--null` compiles for the CPU, with MKL and C++ templates and frozen weights, for 2 to 128 rows.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.lib.processes.compile_processes import (
    compile_separately,
    device_of,
    geometric_mean,
    restart_compile_workers,
    synchronize,
    timed_in_turns,
)
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_autotune import enable_torch_compile
from forecast_autotune.ranges.robust import spread_points
from forecast_autotune.records import Decision
from forecast_autotune.store import Store
from forecast_integrations.inductor import summary

LAYERS = ("4096x4096", "4096x14336", "14336x4096")
SIZES = 13
"""Numbers of rows that are timed: as many as there are powers of two."""
MET = {"cuda": (16, 512, 8192), "cpu": (2, 16, 128)}
"""Rows of the first call."""
STATIC = {"cuda": (16, 256, 2048), "cpu": (16,)}
ROUNDS = {"cuda": 40, "cpu": 3}


def options(device: str) -> dict[str, Any]:
    """Inductor's settings."""
    if device == "cpu":
        return {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,CPP", "freezing": True}
    return {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,TRITON"}


class CompiledLayer:
    """A layer compiled in one arm, and what that took."""

    def __init__(self, layer: Any, rows: Any, high: int | None, device: str, sizes: str) -> None:
        from torch._inductor.utils import fresh_cache

        decided: list[Decision] = []
        listener: Callable[[str, Decision], None] = lambda _, decision: decided.append(decision)  # noqa: E731
        summary.LISTENERS.append(listener)
        if high is not None:
            torch._dynamo.mark_dynamic(rows, 0, min=2, max=high)
        begin = time.perf_counter()
        try:
            store = Store(None)
            with fresh_cache(), enable_torch_compile(store=store, dynamic_sizes=sizes) as handle:
                static = False if high is None else None
                self.call = compile_separately(copy.deepcopy(layer), options(device), dynamic=static)
                self.call(rows)
                synchronize(device)
        finally:
            summary.LISTENERS.remove(listener)
        self.row: dict[str, Any] = {
            "first_call_s": round(time.perf_counter() - begin, 3),
            "timings": handle.session.tally.timings,
            "protocols": Counter(m.protocol for table in store.tables() for m in table.measurements),
            "choices": [str(d.chosen) for d in decided],
            "measured": sum(d.measured for d in decided),
            "reasons": [d.reason for d in decided],
            "said": handle.session.warn_once.messages,
        }


def measure(layer_name: str, device: str, result: ResultFile) -> dict[str, dict[int, float]]:
    """Milliseconds of every arm at each number of rows."""
    columns, outputs = map(int, layer_name.split("x"))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = torch.nn.Linear(columns, outputs, bias=False, device=device, dtype=dtype).eval()

    def tensor(rows: int) -> Any:
        return torch.randn(rows, columns, device=device, dtype=dtype)

    met, high = MET[device], MET[device][-1]
    plans: list[tuple[str, int, int | None, str]] = [
        ("range", met[1], high, "declared"),
        *((f"hint_{n}", n, high, "hint") for n in met),
    ]
    plans += [(f"static_{n}", n, None, "hint") for n in STATIC[device]]
    arms: dict[str, CompiledLayer] = {}
    torch._dynamo.reset()  # not between arms, which would compile them once more when they are timed
    torch._dynamo.config.recompile_limit = 8 * len(plans)
    for arm, rows, bound, sizes in plans:
        arms[arm] = CompiledLayer(layer, tensor(rows), bound, device, sizes)
        result.add("compiled", {"layer": layer_name, "arm": arm, "met": rows, **arms[arm].row})
        say(
            f"{layer_name} {arm}: {arms[arm].row['first_call_s']} s, {', '.join(arms[arm].row['choices'])[:160]}"
        )
    times: dict[str, dict[int, float]] = {}
    graphs = counters["stats"]["unique_graphs"]
    tolerance = 2e-2 if device == "cuda" else 1e-3
    for rows in sorted({*spread_points(range(2, high + 1), SIZES), *met, *STATIC[device]}):
        x = tensor(rows)
        wanted = layer(x)
        serving = {a: c.call for a, c in arms.items() if not a.startswith("static") or a == f"static_{rows}"}
        for arm, call in serving.items():
            error = float((call(x) - wanted).abs().max() / wanted.abs().max())
            if error > tolerance:
                raise AssertionError(f"{layer_name} {arm} at {rows} rows: relative error {error:.3g}")
        calls = {**serving, "eager": layer}
        answer = timed_in_turns([partial(call, x) for call in calls.values()], ROUNDS[device], device)
        if counters["stats"]["unique_graphs"] != graphs:
            raise AssertionError(f"{layer_name}: a graph was compiled again for {rows} rows")
        row = {arm: round(ms, 6) for arm, ms in zip(calls, answer, strict=True)}
        result.add("times", {"layer": layer_name, "rows": rows, "ms": row})
        say(f"{layer_name} {rows} rows: {row}")
        for arm, ms in row.items():
            times.setdefault(arm, {})[rows] = ms
    return times


def slowdowns(times: dict[str, dict[int, float]]) -> dict[str, Any]:
    """How much slower each arm is than the fastest at each size: geometric mean, and at worst."""
    sizes = sorted(times["eager"])
    best = {n: min(at[n] for at in times.values() if n in at) for n in sizes}
    result: dict[str, Any] = {}
    for arm, at in times.items():
        if len(at) == len(sizes):
            mean = geometric_mean(at[n] / best[n] for n in sizes)
            assert mean is not None
            worst = max(sizes, key=lambda n: at[n] / best[n])
            result[arm] = {
                "mean": round(mean - 1.0, 4),
                "worst": round(at[worst] / best[worst] - 1.0, 4),
                "worst_rows": worst,
            }
    return result


def run(arguments: argparse.Namespace) -> None:
    """Every layer that there is time for, and what came of all."""
    device = device_of(arguments)
    result = ResultFile(arguments, (__doc__ or "").splitlines()[0])
    begin = time.monotonic()
    if device == "cuda":
        restart_compile_workers()
    fields: dict[str, Any] = {}
    with torch.no_grad():
        warm = torch.nn.Linear(48, 40, device=device).eval()
        CompiledLayer(warm, torch.randn(32, 48, device=device), None, device, "hint")
        for layer in arguments.layers:
            if fields and time.monotonic() - begin > arguments.seconds:
                say(f"no time left for {layer}")
                break
            fields[layer] = slowdowns(measure(layer, device, result))
            say(f"{layer}: {fields[layer]}")
    arms = sorted({arm for of in fields.values() for arm in of})
    over_all = {
        arm: round((geometric_mean(1.0 + of[arm]["mean"] for of in fields.values()) or 1.0) - 1.0, 4)
        for arm in arms
        if all(arm in of for of in fields.values())
    }
    hints = [arm for arm in over_all if arm.startswith("hint")]
    seconds = {
        arm: round(sum(r["first_call_s"] for r in result.data["raw"]["compiled"] if r["arm"] == arm), 2)
        for arm in arms
        if arm != "eager"
    }
    result.finish(
        {
            "layers": fields,
            "slower_than_best": over_all,
            "worst_hint": max((over_all[arm] for arm in hints), default=None),
            "best_hint": min((over_all[arm] for arm in hints), default=None),
            "first_calls_s": seconds,
        }
    )


def main() -> None:
    """Parse and run."""
    command_line = parser(__doc__)
    command_line.add_argument(
        "--layers", nargs="+", default=list(LAYERS), help="inputs x outputs, such as 4096x4096"
    )
    command_line.add_argument(
        "--seconds", type=float, default=80.0, help="after so long no other layer is begun"
    )
    run(parse_arguments(command_line))


if __name__ == "__main__":
    main()
