"""`survey` and `verify_variant`: may this source stand in for that kernel, and for which calls?

Both work in a sandbox lane; their caller imports nothing of a variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Generic, TypeVar

from forecast_autotune.errors import RecordError, VariantError
from forecast_autotune.records import Config
from forecast_autotune.variants import Check, Variant
from forecast_autotune.variants.contract import Contract, read_contract
from forecast_autotune.variants.signature import memory_span
from forecast_harness.sandbox.api import JobStatus, ResourceLimits, SandboxJob, SandboxLane
from forecast_harness.sandbox.jobs import byte_size
from forecast_harness.sandbox.lane_pools import LanePool, end_pools, lane_count
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.trials.configs.source_configs import configs_to_launch
from forecast_harness.trials.variants.files import BaseBinaries, launcher_files
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import run_verification
from forecast_harness.verify.verdict import Judgement, Reason, ReasonCode, SolutionVerdict, memory_rise

VARIANT_PLAN = VerificationPlan(cases=12, timed=0)
VARIANT_LIMITS = ResourceLimits(wall_s=900.0, cpu_s=900.0, trusted_s=900.0, memory_bytes=8 << 30)
_WIDENING = 4
"""Times the bytes of an 8-bit number that the dtype has in which results are compared on a device."""
_COPIES = 6
"""The number of a block's copies in a cell."""
_JOB_MODULE = "forecast_harness.trials.variants.jobs"


@dataclass(frozen=True)
class VariantVerification:
    """The verdict on a variant, and the checks that it amounts to."""

    verdict: SolutionVerdict
    checks: tuple[Check, ...]
    """One check; none where the harness itself failed, which says nothing about the variant."""


class BaseRefusedError(VariantError):
    """The base kernel accepts nothing that can be drawn, and never will."""


def survey(
    subject: BaseKernel,
    lane: SandboxLane,
    *,
    plan: VerificationPlan = VARIANT_PLAN,
    binaries: BaseBinaries | None = None,
) -> KernelSurvey:
    """Survey the calls that a base kernel accepts, by running it alone; `binaries` take its files.

    Raises `VariantError` where nothing can be verified against it, with what would help.
    """
    payload = {"subject": subject.to_json(), "device": plan.device}
    job = SandboxJob(
        f"{_JOB_MODULE}:survey", payload, launcher_files(subject.kernel, subject.source, subject.source)
    )
    result = lane.run(job, _limits_for(subject))
    if result.status is not JobStatus.OK:
        raise VariantError(
            f"base kernel {subject.kernel} could not be run in the sandbox: {result.fault} {result.detail}"
        )
    if "refused" in result.value:
        raise BaseRefusedError(result.value["refused"])
    if binaries is not None:
        binaries.take(result.arrays)
        binaries.steps |= result.value["steps"]
    return KernelSurvey.from_json(result.value["survey"])


def verify_variant(
    variant: Variant,
    subject: BaseKernel,
    base_survey: KernelSurvey,
    lane: SandboxLane,
    *,
    device: str,
    plan: VerificationPlan = VARIANT_PLAN,
    binaries: BaseBinaries | None = None,
    limits: ResourceLimits = VARIANT_LIMITS,
) -> VariantVerification:
    """Judge a variant against its base with fresh hidden seeds.

    `device` is the slug that checks name, `interpreter` for Triton's. Bitwise repeatable results are asked
    for where the base has them, unless the variant adds atomically. `binaries` of the base need not be compiled anew,
    nor what came of the variant `early`, whose seed is the verification's then.
    An error of the variant is a verdict, and raises nothing here.
    """
    try:
        contract = read_contract(variant.source, variant.kernel)
        subject.require_fit(contract)
    except RecordError as error:
        return refused_variant(variant, base_survey, device, Reason(ReasonCode.FAILS, str(error)))
    configs = _configs_to_launch(variant, contract, subject)
    payload = {
        "subject": subject.to_json(),
        "configs": [c.to_json() for c in configs],
        "takes": [*contract.parameters, *contract.meta],
        "plan": plan.to_json(),
        "survey": base_survey.to_json(),
        "binaries": {} if binaries is None else binaries.to_payload(),
        "deterministic": base_survey.deterministic and "atomic_" not in variant.source,
    }
    files = launcher_files(subject.kernel, subject.source, variant.source)
    job, facts = (
        SandboxJob(f"{_JOB_MODULE}:examine", payload, files),
        {
            "configs": len(configs),
            **({"not_varied": list(base_survey.unvaried)} if base_survey.unvaried else {}),
        },
    )
    identity = subject.kernel, variant.name, variant.source
    verdict, result = run_verification(job, lane, _limits_for(subject, limits), identity, plan, facts)
    if result.status is JobStatus.OK and binaries is not None:
        binaries.take(result.arrays)
    return VariantVerification(verdict, _checks_of(verdict, base_survey, device))


def _limits_for(subject: BaseKernel, limits: ResourceLimits = VARIANT_LIMITS) -> ResourceLimits:
    """Limits under which the subject's call can be launched in the wider dtype, too, and read.

    Not captured calls alone: where a kernel accepts no other sizes, its recorded ones are launched.
    """
    tensors = [a for call in subject.calls[:1] for a in call if a.kind == "tensor"]
    size = _WIDENING * sum(byte_size(a.dtype, (memory_span(a),)) for a in tensors)
    answer, memory = max(limits.answer_bytes, 2 * size), max(limits.memory_bytes, _COPIES * size)
    return replace(limits, answer_bytes=answer, memory_bytes=memory)


def refused_variant(
    variant: Variant, base_survey: KernelSurvey, device: str, reason: Reason
) -> VariantVerification:
    """The result of a refusal before any launch of a verification: a check that failed."""
    verdict = SolutionVerdict(variant.kernel, variant.name, (reason,))
    return VariantVerification(verdict, _checks_of(verdict, base_survey, device))


def _checks_of(verdict: SolutionVerdict, base_survey: KernelSurvey, device: str) -> tuple[Check, ...]:
    if verdict.judgement is Judgement.INFRASTRUCTURE:
        return ()
    at = datetime.now(UTC).isoformat(timespec="seconds")
    if verdict.accepted:
        detail = f"{verdict.trials} launches, harness {verdict.facts['harness']}"
        if rise := memory_rise(*(verdict.facts.get(n, {}) for n in ("peak_bytes", "base_peak_bytes"))):
            detail = f"{detail}; {rise}"
        if base_survey.unvaried:
            detail = f"{detail}; not varied: {'; '.join(base_survey.unvaried)}"[:600]
    else:
        first = verdict.reasons[0]
        detail = f"{first.code}: {first.detail}"[:600]
    return (Check(device, base_survey.signature, verdict.accepted, detail, at),)


def _configs_to_launch(variant: Variant, contract: Contract, subject: BaseKernel) -> Sequence[Config]:
    """The configs to launch."""
    configs: Sequence[Config] = variant.configs or contract.configs
    if not configs:
        meta = set(contract.meta)
        configs = [replace(c, kwargs=tuple(p for p in c.kwargs if p[0] in meta)) for c in subject.configs]
    return configs_to_launch(configs)


Item = TypeVar("Item")
Result = TypeVar("Result")
_MOST_LANES = 8
"""The most lanes of one device: its driver makes one context after the other, a verification needs one; sixteen took as
long where it needed two."""
_PROCESSORS_PER_LANE = 1
"""A lane's cells wait for the device and for the judge as often as they compile."""


def verification_lanes() -> int:
    """Lanes at most on this machine; at least one."""
    return lane_count(_MOST_LANES, _PROCESSORS_PER_LANE)


class LaneJobs(Generic[Item, Result]):
    """Things done side by side in the lanes of a pool; more may be added while others are done."""

    def __init__(self, lanes: LanePool, do: Callable[[Item, SandboxLane], Result]) -> None:
        self._lanes, self._do = lanes, do
        self._pool = ThreadPoolExecutor(lanes.most, "verify")
        self._under_way: list[Future[tuple[Item, Result]]] = []

    def add(self, items: Iterable[Item]) -> None:
        """Have these done, too, after those that were added before."""
        self._under_way += [self._pool.submit(self._run_item, item) for item in items]

    def results(self) -> Iterator[tuple[Item, Result]]:
        """(item, what `do` gave) of all that were added since the last time, as they are done.

        Raises what `do` raises.
        """
        futures, self._under_way = self._under_way, []
        for future in as_completed(futures):
            yield future.result()

    def close(self) -> None:
        """Begin nothing more, and end the jobs under way."""
        end_pools([self._pool], self._lanes.give_up)

    def _run_item(self, item: Item) -> tuple[Item, Result]:
        with self._lanes.borrowed() as lane:
            return item, self._do(item, lane)
