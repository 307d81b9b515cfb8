"""Launches and timings of benchmark kernels: tuned calls, timing in turns, and configs as JSON."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import triton

from benchmarks import kernels
from benchmarks.lib.devices import synchronize
from forecast_autotune.records import Config
from forecast_integrations.triton.problem.call import outcome_of
from forecast_integrations.triton.problem.describe import to_config
from forecast_integrations.triton.timer.timers import l2_flush


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
    flush = l2_flush(driver)
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
"""Before a launch: some 5 ms of work for the device. A call that keeps its host longer is a model, not a kernel."""
_HOST_SLACK = 1.5
"""The host may take this much longer than it did when it was timed."""


def host_seconds(call: Callable[[], object], count: int = 20) -> float:
    """Median seconds until a call returns, while nothing waits for the device."""
    results = []
    synchronize()
    for _ in range(count):
        begin = time.perf_counter()
        call()
        results.append(time.perf_counter() - begin)
    synchronize()
    return statistics.median(results)


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
    ahead: float = start.elapsed_time(end) / count / 1e3 - host
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
    results = [config_from_json(c) for c in [*unique, unique[0]]]
    calls = [partial(kernels.launch, case, data, config) for config in results]
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


def precompile(kernel: Any, data: kernels.Data, configs: list[Any], threads: int) -> None:
    """Compile all configs on `threads` threads; a failure shows up again, and counts, in the sweep."""
    if not threads:
        return

    def one(config: Any) -> None:
        try:
            kernel.warmup(*data["args"], grid=data["grid"], **data["kwargs"], **config.all_kwargs())
        except Exception as error:
            if outcome_of(error) is None:
                raise

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, configs))
