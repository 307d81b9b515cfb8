"""Forecasts of whole sources: learnt from a search's own results, and moved by a language model's word."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from forecast_autotune.errors import SettingsError
from forecast_autotune.llm.backend import BackendResponse, LLMError, Usage
from forecast_autotune.llm.bins import BINS, AnswerLabel
from forecast_autotune.records import Outcome
from forecast_autotune.records.codec import to_json
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.records import Node, NodeResult, SearchTarget, TargetKind
from forecast_harness.search.events import NodeForecastRequest
from forecast_harness.search.forecasters import (
    LineageForecaster,
    LLMNodeForecaster,
    fit_mixture,
    open_forecaster,
    question_prompt,
)
from forecast_harness.trials.configs.variant_tracing import MAX_TIMINGS, Timing, add_timings, is_known_at
from forecast_harness.trials.race import drift_corrected_seconds

PACK = SearchTarget(
    TargetKind.PACK, "sums", "id", "torch", "run", "Sums of rows.\nRules for a source:\n- none"
)
REWRITES = [f"rewrite_{c}" for c in "abcdefgh"]
FAILING = "rewrite_h"


def source(rewrites: Sequence[str], block: int) -> str:
    steps = "".join(f"    x = {r}(x, BLOCK)\n" for r in rewrites)
    return f"import torch\n\nBLOCK = {block}\n\n\ndef run(x):\n{steps}    return x.sum(1)\n"


SEED = Node("seed", source([], 64), "torch", (), Provenance(Origin.HAND))
Result = tuple[Node, NodeResult, float]


def family(n: int, seed: int = 0) -> list[Result]:
    """A search as it might have gone: rewrites have effects that add up, tile sizes an optimum, one fails."""
    rng = random.Random(seed)
    gain = {name: rng.gauss(0.0, 0.4) for name in REWRITES}
    ran: list[tuple[Node, list[str], int]] = [(SEED, [], 64)]
    found: list[Result] = [(SEED, NodeResult(Outcome.OK, "seed", 0.0, seconds={"a": 1e-3}), 0.0)]
    for number in range(n):
        parent, rewrites, block = rng.choice(ran)
        note = rng.choice([*REWRITES, "tile", "tile"])
        rewrites = rewrites if note == "tile" else [*rewrites, note]
        block = rng.choice([16, 32, 128, 256]) if note == "tile" else block
        score = sum(gain[r] for r in rewrites) + 0.1 * abs(math.log2(block / 128)) - 0.1 + rng.gauss(0, 0.02)
        origin = Provenance(Origin.REWRITE, note=note)
        node = Node(
            f"n{number}", source(rewrites, block), "torch", (parent.id,), origin, arm=f"mechanical/{note}"
        )
        if note == FAILING:
            found.append((node, NodeResult(Outcome.INCORRECT), 0.0))
        else:
            ran.append((node, rewrites, block))
            found.append((node, NodeResult(Outcome.OK, "seed", score, sd=0.02), score))
    return found


def asked(known: Sequence[Result], nodes: Sequence[Node]) -> NodeForecastRequest:
    return NodeForecastRequest(1, SEED, tuple(nodes), tuple(known), PACK)


def split(n: int, seed: int) -> tuple[NodeForecastRequest, list[Result]]:
    """A question after `n` results, and what became of the nodes asked about."""
    rows = family(3 * n, seed)
    known = rows[: n + 1]
    there = {r[0].id for r in known}
    later = [r for r in rows[n + 1 :] if r[0].parents[0] in there]
    return asked(known, [r[0] for r in later]), later


def test_children_are_forecast_better_than_by_their_parents() -> None:
    gained, standard = [], []
    for seed in range(5):
        question, later = split(35, seed)
        found = LineageForecaster().forecast(question)
        ran = [r for r in later if r[1].log2_ratio is not None]
        scores = {n.id: s for n, _, s in question.judged}
        truth = np.array([s for _, _, s in ran])
        mean = np.array([found.beliefs[n.id].mean for n, _, _ in ran])
        parents = np.array([scores[n.parents[0]] for n, _, _ in ran])
        gained.append(float(np.mean((mean - truth) ** 2) / np.mean((parents - truth) ** 2)))
        standard += [
            (t - m) / found.beliefs[n.id].sd for t, m, (n, _, _) in zip(truth, mean, ran, strict=True)
        ]
    assert np.mean(gained) < 0.2
    # Its spreads are neither boasts nor excuses.
    assert 0.75 < np.mean(np.abs(standard) < 1.645) <= 0.99


def test_a_rewrite_that_fails_is_expected_to_fail() -> None:
    failed, ran = [], []
    for seed in range(4):
        question, later = split(40, seed)
        beliefs = LineageForecaster().forecast(question).beliefs
        failed += [beliefs[n.id].p_fail for n, j, _ in later if j.log2_ratio is None]
        ran += [beliefs[n.id].p_fail for n, j, _ in later if j.log2_ratio is not None]
    assert np.mean(failed) > 4 * np.mean(ran)
    assert np.mean(ran) < 0.15


def test_what_rewrites_do_together_is_what_they_do_alone() -> None:
    def by(author: str) -> Node:
        origin = Provenance(Origin.REWRITE, author=author)
        return Node(author, SEED.source, "torch", (SEED.id,), origin, arm="mechanical/single")

    rng = random.Random(0)
    gain = {name: rng.gauss(0.0, 0.4) for name in REWRITES}
    known: list[Result] = [(SEED, NodeResult(Outcome.OK, "seed", 0.0), 0.0)]
    known += [(by(r), NodeResult(Outcome.OK, "seed", gain[r], sd=0.01), gain[r]) for r in REWRITES]
    pairs = [(a, b) for i, a in enumerate(REWRITES) for b in REWRITES[i + 1 :]]
    beliefs = LineageForecaster().forecast(asked(known, [by(f"{a}+{b}") for a, b in pairs])).beliefs
    mean = np.array([beliefs[f"{a}+{b}"].mean for a, b in pairs])
    truth = np.array([gain[a] + gain[b] for a, b in pairs])
    assert np.corrcoef(mean, truth)[0, 1] > 0.9
    assert np.mean((mean - truth) ** 2) < 0.25 * np.mean(truth**2)


def test_scales_that_explain_results_as_well_are_all_believed() -> None:
    ones = {"a": np.eye(2)}
    targets, noise = np.array([0.2, -0.2]), np.full(2, 0.01)
    cross, prior = {"a": np.zeros((1, 2))}, {"a": np.ones(1)}
    narrow, wide, both = (
        fit_mixture(ones, targets, noise, {"a": grid}) for grid in ((0.03,), (0.06,), (0.03, 0.06))
    )
    sd = [float(found.predict(cross, prior)[1][0]) for found in (narrow, both, wide)]
    assert sd == sorted(sd)
    assert sd[0] < sd[1] < sd[2]
    assert sum(weight for weight, _ in both.parts) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="grid"):
        fit_mixture(ones, targets, noise, {"a": ()})


def test_what_the_harness_broke_blames_no_rewrite() -> None:
    question, _ = split(40, 0)
    broken = [
        (n, j if j.log2_ratio is not None else replace(j, outcome=Outcome.INFRASTRUCTURE), s)
        for n, j, s in question.judged
    ]
    assert any(j.outcome is Outcome.INFRASTRUCTURE for _, j, _ in broken)
    beliefs = LineageForecaster().forecast(replace(question, judged=tuple(broken))).beliefs
    assert max(b.p_fail for b in beliefs.values()) < 0.05


def test_what_is_like_nothing_measured_abstains() -> None:
    rows = family(30)
    text = "__global__ void sums(const float* x, float* y) { y[blockIdx.x] = warp_reduce(x); }"
    alien = Node("alien", text, "cuda", (), Provenance(Origin.LLM, author="m"), arm="llm/rewrite")
    kin = rows[-1][0]
    beliefs = LineageForecaster().forecast(asked(rows[:-1], [alien, kin])).beliefs
    assert (beliefs["alien"].abstains, beliefs[kin.id].abstains) == (True, False)
    assert beliefs["alien"].sd > beliefs[kin.id].sd


def test_the_same_question_has_the_same_answer_in_another_process() -> None:
    question, _ = split(20, 3)
    program = (
        "import json, sys; from forecast_autotune.records.codec import from_json, to_json;"
        "from forecast_harness.search.events import NodeForecastRequest;"
        "from forecast_harness.search.forecasters import LineageForecaster;"
        "q = from_json(NodeForecastRequest, json.load(sys.stdin));"
        "print(json.dumps(to_json(LineageForecaster().forecast(q))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(to_json(question)),
        env={"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    there, here = json.loads(done.stdout), to_json(LineageForecaster().forecast(question))
    assert there["beliefs"] == here["beliefs"]


def test_specifications() -> None:
    assert open_forecaster("none", PACK) is None
    assert open_forecaster("auto", PACK).name == LineageForecaster.name
    with pytest.raises(SettingsError, match="there are auto, none"):
        open_forecaster("oracle", PACK)


# --- a language model's word ---


class StubBackend:
    """A backend that puts all probability on one bin per suffix; the tests' stand-in for a model."""

    name = "says"

    def __init__(self, log2_ratio: float, *, mass: float = 1.0, error: Exception | None = None) -> None:
        self._ratio, self._mass, self._error = log2_ratio, mass, error
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    def forecast(
        self, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel], *, timeout_s: float
    ) -> BackendResponse:
        self.asked.append((prefix, tuple(suffixes)))
        if self._error is not None:
            raise self._error
        rows = BINS.soft_targets(np.full(len(suffixes), self._ratio), 0.1)
        usage = Usage(1, prompt_tokens=900, output_tokens=10, seconds=0.5, money=0.01)
        return BackendResponse(rows, np.full(len(suffixes), self._mass), usage)

    def ready(self) -> bool:
        return True

    def prepare(self) -> None: ...

    def close(self) -> None: ...


def test_a_model_moves_beliefs_and_never_makes_them() -> None:
    question, _ = split(30, 4)
    before = LineageForecaster().forecast(question)
    for ratio in (-1.0, 1.0):
        found = LLMNodeForecaster(StubBackend(ratio), LineageForecaster()).forecast(question)
        for node, belief in found.beliefs.items():
            old = before.beliefs[node]
            assert min(old.mean, ratio) - 0.1 <= belief.mean <= max(old.mean, ratio) + 0.1
            assert abs(belief.mean - old.mean) <= abs(belief.mean - ratio)
            assert belief.sd < old.sd
            assert belief.abstains == old.abstains
        assert (found.spent.tokens, found.spent.money) == (910, 0.01)
        assert found.problem == ""


def test_a_model_that_is_out_or_lost_changes_nothing() -> None:
    question, _ = split(30, 4)
    before = LineageForecaster().forecast(question)
    for model, said in (
        (StubBackend(0.0, error=LLMError("no answer within 300 s")), "no answer within"),
        (StubBackend(-1.0, mass=0.01), "too little probability"),
    ):
        found = LLMNodeForecaster(model, LineageForecaster()).forecast(question)
        assert found.beliefs == before.beliefs
        assert said in found.problem


def test_a_model_is_told_of_the_device_that_is_searched_on() -> None:
    question, _ = split(30, 5)
    on_host = question_prompt(question).prefix
    assert "a processor of the host" in on_host
    assert not [w for w in ("GPU kernel", "multiprocessors", "TFLOP/s", "capability") if w in on_host]
    h200 = {"name": "NVIDIA H200", "arch": "90", "multiprocessors": 132}
    target = SearchTarget(TargetKind.PACK, "p", "id", "triton", "run", "", {"device": h200})
    on_device = question_prompt(replace(question, target=target)).prefix
    assert "NVIDIA H200, compute capability 90: 132 multiprocessors" in on_device
    assert "GPU kernel" in on_device


# --- what a lane has timed ---


def test_the_latest_timings_are_remembered() -> None:
    memory: dict[str, Timing] = {}
    for n in range(MAX_TIMINGS + 10):
        add_timings(memory, {f"{n}": [1.0, 2.0], "again": [float(n + 1), 1.0]}, 2)
    assert len(memory) == MAX_TIMINGS
    assert list(memory)[-1] == "again"
    assert memory["again"] == [float(MAX_TIMINGS + 10), 1.0]
    assert "0" not in memory
    add_timings(memory, {"again": Outcome.OUT_OF_RESOURCES}, 2)
    assert list(memory.items())[-1] == ("again", Outcome.OUT_OF_RESOURCES)


def test_a_timing_at_some_calls_says_nothing_of_the_others() -> None:
    memory: dict[str, Timing] = {}
    add_timings(memory, {"a": [math.nan, 1.0], "b": Outcome.RUNTIME_ERROR}, 2)
    assert [[is_known_at(timing, call) for call in range(2)] for timing in memory.values()] == [
        [False, True],
        [True, True],
    ]


def test_times_of_a_race_are_levelled_by_the_rival_that_all_met() -> None:
    # The device was twice as slow while this one ran.
    samples = {(0, "a"): [4.0, 4.0, 9.0], (1, "a"): [2.0, 2.0, 2.0], (0, "b"): [2.0], (1, "b"): [6.0]}
    assert drift_corrected_seconds(samples, {"a": 2.0, "b": 1.0}) == {"a": 1.0, "b": 3.0}
