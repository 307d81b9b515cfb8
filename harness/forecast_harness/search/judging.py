"""What judges of packs and of kernels share: a sandbox lane, and how verdicts and times become `Judged`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forecast_autotune.records import Outcome
from forecast_harness.sandbox import canary
from forecast_harness.sandbox.api import Job as Asked
from forecast_harness.sandbox.api import Lane, Status
from forecast_harness.search.interfaces import LaneLost
from forecast_harness.search.judge import slug_of
from forecast_harness.search.racing import log2_ratio
from forecast_harness.search.records import Judged
from forecast_harness.verify.plan import Plan
from forecast_harness.verify.run import harness_hash
from forecast_harness.verify.verdict import Code, Judgement, Reason, Verdict

_FEEDBACK = 1500
_COMPILES = re.compile(
    r"\b(SyntaxError|IndentationError|ImportError|ModuleNotFoundError|CompilationError|OutOfResources|"
    r"CompileTimeAssertionFailure|UnsupportedLanguageConstruct|AttributeError: module 'candidate')"
)
"""What a source that never came to run fails with."""


class LaneJudge:
    """A sandbox lane, and what it says of nodes. Use from one thread at a time."""

    def __init__(self, plan: Plan, folder: Path, number: int) -> None:
        """Raises `LaneLost` if the lane's canary does not sing."""
        self._plan, self._folder = plan, folder
        self.name = plan.uuid or f"{plan.device}-{number}"
        self._device = plan.uuid or slug_of(plan.device, plan.index)
        folder.mkdir(parents=True, exist_ok=True)
        self._lane = self._opened()

    def close(self) -> None:
        """End all processes of the lane."""
        self._lane.close()

    def _opened(self) -> Lane:
        """A fresh lane whose canary sang. Raises `LaneLost`."""
        environment = {"TRITON_INTERPRET": "1"} if self._plan.device == "cpu" else {}
        device = None if self._plan.device == "cpu" else self._plan.uuid or str(self._plan.index)
        lane = Lane(device=device, scratch=self._folder, environment=environment)
        lane.__enter__()
        result = lane.run(Asked(f"{canary.__name__}:main", {"device": device}), canary.LIMITS)
        if result.status is Status.OK and result.value == "ok":
            return lane
        lane.close()
        raise LaneLost(f"the canary: {result.value or result.detail}", self.name)

    def _refused(
        self, reasons: Sequence[Reason], verdict: Verdict, spent: float, note: str = "", timed: int = 0
    ) -> Judged:
        """A node that has no time, for these reasons. Raises `LaneLost` where the harness is to blame."""
        if gravest(reasons) is Judgement.INFRASTRUCTURE:
            raise LaneLost(told(reasons), self.name)
        stage = "time" if timed else "verify"
        if not timed and verdict.trials == 0 and _COMPILES.search(reasons[0].detail):
            stage = "compile"
        return Judged(
            replace(verdict, reasons=tuple(reasons)).outcome,
            measurements=max(1, timed),
            device_seconds=spent,
            device=self._device,
            stage=stage,
            feedback=bounded(f"{told(reasons)} {note}"),
            facts={**self._facts(verdict), "codes": sorted({str(r.code) for r in reasons})},
        )

    def _measured(
        self,
        value: Mapping[str, Any],
        configs: Sequence[Mapping[str, Any]],
        verdict: Verdict,
        timed: int,
        spent: float,
        note: str = "",
        *,
        stage: str = "time",
        more: Mapping[str, Any] | None = None,
    ) -> Judged:
        """A node that won its race, or ran alone. `value` is a timing job's, `configs` what it raced."""
        ratio, error = log2_ratio(value["differences"])
        seconds = {n[2:]: s for n, s in value["seconds"].items() if n.startswith("1:")}
        theirs = {n[2:]: s for n, s in value["seconds"].items() if n.startswith("0:")}
        each = [f"{n} {1e6 * s:.1f} us against {1e6 * theirs[n]:.1f} us" for n, s in seconds.items()]
        word = "slower" if ratio > 0 else "faster"
        text = f"Right, and {2 ** abs(ratio):.3f} times {word}: {'; '.join(each)}."
        config = dict(configs[value["winner"]])
        if config:
            text += f" Its best config is {config}."
        ranked = [
            {"config": dict(configs[int(n)]), "log2_ratio": log2_ratio([d])[0]}
            for n, d in value["ranking"].items()
        ]
        facts = {"blocks": len(value["differences"]), "ended": value["ended"], "checks": value["checks"]}
        return Judged(
            Outcome.OK,
            log2_ratio=ratio,
            sd=error,
            seconds=seconds,
            config=config,
            measurements=timed,
            device_seconds=spent,
            device=self._device,
            stage=stage,
            feedback=bounded(f"{text} {note}"),
            facts={**self._facts(verdict), **facts, "configs": ranked, **(more or {})},
        )

    def _facts(self, verdict: Verdict) -> dict[str, Any]:
        """What may be shown to a proposer: never the seed."""
        return {
            "harness": harness_hash(),
            "launches": verdict.trials,
            "error_over_limit": verdict.facts.get("error_over_limit"),
            "hints": list(verdict.hints),
            "level": self._lane.level.name.lower(),
        }


def reasons_of(listed: Sequence[Mapping[str, str]]) -> tuple[Reason, ...]:
    """Reasons from their JSON."""
    return tuple(Reason(Code(r["code"]), r["detail"], r["trial"]) for r in listed)


def gravest(reasons: Sequence[Reason]) -> Judgement:
    """What these findings amount to, as `Verdict.judgement` has it."""
    return Verdict("", "", tuple(reasons)).judgement


def told(reasons: Sequence[Reason]) -> str:
    """Reasons as sentences, without the number of the trial, which says how seeds were drawn."""
    return "; ".join(f"{r.code}: {r.detail}" for r in reasons)


def out_of_time(limit: float | None, spent: float, done: int, least: int) -> bool:
    """Whether a confirmation limited to so many seconds must end: `done` nodes took `spent` of them.

    The next is taken to need what those before it needed on average; `least` are done whatever they take.
    """
    return limit is not None and done >= least and spent * (done + 1) / done > limit


def bounded(text: str) -> str:
    """Text of a length that a prompt can bear."""
    text = text.strip()
    return text if len(text) <= _FEEDBACK else f"{text[: _FEEDBACK - 4]} ..."
