"""Claim: whenever candidates are timed in the background, a program's tensors hold what its own launches put there.

    python -m benchmarks.launches.background_schedules --out benchmarks/results/background_schedules.json

CPU only, on a null device whose launches add one to their tensors: each launch more or less on a tensor of the program
shows. A schedule's seed says how many threads launch an in-place kernel, with which of two keys, at which moments, with
which arguments declared to be restored or cleared, under which budget, which candidates fail, when the program settles,
and when launches stand in a capture (told to the tuner: there is no stream to record). After each launch the tensor is
compared with the number of launches made on it, and the config with the one before. The tuner, its compilations and
its thread are the real ones; times are invented.
"""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import atexit
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.lib import result_files
from forecast_autotune import autotune, settle
from forecast_autotune.store import Store
from forecast_integrations.triton.background import tuner as background
from forecast_integrations.triton.null_device import NullDevice, null_device

WARPS, STAGES, KEYS = (2, 4, 8), (2, 3), (4096, 8192)


@triton.jit
def increment_kernel(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


class CountingDevice(NullDevice):
    """Adds one to the tensors of each launch; some candidates fail where only they are launched."""

    def __init__(self, failing: set[tuple[int, int]]) -> None:
        super().__init__(lambda m: 1.0 + 0.3 * abs(m.num_warps - 4) + 0.2 * abs(m.num_stages - 3))  # type: ignore[attr-defined]
        self.failing = failing

    def _launcher(self, src: object, metadata: Any) -> Callable[..., None]:
        counted = super()._launcher(src, metadata)

        def launch(*args: object) -> None:
            if (metadata.num_warps, metadata.num_stages) in self.failing:
                raise RuntimeError("an illegal instruction")
            counted()
            for value in args:
                if isinstance(value, torch.Tensor):
                    value.add_(1)

        return launch


@dataclass
class LaunchesMade:
    """One thread's launches of one key, all on one tensor."""

    count: int = 0
    served: list[tuple[int, int]] = field(default_factory=list)
    """Warps and stages of the configs it was served with, one after another."""
    captured: set[tuple[int, int]] = field(default_factory=set)
    """Those since the latest capture began."""


class Schedule:
    """One random program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._capturing = threading.local()
        self._mutex = threading.Lock()

    def run(self, seconds: float) -> Counter[str]:
        """Launch until each key is settled, or for so many seconds; returns what was counted."""
        from triton.runtime.driver import driver

        chance = self.random
        os.environ["FORECAST_AUTOTUNE_STALL_MS"] = str(chance.choice((0, 20, 200, 1000)))
        configs = [
            triton.Config({"BLOCK": 128}, num_warps=w, num_stages=s) for w, s in product(WARPS, STAGES)
        ]
        declared: dict[str, Any] = chance.choice(({}, {"restore_value": ["x"]}, {"reset_to_zero": ["x"]}))
        tuner = autotune(configs, key=["n"], store=Store(None), mode="background", **declared)(
            triton.jit(increment_kernel.fn)
        )
        with null_device():
            device = CountingDevice(set())
            driver.set_active(device)  # type: ignore[arg-type]
            for n in KEYS:  # what is served is known to run
                self._launch(tuner, torch.zeros(n), LaunchesMade())
            served = {(c.num_warps, c.num_stages) for c in (p.served_config for p in _pending(tuner))}
            others = [p for p in product(WARPS, STAGES) if p not in served]
            device.failing = set(chance.sample(others, chance.choice((0, 0, 1, 2))))
            seeds = [chance.random() for _ in range(chance.randint(1, 3))]
            until = time.monotonic() + seconds
            threads = [threading.Thread(target=self._work, args=(tuner, seed, until)) for seed in seeds]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.counts["settled"] += len(tuner.cache)
            background.BACKGROUND.stop(60.0)
            background.BACKGROUND.reset()
        self.counts["keys"] += len(KEYS)
        return self.counts

    def is_capturing(self) -> bool:
        """What the tuner is told of this thread's stream."""
        return bool(getattr(self._capturing, "on", False))

    def _work(self, tuner: Any, seed: float, until: float) -> None:
        chance = random.Random(seed)
        mine = {n: (torch.zeros(n), LaunchesMade()) for n in KEYS}
        while len(tuner.cache) < len(KEYS) and time.monotonic() < until:
            act = chance.random()
            if act < 0.01:
                self._settle(chance)
            elif act < 0.03:
                self._capture(tuner, mine, chance)
            else:
                n = chance.choice(KEYS)
                self._launch(tuner, *mine[n])
                self._check(*mine[n])
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.002)
        for n in KEYS:
            self._launch(tuner, *mine[n])
            self._check(*mine[n])

    def _settle(self, chance: random.Random) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settle(timeout=chance.choice((0.0, 0.01, 0.5)))
        self._count("settle")

    def _capture(self, tuner: Any, mine: dict[int, Any], chance: random.Random) -> None:
        """A few launches that stand in a capture: of each key with one config, and nothing else on the device."""
        self._capturing.on = True
        for _, made in mine.values():
            made.captured.clear()
        try:
            for n in chance.choices(KEYS, k=3):
                self._launch(tuner, *mine[n])
                self._check(*mine[n])
                self._count("in_capture")
            for _, made in mine.values():
                self._count("switches_in_capture", len(made.captured) > 1)
        finally:
            self._capturing.on = False

    def _launch(self, tuner: Any, x: torch.Tensor, made: LaunchesMade) -> None:
        n = x.numel()
        kernel = tuner[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, n)
        config = kernel.metadata.num_warps, kernel.metadata.num_stages
        if made.served and made.served[-1] != config:
            self._count("switches")
            self._count("keys_switched_again", len(made.served) > 1)
        if not made.served or made.served[-1] != config:
            made.served.append(config)
        made.captured.add(config)
        made.count += 1
        self._count("launches")

    def _check(self, x: torch.Tensor, made: LaunchesMade) -> None:
        self._count("wrong", not bool((x == made.count).all()))
        self._count("compared")

    def _count(self, name: str, more: int = 1) -> None:
        with self._mutex:
            self.counts[name] += more


def _pending(tuner: Any) -> list[Any]:
    return list(tuner._engine.pending.values())


def run(a: Namespace, report: result_files.ResultFile) -> Counter[str]:
    """All schedules, one after another."""
    total: Counter[str] = Counter()
    os.environ["TRITON_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="background_schedules_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    asked = background.capturing_graph
    for seed in range(a.seed, a.seed + a.schedules):
        schedule = Schedule(seed)
        background.capturing_graph = schedule.is_capturing
        try:
            counts = schedule.run(a.seconds)
        finally:
            background.capturing_graph = asked
        total += counts
        report.add("schedules", {"seed": seed, **counts})
        if counts["wrong"] or counts["keys_switched_again"] or not (seed + 1) % 20:
            result_files.say(f"{seed}: {dict(counts)}")
    return total


def main() -> int:
    """Run all schedules; 1 if a tensor was wrong or a key switched twice."""
    parser = result_files.parser(__doc__)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0, help="most seconds of a schedule")
    parser.add_argument("--seed", type=int, default=0)
    a = result_files.parse_arguments(parser, on_host=True)
    report = result_files.ResultFile(a, "background-schedules", a.seed)
    total = run(a, report)
    names = (
        "keys",
        "settled",
        "switches",
        "keys_switched_again",
        "switches_in_capture",
        "launches",
        "compared",
        "wrong",
        "in_capture",
        "settle",
    )
    report.finish({"schedules": a.schedules, **{name: total[name] for name in names}})
    return 1 if total["wrong"] or total["keys_switched_again"] else 0


if __name__ == "__main__":
    sys.exit(main())
