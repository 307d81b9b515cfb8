"""`survey` and `verify`: may this source stand in for that kernel, and for which calls?

Both work in a sandbox lane; nothing of a variant is imported by whoever calls them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from forecast_autotune.errors import RecordError, VariantError
from forecast_autotune.records import Config
from forecast_autotune.variants import Check, Variant
from forecast_autotune.variants.contract import Contract, contract
from forecast_harness.sandbox.api import Job, Lane, Limits, Status
from forecast_harness.variants.launcher import files
from forecast_harness.variants.subject import Subject, Survey
from forecast_harness.verify.plan import Plan
from forecast_harness.verify.run import harness_hash, lane_reason
from forecast_harness.verify.screen import screen
from forecast_harness.verify.verdict import Code, Judgement, Reason, Verdict

PLAN = Plan(cases=12, timed=0)
LIMITS = Limits(wall_s=900.0, cpu_s=900.0, trusted_s=900.0, memory_bytes=8 << 30)
_MOST_CONFIGS = 24
"""Configs that are launched in a verification, spread over longer lists: they share one source."""
_JOBS = "forecast_harness.variants.worker"


@dataclass(frozen=True)
class Verified:
    """The verdict on a variant, and the checks that it amounts to."""

    verdict: Verdict
    checks: tuple[Check, ...]
    """One; none where the harness itself failed, which says nothing about the variant."""


def survey(subject: Subject, lane: Lane, *, plan: Plan = PLAN, limits: Limits = LIMITS) -> Survey:
    """What may be asked of a base kernel, by running it alone.

    Raises `VariantError` where nothing can be verified against it, with what would help.
    """
    payload = {"subject": subject.to_json(), "device": plan.device}
    job = Job(f"{_JOBS}:survey", payload, files(subject.kernel, subject.source, subject.source))
    result = lane.run(job, limits)
    if result.status is not Status.OK:
        raise VariantError(
            f"base kernel {subject.kernel} could not be run in the sandbox: {result.fault} {result.detail}"
        )
    if "refused" in result.value:
        raise VariantError(result.value["refused"])
    return Survey.from_json(result.value["survey"])


def verify(
    variant: Variant,
    subject: Subject,
    known: Survey,
    lane: Lane,
    *,
    device: str,
    plan: Plan = PLAN,
    limits: Limits = LIMITS,
    seed: str = "",
) -> Verified:
    """Judge a variant against its base with fresh hidden seeds.

    `device` is the slug that checks name, `interpreter` for Triton's. Bitwise repeatable results are asked
    for where the base has them, unless the variant adds atomically. Nothing that it does raises here.
    """
    begin = time.perf_counter()
    try:
        promised = contract(variant.source, variant.kernel)
        promised.must_fit(contract(subject.source, subject.kernel).parameters)
    except RecordError as error:
        return _refused(variant, known, device, Reason(Code.FAILS, str(error)))
    configs = _configs(variant, promised, subject)
    deterministic = known.deterministic and "atomic_" not in variant.source
    payload = {
        "subject": subject.to_json(),
        "survey": known.to_json(),
        "configs": [c.to_json() for c in configs],
        "takes": [*promised.parameters, *promised.meta],
        "plan": plan.to_json(),
        "deterministic": deterministic,
        "seed": seed,
    }
    job = Job(f"{_JOBS}:examine", payload, files(subject.kernel, subject.source, variant.source))
    result = lane.run(job, limits)
    facts: dict[str, Any] = {"harness": harness_hash(), "plan": plan.to_json(), "configs": len(configs)}
    facts["level"] = lane.level.name.lower()
    trials = 0
    reasons: tuple[Reason, ...]
    if result.status is Status.OK:
        reasons = tuple(Reason(Code(r["code"]), r["detail"], r["trial"]) for r in result.value["reasons"])
        trials = int(result.value["trials"])
        facts |= {**result.value["facts"], "unable": result.value["unable"]}
    else:
        reasons = (lane_reason(result),)
    hints, spent = screen(variant.source), time.perf_counter() - begin
    verdict = Verdict(subject.kernel, variant.name, reasons, hints, trials, spent, facts)
    return Verified(verdict, _checks(verdict, known, device))


def _refused(variant: Variant, known: Survey, device: str, reason: Reason) -> Verified:
    verdict = Verdict(variant.kernel, variant.name, (reason,))
    return Verified(verdict, _checks(verdict, known, device))


def _checks(verdict: Verdict, known: Survey, device: str) -> tuple[Check, ...]:
    if verdict.judgement is Judgement.INFRASTRUCTURE:
        return ()
    at = datetime.now(UTC).isoformat(timespec="seconds")
    if verdict.accepted:
        detail = f"{verdict.trials} launches, harness {verdict.facts['harness']}"
    else:
        first = verdict.reasons[0]
        detail = f"{first.code}: {first.detail}"[:600]
    return (Check(device, known.signature, verdict.accepted, detail, at),)


def _configs(variant: Variant, promised: Contract, subject: Subject) -> Sequence[Config]:
    """The configs to launch."""
    listed: Sequence[Config] = variant.configs or promised.configs
    if not listed:
        takes = set(promised.meta)
        listed = [replace(c, kwargs=tuple(p for p in c.kwargs if p[0] in takes)) for c in subject.configs]
    unique = list(dict.fromkeys(listed))
    step = max(1.0, len(unique) / _MOST_CONFIGS)
    return [unique[int(i * step)] for i in range(min(len(unique), _MOST_CONFIGS))]
