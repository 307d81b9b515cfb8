"""Which of several solutions is faster: verified, timed in pairs, confirmed in fresh processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forecast_harness.packs.schema import Pack, Solution
from forecast_harness.sandbox.api import Job, Lane, Limits, Status
from forecast_harness.timing.device import exclusive, label_facts
from forecast_harness.timing.duel import DEFAULT, Outcome, Rules
from forecast_harness.timing.label import Label
from forecast_harness.verify.needs import limits_for
from forecast_harness.verify.plan import Plan
from forecast_harness.verify.run import THOROUGH, harness_hash, verify
from forecast_harness.verify.verdict import Code, Reason, Verdict

LIMITS = Limits(wall_s=600.0, trusted_s=600.0, cpu_s=1200.0)


@dataclass(frozen=True)
class Entry:
    """One solution's standing."""

    solution: str
    verdict: Verdict
    outcome: str = ""
    """`incumbent`, `faster`, `slower`, `undecided`, `unconfirmed`, or empty when it was not timed."""
    gain: float | None = None
    """Ratio of the incumbent's time to its own, minus 1; of the confirmation, where there was one."""
    duels: tuple[Mapping[str, Any], ...] = ()
    """The contests in the order they were run; the second is the confirmation."""
    labels: Mapping[str, Label] = field(default_factory=dict)
    """Times per workload."""

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return {
            "solution": self.solution,
            "verdict": self.verdict.to_json(),
            "outcome": self.outcome,
            "gain": self.gain,
            "duels": [dict(d) for d in self.duels],
            "labels": {n: label.to_json() for n, label in self.labels.items()},
        }


def bench(
    pack: Pack,
    solutions: Sequence[Solution],
    lane: Lane,
    *,
    against: Solution | None = None,
    plan: Plan = THOROUGH,
    rules: Rules = DEFAULT,
    limits: Limits = LIMITS,
) -> list[Entry]:
    """Judge all solutions, then time those accepted against `against` (default: the first accepted one).

    A solution is called faster only if two contests, in separate fresh processes with separate seeds, both
    find it so; the gain that is kept is the second one's, which was not selected for being large. Solutions
    that fail verification, or are caught during a contest, have no times.
    """
    everyone = [against, *solutions] if against is not None else list(solutions)
    verdicts = [verify(pack, one, lane, plan=plan) for one in everyone]
    accepted = [n for n, verdict in enumerate(verdicts) if verdict.accepted]
    found = {n: Entry(everyone[n].name, verdict) for n, verdict in enumerate(verdicts)}
    if accepted and (against is None or accepted[0] == 0):
        first = accepted[0]
        found[first] = Entry(everyone[first].name, verdicts[first], "incumbent")
        for n in accepted[1:]:
            found[n], labels = _contest(
                pack, everyone[first], everyone[n], verdicts[n], lane, plan, rules, limits
            )
            if labels and not found[first].labels:
                found[first] = Entry(everyone[first].name, verdicts[first], "incumbent", labels=labels)
    return [found[n] for n in range(len(everyone))]


def _contest(
    pack: Pack,
    incumbent: Solution,
    candidate: Solution,
    verdict: Verdict,
    lane: Lane,
    plan: Plan,
    rules: Rules,
    limits: Limits,
) -> tuple[Entry, dict[str, Label]]:
    """One candidate's contest and, if it wins, its confirmation; its entry and the incumbent's labels."""
    duels: list[Mapping[str, Any]] = []
    outcome, gain = "", None
    labels: tuple[dict[str, Label], dict[str, Label]] = ({}, {})
    for _ in range(2):
        value = _run(pack, incumbent, candidate, lane, plan, rules, limits)
        if "caught" in value:
            reasons = tuple(Reason(Code(r["code"]), r["detail"], r["trial"]) for r in value["reasons"])
            if value["caught"] == 0:
                reasons = (Reason(Code.HARNESS, f"the incumbent was caught: {reasons[0].detail}"),)
            caught = Verdict(
                verdict.pack, verdict.solution, reasons, verdict.hints, verdict.trials, verdict.seconds
            )
            return Entry(candidate.name, caught, "", None, tuple(duels)), {}
        duels.append(value["duel"])
        labels = (_labels(value, 0, plan), _labels(value, 1, plan))
        before, outcome, gain = outcome, value["duel"]["outcome"], value["duel"]["gain"]
        if outcome != Outcome.FASTER:
            outcome = "unconfirmed" if before == Outcome.FASTER else outcome
            break
    return Entry(candidate.name, verdict, str(outcome), gain, tuple(duels), labels[1]), labels[0]


def _run(
    pack: Pack,
    incumbent: Solution,
    candidate: Solution,
    lane: Lane,
    plan: Plan,
    rules: Rules,
    limits: Limits,
) -> Mapping[str, Any]:
    files: dict[str, str] = {}
    contestants = []
    for folder, one in (("incumbent", incumbent), ("candidate", candidate)):
        files |= {f"{folder}/{name}": text for name, text in {**one.files, "solution.py": one.source}.items()}
        file = f"{folder}/solution.py"
        contestants.append({"file": file, "entry": one.entry, "language": str(one.language)})
    payload = {"pack": pack.to_json(), "contestants": contestants}
    payload |= {"plan": plan.to_json(), "rules": rules.to_json()}
    job = Job("forecast_harness.verify.contest:main", payload, files)
    with exclusive(plan.place):
        result = lane.run(job, limits_for(pack, limits, plan.device))
    if result.status is Status.OK:
        value: Mapping[str, Any] = result.value
        return value
    code = Code.ESCAPE if result.status is Status.SUSPICIOUS else Code.HARNESS
    return {"caught": 1, "reasons": [Reason(code, f"{result.fault}: {result.detail}"[:2000]).to_json()]}


def _labels(value: Mapping[str, Any], which: int, plan: Plan) -> dict[str, Label]:
    facts = label_facts(None if plan.device == "cpu" else plan.index)
    found = {}
    for place, seconds in value["seconds"].items():
        contestant, _, name = place.partition(":")
        if contestant == str(which):
            how = value["protocols"][name]
            protocol = "host-pairs-1" if plan.device == "cpu" else f"{how}-cold-pairs-1"
            found[name] = Label.of(seconds, protocol=protocol, harness=harness_hash(), **facts)
    return found
