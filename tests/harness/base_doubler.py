"""Stands in for the cell of a base kernel that doubles a vector."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from forecast_autotune.records import Argument, Config
from forecast_harness.trials.variants.base_runner import BaseKernelError, BaseKernelRun, TensorMemory


class BaseDoubler:
    """Gives twice `x` as `out`; under the `differing` configs another result."""

    def __init__(self, *differing: Config) -> None:
        self.ran: list[Config] = []
        self.compiled: list[int] = []
        """How many calls each question to compile ahead was about."""
        self.began = threading.Event()
        self._differing = differing
        self.unable: dict[Hashable, BaseKernelError] = {}

    def open(self) -> None:
        """As `BaseKernelRunner.open`."""

    def run(
        self,
        arguments: Sequence[Argument],
        scalars: Mapping[str, Any],
        memory: TensorMemory,
        grid: Sequence[int],
        config: Config,
    ) -> BaseKernelRun:
        """As `BaseKernelRunner.run`."""
        self.ran.append(config)
        self.began.set()
        factor = 3 if config in self._differing else 2
        return BaseKernelRun({**memory, "out": factor * memory["x"]}, ("out",), 0, 0.0)

    def compile_ahead(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Notes how many they are."""
        self.compiled.append(len(calls))
