"""The process of one arm: runs library workloads, and writes a line per decision that their tuners make.

    python -m benchmarks.lib.libraries.watching JSON                              # triton.autotune itself
    python -m forecast_autotune run -m benchmarks.lib.libraries.watching JSON     # served by this project

JSON is an object: `arm`, `out` (a file of JSON lines), `folder` (of the arms' files), `only` (names), `null` (no GPU),
`order` (a seed by which lists are shuffled, or null), and `share` and `seed`: of contexts that this arm decides,
elsewhere the winner of the harvest in `folder` is taken. Arm `floor` decides nothing: it launches winners. Arm `retime`
times what others chose until now, side by side, `rounds` times. The process says which workloads there are, then runs
the one that a line of its input names, and says when it is done: both as lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from pathlib import Path
from typing import Any

os.environ.setdefault("FLA_CACHE_MODE", "disabled")

import torch
import triton
from triton.runtime.autotuner import Autotuner

from benchmarks.lib import devices
from benchmarks.lib.environment import environment
from benchmarks.lib.libraries.contexts import (
    ENVIRONMENT,
    by_context,
    config_key,
    config_record,
    context_id,
    pruned_configs,
    read_rows,
)
from benchmarks.lib.libraries.workloads import workloads

HARVEST = "harvest"


def chosen_configs(files: Sequence[Path]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """By context: the config that each arm chose, and the harvest's best few as `best 0`, `best 1`, ..."""
    result: dict[str, dict[str, Mapping[str, Any]]] = {}
    for path in files:
        for row in read_rows(path):
            chosen = result.setdefault(str(row["id"]), {})
            chosen[path.stem] = row["config"]
            if path.stem == HARVEST:
                chosen |= {f"best {i}": config for i, config in enumerate(row.get("best", []))}
    return result


class RetimedChoices:
    """Stands in for `Autotuner.run`: in a context that was decided, all that was chosen is timed in turns.

    Every call is launched with the fastest of these; where nothing is known of it, with the first config.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.workload, self.decided = "", 0
        self.choices: dict[str, dict[str, Mapping[str, Any]]] = {}
        self.rounds = int(given["rounds"])
        self._out = Path(given["out"])
        self._run = Autotuner.run

    def begin(self, workload: str) -> None:
        """Read what was chosen until now."""
        self.workload = workload
        self.choices = chosen_configs([p for p in sorted(self._out.parent.glob("*.jsonl")) if p != self._out])

    def call(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a tuner."""
        if len(tuner.configs) < 2:
            return self._run(tuner, *args, **kwargs)
        name = context_id(self.workload, tuner, args, kwargs)
        known: dict[str, Any] = tuner.__dict__.setdefault("_retimed_winners", {})
        # Contexts of other workloads with the same key were decided once, by the first of them.
        key = name.partition(", ")[2]
        if name in self.choices and name not in known:
            known[name] = known[key] = self._retime(tuner, name, args, kwargs)
        if key not in known:
            known[key] = pruned_configs(tuner, args, kwargs)[0]
        every, tuner.configs = tuner.configs, [known.get(name, known[key])]
        try:
            return self._run(tuner, *args, **kwargs)
        finally:
            tuner.configs = every

    def _retime(self, tuner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        listed = {config_key(config_record(c)): c for c in pruned_configs(tuner, args, kwargs)}
        chosen = {arm: config_key(config) for arm, config in self.choices[name].items()}
        unknown = sorted(arm for arm, text in chosen.items() if text not in listed)
        keys = [text for text in dict.fromkeys(chosen.values()) if text in listed]
        launches = [_launch(tuner, listed[text], args, kwargs) for text in keys]
        with ThreadPoolExecutor(len(keys) or 1) as pool:
            compiled = list(pool.map(partial(_compiles, tuner, args, kwargs), [listed[t] for t in keys]))
        for launch in launches:
            launch()
        from benchmarks.lib.kernel_timing import time_in_turns  # other checkouts' packages lack what it needs

        times = time_in_turns([*launches, launches[0]], self.rounds)
        medians = [statistics.median(one) for one in times]
        row = {
            "id": name,
            "configs": [json.loads(text) for text in keys],
            "ms": [round(ms, 6) for ms in medians[:-1]],
            "again_ms": round(medians[-1], 6),
            "arms": {arm: keys.index(text) for arm, text in chosen.items() if text in keys},
            "unknown": unknown,
            "rounds": self.rounds,
            "compiled_ahead": sum(compiled),
        }
        with self._out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row, default=str) + "\n")
        self.decided += 1
        return listed[keys[min(range(len(keys)), key=medians.__getitem__)]]


def _launch(tuner: Any, config: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], object]:
    """A launch of one config. Its own hook sets up arguments (descriptors), so it runs before every launch."""
    keywords = {**kwargs, **config.all_kwargs()}
    named = {**dict(zip(tuner.arg_names, args, strict=False)), **keywords}

    def launch() -> None:
        if config.pre_hook is not None:
            config.pre_hook(named)
        tuner.fn.run(*args, **keywords)

    return launch


def _compiles(tuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any], config: Any) -> bool:
    """Compile ahead of the first launch; configs whose hook changes the arguments are left to that."""
    if config.pre_hook is not None:
        return False
    keywords = {k: v for k, v in kwargs.items() if k != "warmup"}
    tuner.fn.warmup(*args, **keywords, **config.all_kwargs())
    return True


class ProgressTimes:
    """Notes of the decision that is being made: seconds since its start. One at a time, in this process."""

    def __init__(self) -> None:
        self._begin = 0.0
        self.compiled: list[list[Any]] = []
        """[config as text, begun, ended] of compilations in children."""
        self.timed: list[list[Any]] = []
        """[config as text, ended, seconds of timing so far] of measurements."""

    def start(self) -> None:
        """Forget what was noted: a decision begins."""
        self._begin = time.perf_counter()
        self.compiled, self.timed = [], []

    def watch(self) -> None:
        """Put notes into our compile pool and measurer. Raises `ImportError` where a release lacks them."""
        from forecast_integrations.triton.compile import pool
        from forecast_integrations.triton.timer.measurer import TritonMeasurer

        measure = TritonMeasurer.measure

        @wraps(measure)
        def noting_measure(measurer: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
            for answer in measure(measurer, *args, **kwargs):
                spent = measurer.spent().timing_s
                self.timed.append([str(answer.candidate.config), self._now(), round(spent, 4)])
                yield answer

        measurer_class: Any = TritonMeasurer
        measurer_class.measure = noting_measure
        pool: Any = pool.ForkPool
        if result := getattr(pool, "_result", None):

            @wraps(result)
            def noting_result(self_: Any, child: Any, *args: Any, **kwargs: Any) -> Any:
                config = getattr(child.tag, "config", None)
                if config is not None:
                    begun = round(getattr(child, "began", self._begin) - self._begin, 4)
                    self.compiled.append([str(config), begun, self._now()])
                return result(self_, child, *args, **kwargs)

            pool._result = noting_result

    def _now(self) -> float:
        return round(time.perf_counter() - self._begin, 4)

    def to_json(self) -> dict[str, Any]:
        """Both lists."""
        return {"compiled": self.compiled, "timed": self.timed}


TOP = 3
"""Configs of a harvest that are timed again beside the choices."""


class WatchedDecisions:
    """Stands in for `Autotuner.run`: first calls are timed and written down, others are passed on."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.workload = given, ""
        self.decided = 0
        self.winners: dict[str, Mapping[str, Any]] = {}
        self.times = ProgressTimes()
        self._run = Autotuner.run
        self._out = Path(given["out"])
        served = getattr(self._run, "forecast_autotune", False)
        assert served == (given["arm"] not in ("triton", "floor")), "the arm is served by the wrong tuner"
        if served:
            with contextlib.suppress(ImportError):  # an older checkout's packages
                self.times.watch()

    def begin(self, workload: str) -> None:
        """Read which winners are known by now."""
        self.workload = workload
        if self.given["arm"] == "floor" or self.given["share"] < 1:
            self.winners = by_context(read_rows(Path(self.given["folder"]) / f"{HARVEST}.jsonl"))

    def _decides(self, name: str) -> bool:
        chance = zlib.crc32(f"{self.given['seed']} {name}".encode()) / 2**32
        return self.given["arm"] != "floor" and bool(chance < self.given["share"])

    def call(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a tuner."""
        name = context_id(self.workload, tuner, args, kwargs) if len(tuner.configs) > 1 else ""
        taken: dict[str, Any] = tuner.__dict__.setdefault("_taken_winners", {})
        if name in taken:
            return self._launch(tuner, taken[name], args, kwargs)
        if not name or name in self._seen(tuner):
            return self._run(tuner, *args, **kwargs)
        self._seen(tuner).add(name)
        configs = pruned_configs(tuner, args, kwargs)
        if len(configs) < 2:
            return self._run(tuner, *args, **kwargs)
        if not self._decides(name):
            return self._take_winner(tuner, name, configs, args, kwargs, taken)
        if self.given["order"] is not None:
            random.Random(f"{self.given['order']} {name}").shuffle(tuner.configs)
        before = len(tuner.cache)
        torch.cuda.synchronize()
        self.times.start()
        begin = time.perf_counter()
        result = self._run(tuner, *args, **kwargs)
        torch.cuda.synchronize()
        wall = time.perf_counter() - begin
        if len(tuner.cache) > before:  # else another workload had the same key
            self._write(name, wall, len(configs), tuner.best_config, self._decision(tuner))
        return result

    def _seen(self, tuner: Any) -> set[str]:
        names: set[str] = tuner.__dict__.setdefault("_watched_contexts", set())
        return names

    def _take_winner(
        self,
        tuner: Any,
        name: str,
        configs: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        taken: dict[str, Any],
    ) -> Any:
        """Launch the harvest's winner; the floor's clock: one compilation, one launch, one short timing."""
        row = self.winners.get(name)
        wanted = None if row is None else config_key(row["config"])
        config = next((c for c in configs if config_key(config_record(c)) == wanted), configs[0])
        taken[name] = config
        torch.cuda.synchronize()
        begin = time.perf_counter()
        result = self._launch(tuner, config, args, kwargs)
        torch.cuda.synchronize()
        if self.given["arm"] == "floor" and row is not None:
            again = partial(self._launch, tuner, config, args, kwargs)
            triton.testing.do_bench(again, warmup=2, rep=10)
            self._write(name, time.perf_counter() - begin, len(configs), config, {})
        return result

    def _launch(self, tuner: Any, config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch one config; a list of one is launched without a decision, whoever serves."""
        every, tuner.configs = tuner.configs, [config]
        try:
            return self._run(tuner, *args, **kwargs)
        finally:
            tuner.configs = every

    def _decision(self, tuner: Any) -> dict[str, Any]:
        parts = tuner.__dict__.get("_forecast")
        last = parts[0].last if parts else None
        timings = getattr(tuner, "configs_timings", None) or {}
        times = {c: t[0] if isinstance(t, list | tuple) else t for c, t in timings.items()}
        best = sorted(times, key=times.__getitem__)[:TOP]
        row: dict[str, Any] = {"best": [config_record(c) for c in best if times[c] != float("inf")]}
        if last is None:
            return row
        known = last.to_json()
        row |= {
            name: known.get(name) for name in ("problem", "measured", "known", "trusted", "refused", "ties")
        }
        row["candidate"] = last.chosen.to_json()
        row |= {"risk": last.stated_risk, "evidence": str(last.evidence), "ms": last.median_ms}
        row |= {"cost": known.get("cost"), "reason": last.reason[:300], "rounds": list(last.rounds)}
        return row | {"times": self.times.to_json()}

    def _write(self, name: str, wall: float, n: int, config: Any, more: dict[str, Any]) -> None:
        row = {"id": name, "arm": self.given["arm"], "wall_s": round(wall, 4), "n": n}
        row |= {"config": config_record(config), **more}
        with self._out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row, default=str) + "\n")
        self.decided += 1


def run_workloads(given: dict[str, Any], watched: WatchedDecisions | RetimedChoices) -> None:
    """Run the workloads that the input names, and say after each how long it took; one may fail."""
    known = workloads(given.get("only") or ())
    print(json.dumps({"workloads": list(known)}), flush=True)
    for name in map(str.strip, sys.stdin):
        begin, before = time.perf_counter(), watched.decided
        watched.begin(name)
        torch.manual_seed(0)
        try:
            known[name]()
            torch.cuda.synchronize()
        except Exception:
            print(f"FAILED {name}: {traceback.format_exc(limit=-3)[-1200:]}", flush=True)
        torch.cuda.empty_cache()
        took = round(time.perf_counter() - begin, 1)
        print(json.dumps({"done": name, "decisions": watched.decided - before, "seconds": took}), flush=True)


def main() -> None:
    """Run one arm."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    with contextlib.ExitStack() as held:
        if given["null"]:
            from benchmarks.lib.zoo.stand_ins import cuda_on_cpu

            held.enter_context(cuda_on_cpu())
        devices.warm_up_device("cuda")
        options = {k: given[k] for k in ("arm", "only", "rounds", "share", "seed", "order")}
        about = {"environment": environment(), "options": options}
        Path(given["out"]).with_suffix(ENVIRONMENT).write_text(json.dumps(about) + "\n", encoding="utf-8")
        watched: WatchedDecisions | RetimedChoices
        watched = RetimedChoices(given) if given["arm"] == "retime" else WatchedDecisions(given)

        def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            return watched.call(tuner, args, kwargs)

        Autotuner.run = run
        run_workloads(given, watched)


if __name__ == "__main__":
    main()
