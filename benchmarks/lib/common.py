"""What the benchmark scripts share: fresh processes, one way to reach the device, timing in turns, results.

A script that is started with `--null` does everything it would do on the GPU, compilation included,
on a null device whose times are invented: it shows that the script works, and nothing else.
"""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks import kernels
from benchmarks.lib.environment import environment
from forecast_autotune.records import Config
from forecast_integrations.triton.compile.forked_children import ForkedChild, ForkedChildren
from forecast_integrations.triton.describe import to_config

ROOT = Path(__file__).resolve().parents[2]
_REMOVED_VARIABLES = (
    "TRITON_CACHE_DIR",
    "TRITON_CACHE_AUTOTUNING",
    "TRITON_INTERPRET",
    "TRITON_PRINT_AUTOTUNING",
)
"""Variables of the caller that must not reach a child; all of ours, too."""


# --- command line and results ---


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what every script takes: `--out FILE`, `--null`, and the children's own options."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, help="the result file (JSON)")
    made.add_argument("--null", action="store_true", help="dry run without a GPU; its times are invented")
    made.add_argument("--child", default="", help=argparse.SUPPRESS)
    made.add_argument("--given", type=json.loads, default={}, help=argparse.SUPPRESS)
    return made


def parse_arguments(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse; a run that is no child must say where its result goes, before it costs anything."""
    arguments = made.parse_args()
    if not arguments.child and arguments.out is None:
        made.error("--out FILE is required: a run that is not recorded is wasted")
    hostly = arguments.null or any(getattr(arguments, n, False) for n in ("stub_only", "fit_only"))
    if not hostly and not torch.cuda.is_available():
        made.error("there is no CUDA device here; --null makes a dry run")
    return arguments


def say(text: str) -> None:
    """One line of progress, at once."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _option_to_json(value: Any) -> Any:
    """An option as JSON has it; files by their names, since their folders are this machine's affair."""
    if isinstance(value, Path):
        return value.name
    return [_option_to_json(v) for v in value] if isinstance(value, list) else value


class ResultFile:
    """One result file, rewritten after every step, so that a run cut short leaves what it had."""

    def __init__(self, arguments: argparse.Namespace, claim: str, seed: int | None = None) -> None:
        hidden = ("out", "null", "child", "given", "numbers")
        given = {k: _option_to_json(v) for k, v in vars(arguments).items()}
        self.path: Path = arguments.out
        self.data: dict[str, Any] = {
            "claim": claim,
            "null": bool(getattr(arguments, "null", False)),
            "environment": environment(seed),
            "options": {k: v for k, v in given.items() if k not in hidden},
            "summary": None,
            "raw": {},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def add(self, name: str, value: Any) -> None:
        """Append one raw result under a name."""
        self.data["raw"].setdefault(name, []).append(value)
        self._write()

    def finish(self, summary: dict[str, Any]) -> None:
        """Set the summary, and print it."""
        self.data["summary"] = summary
        self._write()
        print(json.dumps(summary, indent=1), flush=True)
        say(f"written: {self.path}")

    def _write(self) -> None:
        part = self.path.with_name(f".{self.path.name}.part")
        part.write_text(json.dumps(self.data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        part.replace(self.path)


# --- children ---


def child_environment(folder: Path, **more: str) -> dict[str, str]:
    """The caller's environment with Triton's cache and our store below `folder`, and `more` on top."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in _REMOVED_VARIABLES and not k.startswith("FORECAST_AUTOTUNE")
    }
    fresh = {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "FORECAST_AUTOTUNE_CACHE_DIR": str(folder / "store"),
        "PYTHONPATH": os.pathsep.join(p for p in (str(ROOT), kept.get("PYTHONPATH")) if p),
    }
    return {**kept, **fresh, **more}


def module_command(script: str) -> list[str]:
    """How a benchmark starts itself: as a module, from the repository's root."""
    name = Path(script).resolve().relative_to(ROOT).with_suffix("")
    return [sys.executable, "-m", ".".join(name.parts)]


def child_command(script: str, arguments: argparse.Namespace, role: str, given: Any = None) -> list[str]:
    """How this script starts itself in a role; `given` is what the child gets as `arguments.given`."""
    command = [*module_command(script), "--child", role, "--given", json.dumps(given or {})]
    return command + (["--null"] if arguments.null else [])


def run_child(command: Sequence[str], env: Mapping[str, str], timeout_s: float = 300.0) -> dict[str, Any]:
    """Run a child to its end; returns the JSON object it printed last. Raises when it fails or hangs."""
    done = subprocess.run(
        command, env=dict(env), stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True
    )
    return last_object(done.stdout)


def last_object(text: str) -> dict[str, Any]:
    """The last line that is a JSON object. Raises `ValueError` if there is none."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise ValueError(f"the child printed no JSON object, but {text[-400:]!r}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def check_each(
    checks: Sequence[tuple[dict[str, Any], Callable[[], dict[str, Any]]]], jobs: int, limit_s: float
) -> None:
    """Do every check in a child of its own, `jobs` at a time; print a JSON line as each ends.

    A check is the first fields of its line, which name it, and what finds the others: `verdict`, and `detail`
    at least where that is bad.
    """
    children, left = ForkedChildren(), list(reversed(checks))
    torch.set_num_threads(1)
    while left or len(children):
        while left and len(children) < jobs:
            children.start(*left.pop())
        ended = [(one.tag, _child_outcome(one)) for one, _ in children.finished(0.5)[0]]
        for late in children.overdue(limit_s):
            children.kill(late)
            ended.append((late.tag, {"verdict": "failed", "detail": f"not done after {limit_s:g} s"}))
        for name, found in ended:
            print(json.dumps({**name, "triton": triton.__version__, **found}), flush=True)
    children.close()


def _child_outcome(ended: ForkedChild) -> dict[str, Any]:
    try:
        found: dict[str, Any] = ended.answer()
    except ValueError:
        return {"verdict": "failed", "detail": "the process died"}
    return found


# --- the device ---


@contextlib.contextmanager
def device(null: bool) -> Iterator[str]:
    """The name under which torch makes inputs: `cuda`, or `meta` (shapes, no memory) on the null device."""
    if not null:
        yield "cuda"
        return
    from forecast_integrations.triton.null_device import null_device

    with null_device():
        yield "meta"


def synchronize() -> None:
    """Wait for the device, real or not."""
    triton.runtime.driver.active.get_device_interface().synchronize()


@triton.jit
def _touch_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


def warm_up_device(where: str) -> None:
    """What every contender may have done before its clock starts: a context and one trivial launch."""
    _touch_kernel[(1,)](torch.empty(32, device=where), BLOCK=32)
    synchronize()


# --- configs and timing ---


def config_to_json(config: Any) -> dict[str, Any]:
    """A `triton.Config` as JSON."""
    return to_config(config).to_json()


def config_from_json(data: Mapping[str, Any]) -> Any:
    """A `triton.Config` from JSON."""
    c = Config.from_json(data)
    return triton.Config(
        dict(c.kwargs), num_warps=c.num_warps, num_stages=c.num_stages, num_ctas=c.num_ctas, maxnreg=c.maxnreg
    )


def config_text(data: Mapping[str, Any]) -> str:
    """A config from JSON, for people."""
    return str(Config.from_json(data))


def tuned_call(case: kernels.Case, tuner: Any, data: kernels.Data, before: Callable[[], object]) -> Any:
    """Wall seconds from just before a decorated call (and `before`) until the device is idle after it.

    Returns a record with the config chosen, and every time the tuner says it took, fastest first.
    """
    synchronize()
    begin = time.perf_counter()
    before()
    tuner[data["grid"]](*data["args"], **data["kwargs"])
    synchronize()
    seconds = time.perf_counter() - begin
    # Triton sets no timings where one config is left.
    given: dict[Any, Any] = getattr(tuner, "configs_timings", {})
    timings = [(config_to_json(c), t[0] if isinstance(t, list | tuple) else t) for c, t in given.items()]
    ran = sorted((pair for pair in timings if pair[1] != float("inf")), key=lambda pair: pair[1])
    decision = getattr(tuner, "decision", None)
    return {
        "case": case.name,
        "seconds": seconds,
        "winner": config_to_json(tuner.best_config),
        "timed": len(ran),
        "failed": len(timings) - len(ran),
        "timings": [[config, round(ms, 6)] for config, ms in ran],
        "decision": None if decision is None else decision.to_json(),
    }


def check_output(case: kernels.Case, data: kernels.Data, where: str, config: Any = None) -> bool | None:
    """Compare with the reference, after one more launch if a config is given; None without a device.

    Raises `AssertionError` saying what differs.
    """
    if where == "meta":
        return None
    if config is not None:
        kernels.reset(case, data)
        kernels.launch(case, data, config)
    if wrong := kernels.mismatch(case, data):
        raise AssertionError(f"{case.name}: {wrong}")
    return True


def time_in_turns(calls: Sequence[Callable[[], object]], rounds: int, seed: int = 0) -> list[list[float]]:
    """Milliseconds of every call in every round; L2 is flushed before each, each round has a new order.

    Drifting clocks and neighbours meet all calls alike. If the device waited for its host in the midst of a
    timing, the host's time would pass for the kernel's. So the host's time per call is taken first, and L2 is
    flushed so often before every launch that the device is busy until the slowest of the calls is queued:
    as often for all calls, and no more than `MOST_FLUSHES` times.
    """
    driver = triton.runtime.driver.active
    interface = driver.get_device_interface()
    flush = partial(driver.clear_cache, driver.get_empty_cache_for_benchmark())
    chance, order = random.Random(seed), list(range(len(calls)))
    events: list[list[tuple[Any, Any]]] = [[] for _ in calls]

    def timed(i: int) -> None:
        start, end = interface.Event(enable_timing=True), interface.Event(enable_timing=True)
        start.record()
        calls[i]()
        end.record()
        events[i].append((start, end))

    slowest = max(host_seconds(partial(timed, i), 5) for i in order)
    flushes = _flushes(slowest, flush, interface)
    for slot in events:
        slot.clear()
    for _ in range(6):  # work for the device while the host queues the first launches
        flush()
    for _ in range(rounds):
        chance.shuffle(order)
        for i in order:
            for _ in range(flushes):
                flush()
            timed(i)
    interface.synchronize()
    return [[start.elapsed_time(end) for start, end in slot] for slot in events]


MOST_FLUSHES = 64
"""Before a launch: some 5 ms of work for the device. What keeps its host longer is a model, not a kernel."""
_HOST_SLACK = 1.5
"""The host may take this much longer than it did when it was timed."""


def host_seconds(call: Callable[[], object], count: int = 20) -> float:
    """Median seconds until a call returns, while nothing waits for the device."""
    found = []
    synchronize()
    for _ in range(count):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    synchronize()
    return statistics.median(found)


def _flushes(seconds: float, flush: Callable[[], object], interface: Any) -> int:
    """How many flushes keep the device busy while its host queues them, and for so many seconds more."""
    start, end = interface.Event(enable_timing=True), interface.Event(enable_timing=True)
    host = host_seconds(flush)
    count = 8
    flush()
    start.record()
    for _ in range(count):
        flush()
    end.record()
    interface.synchronize()
    ahead = start.elapsed_time(end) / count / 1e3 - host
    if ahead * MOST_FLUSHES <= _HOST_SLACK * seconds:
        return MOST_FLUSHES
    return max(1, math.ceil(_HOST_SLACK * seconds / ahead))


@dataclass
class RetimedConfigs:
    """Configs of one case, timed side by side."""

    case: str
    medians: dict[str, float]
    """Config (as people read it) -> median milliseconds."""
    noise: float
    """|t1 / t2 - 1| of the first config, which takes part twice."""

    def regret(self, config: Mapping[str, Any]) -> float:
        """time(config) / time(best of all that took part) - 1."""
        return self.medians[config_text(config)] / min(self.medians.values()) - 1


def retime(case: kernels.Case, where: str, configs: Sequence[Mapping[str, Any]], rounds: int) -> Any:
    """Time configs (JSON; repeats are dropped) in turns; the record that `read_retimed` reads."""
    unique = list({config_text(c): c for c in configs}.values())
    data = case.make(where)
    made = [config_from_json(c) for c in [*unique, unique[0]]]
    calls = [partial(kernels.launch, case, data, config) for config in made]
    for call in calls:
        call()
    times = time_in_turns(calls, rounds)
    rows = [
        {
            "config": c,
            "median_ms": statistics.median(t),
            "p20_ms": _quantile(t, 0.2),
            "p80_ms": _quantile(t, 0.8),
        }
        for c, t in zip([*unique, unique[0]], times, strict=True)
    ]
    return {"case": case.name, "rounds": rounds, "rows": rows}


def read_retimed(record: Mapping[str, Any]) -> RetimedConfigs:
    """Read a record of `retime`."""
    rows = record["rows"]
    noise = abs(rows[-1]["median_ms"] / rows[0]["median_ms"] - 1)
    return RetimedConfigs(
        record["case"], {config_text(r["config"]): r["median_ms"] for r in rows[:-1]}, noise
    )


def _quantile(times: Sequence[float], share: float) -> float:
    return sorted(times)[int(share * (len(times) - 1))]
