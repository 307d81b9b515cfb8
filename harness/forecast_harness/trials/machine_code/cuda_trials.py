"""What is launched of a CUDA kernel: one hidden small call, and its timed workloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from forecast_autotune.errors import RecordError
from forecast_harness.clocks.compilation.nvcc import CudaBuild
from forecast_harness.clocks.compilation.requests import BuildRequest
from forecast_harness.records import Node, NodeJob, SearchTarget
from forecast_harness.targets.cuda.source import cuda_configs
from forecast_harness.targets.search_target import cuda_signature_of
from forecast_harness.trials.configs.source_configs import configs_to_time, is_compatible
from forecast_harness.trials.machine_code.drawn_trials import DrawnTrials
from forecast_harness.trials.machine_code.target_trials import TrialConfig
from forecast_harness.verify.plan import VerificationPlan


class CudaTrials(DrawnTrials):
    """`TargetTrials` of a CUDA kernel with a declared signature."""

    language = "cuda"

    def __init__(self, target: SearchTarget, plan: VerificationPlan, folder: Path) -> None:
        """`folder` is for scratch files. Raises `RecordError`, `MachineCodeError` where calls cannot be drawn."""
        super().__init__(target, plan, folder)
        self._signature = cuda_signature_of(target)
        self._axes = tuple(dict(call.case.sizes or {}) for call in self._every)

    def configs(
        self, job: NodeJob, check: Callable[[], None] = lambda: None
    ) -> tuple[Sequence[TrialConfig], str]:
        """The source as it stands, the config that suits the rival's, and others as unlike these as can be."""
        try:
            listed = cuda_configs(job.node.source)
        except RecordError as error:
            return [{}], str(error)
        chosen = list(configs_to_time(job.node.source, listed, max(1, job.trials), {}, None))
        suited = [c for c in listed if is_compatible(c, job.against_config)][:1]
        rest = [c for c in chosen if c not in suited]
        return [*rest[:1], *suited, *rest[1:]][: max(1, job.trials)], ""

    def request(self, node: Node, config: TrialConfig) -> BuildRequest:
        """How a node is compiled: for the small call, then for the timed ones."""
        build = CudaBuild(self._signature, dict(config), self._axes)
        return BuildRequest(node.id, node.source, self._signature.entry, self._cases, cuda=build)

    def learn(
        self, job: NodeJob, timed: Sequence[tuple[TrialConfig, Sequence[float]]], rival: Sequence[float]
    ) -> None:
        """Nothing forecasts configs of CUDA sources."""

    def close(self) -> None:
        """Nothing is held."""
