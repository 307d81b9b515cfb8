"""Claim: in a fresh process, the first call of a known problem measures nothing and costs under 5 ms more.

    python -m benchmarks.store.warm_start --out benchmarks/results/warm_start.json

One process tunes fp16 matmul 4096^3 and a dozen other shapes (M = 256 i) over twelve configs into a
store. Then fresh processes, with modules imported, the device up, another kernel tuned before (into
another store) and each shape's chosen config compiled and launched plainly, call the known kernel:
the extra time is the host time of that call minus the median host time of plain launches with the
chosen config. Half of the processes use one decorated kernel for all shapes, so that only the first
shape pays for hashing the source; half decorate anew for every shape. A call that measures anything,
or that chooses another config than was stored, fails the run.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import triton

from benchmarks import kernels
from benchmarks.lib import devices, kernel_timing, result_files
from benchmarks.lib.processes import child_processes
from forecast_autotune import autotune

MATMUL, OTHER = "matmul/4096x4096x4096", "swiglu"
LIMIT_MS = 5.0
PLAIN = 20
"""Plain launches whose median host time counts as the cost of a launch."""


def matmul_shapes(count: int) -> list[tuple[int, int, int]]:
    return [(4096, 4096, 4096)] + [(256 * i, 1024, 1024) for i in range(1, count + 1)]


def matmul_inputs(shape: tuple[int, int, int], where: str) -> kernels.Data:
    """Arguments of the matmul kernel; see `benchmarks/kernels/matmul.py`."""
    m, n, k = shape
    a, b = kernels.normal((m, k), where), kernels.normal((k, n), where)
    c = kernels.unset((m, n), where)
    return {
        "args": (a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride()),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),),
    }


def host_ms(kernel: Any, data: kernels.Data, **launch: Any) -> float:
    """Host milliseconds of one call of a kernel, decorated or not, on an idle device."""
    devices.synchronize()
    begin = time.perf_counter()
    kernel[data["grid"]](*data["args"], **launch)
    return (time.perf_counter() - begin) * 1e3


def tune_child(given: dict[str, Any], null: bool) -> dict[str, Any]:
    """The child that fills the store."""
    (case,) = kernels.cases([MATMUL])
    with devices.device(null) as where:
        tuner = autotune(kernels.configs(case)[:: given["every"]], list(case.key))(case.kernel)
        rows = []
        for shape in matmul_shapes(given["shapes"]):
            data = matmul_inputs(shape, where)
            seconds = host_ms(tuner, data) / 1e3
            devices.synchronize()
            assert tuner.decision is not None
            row = {"shape": shape, "measured": tuner.decision.measured, "seconds": seconds}
            rows.append({**row, "winner": kernel_timing.config_to_json(tuner.best_config)})
    return {"rows": rows}


def start_child(role: str, given: dict[str, Any], null: bool) -> dict[str, Any]:
    """The child that meets known problems: with `one` decorated kernel, or with a `new` one per shape."""
    (case,) = kernels.cases([MATMUL])
    configs = kernels.configs(case)[:: given["every"]]

    def decorated() -> Any:
        return autotune(configs, list(case.key))(case.kernel)

    with devices.device(null) as where:
        devices.warm_up_device(where)
        other = kernels.cases([OTHER])[0]
        data = other.make(where, small=not null)
        with tempfile.TemporaryDirectory(prefix="warm-", ignore_cleanup_errors=True) as elsewhere:
            tuner = autotune(kernels.configs(other)[:3], list(other.key), store=elsewhere)(other.kernel)
            tuner[data["grid"]](*data["args"], **data["kwargs"])
        known = [(row, matmul_inputs(row["shape"], where)) for row in given["rows"]]
        plain = []
        for row, d in known:
            launch = kernel_timing.config_from_json(row["winner"]).all_kwargs()
            host_ms(case.kernel, d, **launch)  # compiles
            plain.append(statistics.median(host_ms(case.kernel, d, **launch) for _ in range(PLAIN)))
        tuner = decorated()
        rows: list[dict[str, Any]] = []
        for (row, d), base in zip(known, plain, strict=True):
            if rows and role == "new":
                tuner = decorated()
            first, again = host_ms(tuner, d), host_ms(tuner, d)
            decision = tuner.decision
            if decision.measured or kernel_timing.config_to_json(tuner.best_config) != row["winner"]:
                raise AssertionError(f"{row['shape']}: not served from the store: {decision}")
            times = {"first_ms": first, "again_ms": again, "plain_ms": base, "extra_ms": first - base}
            result = {"measured": decision.measured, "evidence": str(decision.evidence)}
            rows.append({"shape": row["shape"], **times, **result})
    return {"role": role, "rows": rows}


def run(a: Namespace, report: result_files.ResultFile) -> None:
    given: dict[str, Any] = {"every": 18 if a.null else 6, "shapes": 3 if a.null else a.shapes}
    with tempfile.TemporaryDirectory(prefix="warm-start-", ignore_cleanup_errors=True) as folder:
        env = child_processes.child_environment(Path(folder))
        tuned = child_processes.run_child(child_processes.child_command(__file__, a, "tune", given), env)
        report.add("tune", tuned)
        result_files.say(
            f"tuned {len(tuned['rows'])} shapes, {tuned['rows'][0]['measured']} measured in the first"
        )
        done = []
        for i in range(a.processes):
            role = ("one", "new")[i % 2]
            command = child_processes.child_command(__file__, a, role, {**given, "rows": tuned["rows"]})
            done.append(child_processes.run_child(command, env))
            report.add(role, done[-1])
            first = done[-1]["rows"][0]
            result_files.say(
                f"{role}: first call {first['first_ms']:.3f} ms, plain {first['plain_ms']:.3f} ms"
            )
    firsts = [r["rows"][0]["extra_ms"] for r in done]
    later = {
        role: [x["extra_ms"] for r in done if r["role"] == role for x in r["rows"][1:]]
        for role in ("one", "new")
    }
    report.finish(
        {
            "limit_ms": LIMIT_MS,
            "measured": sum(x["measured"] for r in done for x in r["rows"]),
            "first_call_extra_ms": [round(x, 3) for x in firsts],
            "first_call_within_limit": max(firsts) < LIMIT_MS,
            "later_shape_median_extra_ms": round(statistics.median(later["one"]), 3),
            "new_decorator_median_extra_ms": round(statistics.median(later["new"]), 3),
            "largest_later_extra_ms": round(max(later["one"] + later["new"]), 3),
            "problems": len(done[0]["rows"]),
        }
    )


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--processes", type=int, default=4, help="fresh processes, at least 2")
    parser.add_argument("--shapes", type=int, default=12, help="known shapes besides 4096^3")
    a = result_files.parse_arguments(parser)
    if a.child:
        result = tune_child(a.given, a.null) if a.child == "tune" else start_child(a.child, a.given, a.null)
        print(json.dumps(result), flush=True)
        return 0
    if a.processes < 2:
        parser.error("--processes must be at least 2: one per way of decorating")
    run(a, result_files.ResultFile(a, "warm_start"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
