"""What is launched of a pack: one hidden small call, and its timed workloads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from forecast_harness.clocks.compilation.requests import BuildRequest
from forecast_harness.records import Node, NodeJob, SearchTarget
from forecast_harness.trials.configs.pack_tracing import PackTracer
from forecast_harness.trials.configs.source_configs import apply_config, configs_to_time, own_configs
from forecast_harness.trials.machine_code.drawn_trials import DrawnTrials
from forecast_harness.trials.machine_code.target_trials import TrialConfig
from forecast_harness.verify.plan import VerificationPlan


class PackTrials(DrawnTrials):
    """`TargetTrials` of a pack of our own format. Raises `RecordError`, `MachineCodeError` for any other."""

    language = "triton"

    def __init__(self, target: SearchTarget, plan: VerificationPlan, folder: Path) -> None:
        """`folder` is for scratch files."""
        super().__init__(target, plan, folder)
        self._tracer, self._tracing = PackTracer(target, folder), threading.Lock()

    def configs(
        self, job: NodeJob, check: Callable[[], None] = lambda: None
    ) -> tuple[Sequence[TrialConfig], str]:
        """The source as it stands, the config that suits the rival's, and the best that are forecast."""
        listed, note = own_configs(job.node.source)
        with self._tracing:  # for which many nodes may wait
            check()
            most = max(1, job.trials)
            return configs_to_time(job.node.source, listed, most, job.against_config, self._tracer), note

    def request(self, node: Node, config: TrialConfig) -> BuildRequest:
        """How a node is compiled: for the small call, then for the timed ones."""
        return BuildRequest(node.id, apply_config(node.source, config), self._target.entry, self._cases)

    def learn(
        self, job: NodeJob, timed: Sequence[tuple[TrialConfig, Sequence[float]]], rival: Sequence[float]
    ) -> None:
        """Have later choices heed what was timed."""
        with self._tracing:
            self._tracer.learn(job.against.source, [(job.against_config, rival)])
            self._tracer.learn(job.node.source, timed)

    def close(self) -> None:
        """End the sandbox of forecasts."""
        with self._tracing:
            self._tracer.close()
