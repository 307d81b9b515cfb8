"""What is launched of a problem whose calls are drawn from a pack: one hidden small call, and its timed workloads."""

from __future__ import annotations

from pathlib import Path

from forecast_harness.clocks.records import Program
from forecast_harness.clocks.times import impossible_time
from forecast_harness.records import SearchTarget
from forecast_harness.targets.packs.schema import Language
from forecast_harness.targets.search_target import pack_of
from forecast_harness.trials.machine_code.pack_calls import PackCalls, PreparedCall
from forecast_harness.trials.machine_code.target_trials import TrialCalls
from forecast_harness.verify.plan import VerificationPlan


class DrawnTrials:
    """The part of `TargetTrials` that sources in any language of a pack share."""

    language: str

    def __init__(self, target: SearchTarget, plan: VerificationPlan, folder: Path) -> None:
        """`folder` is for scratch files. Raises `RecordError`, `MachineCodeError` where calls cannot be drawn."""
        folder.mkdir(parents=True, exist_ok=True)
        pack, self._target, self._plan = pack_of(target), target, plan
        drawn = PackCalls(pack, folder)
        self._timed: dict[str, PreparedCall] = {
            w.name: drawn.draw({n: int(v) for n, v in w.axes.items()})
            for w in pack.timed_workloads(plan.device, Language(self.language))
        }
        small = drawn.draw()
        self._calls = TrialCalls(small, self._timed)
        self._every = (small, *self._timed.values())
        """In the order in which a node is compiled for them."""
        self._cases = tuple(call.arguments for call in self._every)

    @property
    def calls(self) -> TrialCalls:
        """On what nodes are launched."""
        return self._calls

    def sealed(self, program: Program) -> Program:
        """As it is: whoever made its plan may say where outputs lie, and they are compared with what is right."""
        return program

    def implausible(self, workload: str, seconds: float) -> str:
        """Why one launch of a workload cannot have taken so few seconds; '' if it can."""
        case = self._timed[workload].case
        return impossible_time(seconds, case.moved_bytes, case.flops, self._plan.peaks)
