"""Choices of several arms, and the harvest's best, timed side by side in the calls that the workloads make."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from triton.runtime.autotuner import Autotuner

from benchmarks.lib.kernel_timing import time_in_turns
from benchmarks.lib.libraries.contexts import (
    config_key,
    config_record,
    context_id,
    pruned_configs,
    read_rows,
)

HARVEST = "harvest"


def chosen_configs(files: Mapping[str, Path]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """By context: the config that each arm chose, and the harvest's best few as `best 0`, `best 1`, ..."""
    result: dict[str, dict[str, Mapping[str, Any]]] = {}
    for arm, path in files.items():
        for row in read_rows(path):
            chosen = result.setdefault(str(row["id"]), {})
            chosen[arm] = row["config"]
            if arm == HARVEST:
                chosen |= {f"best {i}": config for i, config in enumerate(row.get("best", []))}
    return result


class RetimedChoices:
    """Stands in for `Autotuner.run`: in a context that was decided, all that was chosen is timed in turns.

    Every call is launched with the fastest of these; where nothing is known of it, with the first config.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.workload, self.decided = "", 0
        self.choices = chosen_configs({arm: Path(path) for arm, path in given["picks"].items()})
        self.rounds = int(given["rounds"])
        self._out = Path(given["out"])
        self._run = Autotuner.run

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
