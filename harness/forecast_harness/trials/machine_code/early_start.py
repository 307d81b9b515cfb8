"""What a judge of machine code needs, begun before its target is known: processes that take seconds to start."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from forecast_autotune.errors import ForecastAutotuneError
from forecast_harness.clocks.compilation.workers import CompileWorkers
from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.clocks.runner.health import open_healthy_runner
from forecast_harness.targets.search_target import cuda_device
from forecast_harness.trials.judging.early_opener import EarlyOpener
from forecast_harness.verify.plan import VerificationPlan


@dataclass(frozen=True)
class _OpenedRunner:
    """A runner that has proved its health, and what ends it."""

    runner: RunnerClient
    held: ExitStack

    def close(self) -> None:
        """End it."""
        self.held.close()


def _opened(plan: VerificationPlan) -> _OpenedRunner:
    with ExitStack() as stack:
        runner = stack.enter_context(open_healthy_runner(plan.index, plan.uuid))
        return _OpenedRunner(runner, stack.pop_all())


class EarlyStart:
    """Compile workers of all devices together, and a runner for each. `close` ends them all."""

    def __init__(self, plans: Sequence[VerificationPlan], workers: int = 0) -> None:
        """`workers`: 0 for all processors."""
        self.plans = tuple(plans)
        self._held = ExitStack()
        self.workers = CompileWorkers(count=workers).start()
        self._held.callback(self.workers.close)
        self._runners = [EarlyOpener(partial(_opened, plan)) for plan in self.plans]
        for opener in self._runners:
            self._held.callback(opener.close)
        threading.Thread(target=_ask_for_device, daemon=True).start()

    def runner(self, number: int) -> RunnerClient:
        """That of a plan, once it is fit. Raises `NoMachineCodePath`, `RunnerLost`."""
        opened = self._runners[number]()
        self._held.callback(opened.close)
        return opened.runner

    def close(self) -> None:
        """End all."""
        self._held.close()


def _ask_for_device() -> None:
    """A target names its device, which a child process tells within half a second."""
    with suppress(ForecastAutotuneError, OSError):
        cuda_device()
