"""Logs of searches that never ran: events as a search writes them, made up from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from forecast_autotune.records import Outcome, digest
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.records import (
    Node,
    NodeForecast,
    NodeResult,
    Proposed,
    SearchBudget,
    SearchContext,
    SearchCost,
    SearchSettings,
    SearchTarget,
    TargetKind,
)
from forecast_harness.search.events import (
    Chosen,
    Confirmed,
    Event,
    Finished,
    Forecasted,
    Lost,
    Started,
    Stopped,
)

DEVICE = "GPU-5f1c9d2e"
ARMS = ("llm:coder/rewrite", "llm:coder/repair", "llm:writer/rewrite", "mechanical/rewrite")
_FAILURES = (
    (Outcome.COMPILE_ERROR, "compile", "error: operand types disagree in tl.dot"),
    (Outcome.INCORRECT, "verify", "wrong: 12 of 4096 values beyond the tolerance"),
    (Outcome.RUNTIME_ERROR, "verify", "IndexError: index 4096 is out of bounds"),
    (Outcome.OUT_OF_RESOURCES, "compile", "needs 262144 bytes of shared memory, the device has 232448"),
    (Outcome.TIMEOUT, "verify", "no answer within 60 s"),
)
_WORDS = ("block", "tile", "warp", "stage", "mask", "offset", "lane", "pointer", "stride", "phase")


@dataclass
class ExampleSearch:
    """What a made-up search does; each field says how much of it."""

    batches: int = 12
    parents: int = 2
    samples: int = 8
    k: int = 4
    seed: int = 7
    failing: float = 0.25
    forecasts: bool = True
    confirmed: bool = True
    stopped: bool = True
    name: str = "swiglu"
    line: str = ""
    """A line put into every source: for hostile ones."""
    draw: random.Random = field(init=False, repr=False)
    scores: dict[str, float] = field(init=False, repr=False)

    def events(self) -> Iterator[Event]:
        """The log, first line to last; the same every time."""
        self.draw, self.scores = random.Random(self.seed), {}
        target = SearchTarget(
            TargetKind.PACK,
            self.name,
            digest(self.name),
            "torch",
            "run",
            "out = silu(gate) * up, for float32 of 2048 x 5632",
        )
        first = self._node(target, (), "the pack's own solution", "", 0, "")
        settings = SearchSettings(
            SearchBudget(measurements=200, device_seconds=4000.0, tokens=2_000_000, money=5.0),
            proposers=("llm:coder", "mechanical"),
            parents=self.parents,
            samples=self.samples,
            k=self.k,
        )
        context = SearchContext(
            target.id,
            (first.id,),
            "cpu",
            {"torch": "2.13"},
            "forest 3" if self.forecasts else "none",
            "h1",
            settings,
        )
        yield Started(context, target, (first,), "2026-11-20T12:00:00Z")
        self.scores[first.id] = 0.0
        yield Finished(digest("job", first.id), first.id, 0, self._ran(first.id, 0.0, "time"))
        for batch in range(1, self.batches + 1):
            yield from self._batch(target, batch)
        finalists = sorted(self.scores, key=self.scores.__getitem__)[:4]
        if self.confirmed and len(self.scores) > 1:
            yield Confirmed(
                {n: self._ran(first.id, self.scores[n] * 0.96, "confirm") for n in finalists if n != first.id}
            )
        if self.stopped:
            yield Stopped("measurements 200 of 200 spent", at="2026-11-20T12:40:00Z")

    def _batch(self, target: SearchTarget, batch: int) -> Iterator[Event]:
        best = min(self.scores, key=self.scores.__getitem__)
        fresh: list[Node] = []
        ranked = sorted(self.scores, key=self.scores.__getitem__)
        for parent in [best, *self.draw.sample(ranked, min(len(ranked), self.parents) - 1)]:
            arm = self.draw.choice(ARMS)
            request = digest(batch, parent, arm)
            nodes = tuple(
                self._node(target, (parent,), f"{batch}.{n}", arm, batch, request)
                for n in range(self.samples)
            )
            paid = arm.startswith("llm")
            tokens = self.draw.randrange(8_000, 20_000) if paid else 0
            cost = SearchCost(tokens=tokens, money=3e-6 * tokens, wall_seconds=9.0 * paid)
            yield Proposed(request, nodes, cost, batch=batch, arm=arm, parent=parent)
            fresh += nodes
        merits = {n.id: self.scores[n.parents[0]] + self.draw.gauss(0.05, 0.14) for n in fresh}
        beliefs = {n.id: self._belief(merits[n.id] - self.scores[best]) for n in fresh}
        if self.forecasts:
            yield Forecasted(batch, best, beliefs, SearchCost(wall_seconds=0.2))
            fresh.sort(key=lambda n: -beliefs[n.id].p_better)
        chosen = fresh[: self.k * self.parents]
        reasons = tuple(self._reason(i) for i in range(len(chosen)))
        chances = tuple(0.1 if r == "audit" else 1.0 for r in reasons)
        yield Chosen(batch, tuple(n.id for n in chosen), reasons, chances)
        for n in chosen:
            job = digest("job", n.id)
            if self.draw.random() < 0.02:
                yield Lost(job, n.id, batch, "the worker was killed by the kernel (SIGKILL)", "lane 1")
            judged = self._judged(best, merits[n.id] - self.scores[best])
            if judged.log2_ratio is not None:
                self.scores[n.id] = self.scores[best] + judged.log2_ratio
            yield Finished(job, n.id, batch, judged)

    def _reason(self, i: int) -> str:
        if not self.forecasts:
            return "unforecast"
        return "audit" if i % 7 == 6 else "uncertain" if i % 4 == 3 else "top"

    def _node(
        self, target: SearchTarget, parents: tuple[str, ...], note: str, arm: str, batch: int, request: str
    ) -> Node:
        words = self.draw.sample(_WORDS, 2)
        source = _SOURCE.format(
            note=note, n=self.draw.randrange(10**9), rows=self.draw.choice((64, 128, 256)), half=words[0]
        )
        if self.line:
            source += f"\n{self.line}\n"
        origin = Origin.LLM if arm.startswith("llm") else Origin.REWRITE if arm else Origin.HAND
        provenance = Provenance(
            origin,
            arm.split("/", maxsplit=1)[0],
            note=f"{words[0]} first, then {words[1]}",
            at="2026-11-20T12:00:00Z",
        )
        return Node(digest(target.id, source), source, "torch", parents, provenance, arm, batch, request)

    def _belief(self, merit: float) -> NodeForecast:
        mean, sd = merit + self.draw.gauss(0.0, 0.12), 0.14
        # A logistic curve is near enough to the normal one for an example.
        p = 0.8 / (1.0 + 2.718 ** (1.7 * mean / sd))
        return NodeForecast(mean, sd, 0.2, p, abstains=self.draw.random() < 0.05)

    def _judged(self, against: str, ratio: float) -> NodeResult:
        if self.draw.random() < self.failing:
            outcome, stage, why = self.draw.choice(_FAILURES)
            return NodeResult(
                outcome,
                against,
                device_seconds=1.5,
                wall_seconds=4.0,
                device=DEVICE,
                stage=stage,
                feedback=why,
            )
        return self._ran(against, ratio + self.draw.gauss(0.0, 0.01), "time")

    def _ran(self, against: str, ratio: float, stage: str) -> NodeResult:
        return NodeResult(
            Outcome.OK,
            against,
            ratio,
            0.012,
            {"2048x5632": 1.9e-3 * 2**ratio, "16x5632": 2.1e-5 * 2**ratio},
            {"BLOCK": self.draw.choice((256, 512, 1024)), "num_warps": 4},
            measurements=12,
            device_seconds=6.0 + self.draw.random(),
            wall_seconds=9.0,
            device=DEVICE,
            stage=stage,
            facts={"registers": self.draw.randrange(32, 128)},
        )


_SOURCE = '''"""SwiGLU, {note}."""
import torch

SEED = {n}
ROWS = {rows}


def run(gate, up):
    out = torch.empty_like(gate)
    for start in range(0, gate.shape[0], ROWS):
        part = slice(start, start + ROWS)
        {half} = gate[part] * torch.sigmoid(gate[part])
        out[part] = {half} * up[part]
    return out
'''
