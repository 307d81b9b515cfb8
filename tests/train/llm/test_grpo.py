"""Replies of models that speak: what is read from them, what is refused, what they earn."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecast_autotune.errors import SettingsError
from forecast_autotune.llm.bins import BINS
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.llm.data.build import ExampleSettings, build_examples
from forecast_train.llm.grpo import (
    REGRET_REWARD,
    REWARDS,
    GrpoRun,
    StatedDistribution,
    _trainer_arguments,
    brier,
    crps,
    forecast_messages,
    parse_distribution,
    parse_reward,
    reward_function,
    rollout_prompts,
)
from forecast_train.llm.runs import LoraSettings
from forecast_train.splits import family_of

F = [label.token for label in BINS.labels].index("F")
GOOD = '{"label": "F", "distribution": {"E": 0.2, "F": 0.6, "G": 0.2}}'
EXAMPLES = build_examples(
    [t for t in load(shipped_tables()) if family_of(t.problem) == "gemv"], ExampleSettings(moments=3, most=10)
)


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"Sure!\n```json\n{GOOD}\n```\nGood luck.",
        f"<think>It may be A, or {{B}}.</think>\n{GOOD}",
        f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{GOOD}<|return|>",
        '{"label": "f", "distribution": {"E": 20, "F": 60, "G": 20}}',
        '{"label": "F", "distribution": {"E": 0.22, "F": 0.66, "G": 0.22}}',
    ],
)
def test_forms_that_mean_the_same_are_read_the_same(text: str) -> None:
    result = parse_distribution(text)
    assert result.predicted == F
    assert [round(p, 6) for p in result.probabilities[F - 1 : F + 2]] == [0.2, 0.6, 0.2]
    assert math.fsum(result.probabilities) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F",
        "I would say F.",
        GOOD[:-9],
        '{"label": "F"}',
        '{"label": "Z", "distribution": {"F": 1.0}}',
        '{"label": "F", "distribution": {"F": 0.1}}',
        '{"label": "F", "distribution": {"F": -1.0, "E": 2.0}}',
        '{"label": "F", "distribution": {"F": NaN}}',
        '{"label": "F", "distribution": {"F": "much"}}',
        '{"label": "F", "distribution": [0.2, 0.8]}',
        f"<|channel|>analysis<|message|>{GOOD}<|end|>",  # gpt-oss: thought, never said
    ],
)
def test_what_cannot_be_read_earns_nothing(text: str) -> None:
    assert parse_distribution(text) is None
    for reward in ("correctness", "correctness_brier", "correctness_crps"):
        assert reward_function(reward)([text], [F], [[]]) == [0.0]
    assert parse_reward([text, [], [{"role": "assistant"}]], [[]] * 3) == [0.0] * 3


DEGENERATE = [
    "[" * 500,
    '{"a":' * 100_000,
    f'{{"label": "F", "distribution": {{"F": 1{"0" * 310}}}}}',
    f'{{"label": "F", "distribution": {{"F": {"9" * 5000}}}}}',
    '{"label": ' + "[" * 900 + "]" * 900 + ', "distribution": {"F": 1.0}}',
    '{"fastest": 1' + "0" * 4000 + "}",
    "```json" + " " * 200_000,
    "\ud800",
]


def test_rewards_are_total_and_finite_for_whatever_is_replied() -> None:
    """Good replies, cut, doubled, shuffled and spliced with each other and with what JSON can hold at its worst."""
    lots = np.random.default_rng(0)
    seeds = [
        *(GOOD, '{"fastest": 2}', "<think>", "</think>", "```json\n", "```", "9" * 400, "\\u0000"),
        *(text[:2000] for text in DEGENERATE),
        *("1e999", "-0.0", "NaN", "Infinity", "null", "true", *'"{}[]:,'),
        *("<|channel|>final<|message|>", "<|end|>", '"label": 3', '"distribution": [["F", 1]]'),
        "\N{KELVIN SIGN}",
    ]
    for _ in range(2_000):
        parts = [seeds[i] for i in lots.integers(0, len(seeds), lots.integers(1, 5))]
        text = "".join(
            part[: lots.integers(0, len(part) + 1)] if lots.random() < 0.4 else part for part in parts
        )
        for reward in (*REWARDS, REGRET_REWARD):
            (earned,) = reward_function(reward)([text], [F], [[0.0, None, 1.5]])
            assert math.isfinite(earned)
            assert 0.0 <= earned <= 2.0


def test_rewards_keep_their_scale(tmp_path: Path) -> None:
    """Divided by a group's spread, they teach overconfidence: the table of the page on training."""
    assert _trainer_arguments(GrpoRun("m", "d", str(tmp_path)), tmp_path).scale_rewards == "none"


def test_dropout_is_refused_where_replies_are_drawn() -> None:
    with pytest.raises(SettingsError, match=r"lora\.dropout must be 0"):
        GrpoRun("m", "d", "o", lora=LoraSettings(dropout=0.1))


def test_prompts_ask_what_is_judged() -> None:
    run = GrpoRun("m", "d", "o", seed=5)
    rows = rollout_prompts(EXAMPLES, run)
    assert len(rows) == sum(len(e.candidates) for e in EXAMPLES)
    labels = {m["prompt"][0]["content"]: m["truth"] for m in rows}
    for e in EXAMPLES:
        for a in e.candidates:
            assert labels[forecast_messages(e, a)[0]["content"]] == a.label
    assert [r["truth"] for r in rollout_prompts(EXAMPLES, run)] == [r["truth"] for r in rows]
    stored = [a.label for e in EXAMPLES for a in e.candidates]
    assert [r["truth"] for r in rows] != stored  # shuffled: a short run sees every kernel


UNIFORM = StatedDistribution((0.125,) * 8, 3)
SURE = StatedDistribution((0, 0, 0, 1.0, 0, 0, 0, 0), 3)
NEAR = StatedDistribution((0, 0, 0.25, 0.5, 0.25, 0, 0, 0), 2)


@pytest.mark.parametrize(
    ("stated", "truth", "expected"),
    [
        # (correctness, + 1 - Brier, + 1 - CRPS)
        (SURE, 3, (1.0, 2.0, 2.0)),
        # Brier: half of 1 + 1; CRPS: the cumulative is off on 3, 4, 5 and 6 of 7.
        (SURE, 7, (0.0, 0.0, 1 - 4 / 7)),
        # The paper's uniform forecast has Brier 0.4375.
        (UNIFORM, 3, (1.0, 2 - 0.4375, 2 - sum([1, 4, 9, 16, 9, 4, 1]) / 64 / 7)),
        # Named bin 2 is not the most probable: only the name counts as correct.
        (NEAR, 2, (1.0, 2 - 0.5 * (0.75**2 + 0.5**2 + 0.25**2), 2 - (0.75**2 + 0.25**2) / 7)),
        (NEAR, 3, (0.0, 1 - 0.5 * (0.25**2 + 0.5**2 + 0.25**2), 1 - (0.25**2 + 0.25**2) / 7)),
        (None, 3, (0.0, 0.0, 0.0)),
    ],
)
def test_rewards_are_the_papers(
    stated: StatedDistribution | None, truth: int, expected: tuple[float, ...]
) -> None:
    assert [reward(stated, truth) for reward in REWARDS.values()] == pytest.approx(expected)


@given(st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4), st.lists(st.floats(0.01, 1.0), min_size=4))
def test_shaped_rewards_are_proper(belief: list[float], other: list[float]) -> None:
    """Whoever states what they believe expects at least as much as whoever states something else."""
    p, q = np.array(belief) / sum(belief), np.array(other[:4]) / sum(other[:4])
    for score in (brier, crps):
        honest, dishonest = (sum(p[k] * score(stated, k) for k in range(4)) for stated in (p, q))
        assert honest <= dishonest + 1e-12
