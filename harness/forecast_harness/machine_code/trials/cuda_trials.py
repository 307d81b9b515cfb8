"""What is launched of a CUDA kernel: one hidden small call, and its timed workloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from forecast_autotune.errors import RecordError
from forecast_harness.cuda_kernels.compilation import CudaBuild
from forecast_harness.cuda_kernels.source_launch import cuda_configs
from forecast_harness.machine_code.compilation.compile_workers import BuildRequest
from forecast_harness.machine_code.records import Program
from forecast_harness.machine_code.trials.pack_calls import PackCalls, PreparedCall
from forecast_harness.machine_code.trials.target_trials import TrialCalls, TrialConfig
from forecast_harness.packs.schema import Language
from forecast_harness.search.history.events import NodeJob
from forecast_harness.search.judging.source_configs import configs_to_time, is_compatible
from forecast_harness.search.records import Node, SearchTarget
from forecast_harness.search.targets import cuda_signature_of, pack_of
from forecast_harness.timing.plausibility import impossible_time
from forecast_harness.verify.plan import VerificationPlan


class CudaTrials:
    """`TargetTrials` of a CUDA kernel with a declared signature."""

    language = "cuda"

    def __init__(self, target: SearchTarget, plan: VerificationPlan, folder: Path) -> None:
        """`folder` is for scratch files. Raises `RecordError`, `MachineCodeError` where calls cannot be drawn."""
        folder.mkdir(parents=True, exist_ok=True)
        self._target, self._plan, self._signature = target, plan, cuda_signature_of(target)
        pack = pack_of(target)
        drawn = PackCalls(pack, folder)
        self._timed: dict[str, PreparedCall] = {
            w.name: drawn.draw({n: int(v) for n, v in w.axes.items()})
            for w in pack.timed_workloads(plan.device, Language.CUDA)
        }
        every = (drawn.draw(), *self._timed.values())
        self._calls = TrialCalls(every[0], self._timed)
        self._cases = tuple(call.arguments for call in every)
        self._axes = tuple(dict(call.case.sizes or {}) for call in every)

    @property
    def calls(self) -> TrialCalls:
        """On what nodes are launched."""
        return self._calls

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

    def sealed(self, program: Program) -> Program:
        """As it is: its plan was made here, and its outputs are the ones that it was given."""
        return program

    def implausible(self, workload: str, seconds: float) -> str:
        """Why one launch of a workload cannot have taken so few seconds; '' if it can."""
        case = self._timed[workload].case
        return impossible_time(seconds, case.moved_bytes, case.flops, self._plan.peaks)

    def learn(
        self, job: NodeJob, timed: Sequence[tuple[TrialConfig, Sequence[float]]], rival: Sequence[float]
    ) -> None:
        """Nothing forecasts configs of CUDA sources."""

    def close(self) -> None:
        """Nothing is held."""
