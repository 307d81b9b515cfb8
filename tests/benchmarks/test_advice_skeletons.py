"""Skeletons of advice, what their choices are worth, and likelihoods of texts, by a tiny model with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.lib.advice import choices
from benchmarks.lib.advice.cost_orders import (
    FACTORS,
    RecordedTimes,
    choices_of_constants,
    cost_figures,
    deciding_constants,
    order_figures,
    value_text,
)
from benchmarks.lib.advice.skeletons import in_names_of, open_skeleton, shared_names
from benchmarks.lib.continuation_scores import ContinuationScorer
from benchmarks.llm import advice_skeletons
from forecast_autotune.llm.advice.language import parse_cost_function
from forecast_autotune.llm.advice.subject import AdviceError
from forecast_autotune.testing import example_table
from tests.integrations.models import tiny_models

TABLE = example_table((16, 32, 64, 128, 256, 512, 1024), (1, 2, 4, 8))
ADVICE = """
SUMMARY = "a secret of the author"
CONFIDENCE = 0.7

def rounds(programs):
    return programs * constant(3.5, spread=2.0)  # a helper


def cost(config, args, device, launch):
    # a comment
    start = constant(0.25, 1.5, "start of a program")
    lanes = constant(value=24, label="lanes")
    if config.num_warps > lanes:
        return start * 2
    return start * rounds(launch.programs) + config.BLOCK / lanes
"""


def test_a_skeleton_holds_the_structure_and_no_value_of_a_constant() -> None:
    found = open_skeleton(ADVICE)
    text = "?".join(found.parts)
    assert "constant(value=?)" in text
    assert "start = constant(label='start of a program', value=?)" in text
    for hidden in ("3.5", "0.25", "24", "secret", "comment", "1.5", "spread"):
        assert hidden not in text
    assert found.outline.startswith("def cost(")
    assert "    start = constant(?)\n    lanes = constant(?)\n" in found.outline
    assert found.outline.index("def rounds(") > found.outline.index("return start * rounds(")
    before = [found.before(i) for i in range(3)]
    assert before[0].endswith("programs * constant(value=")
    assert before[2].endswith("constant(label='lanes', value=")
    assert before[2].count("?") == 2
    with pytest.raises(AdviceError):
        open_skeleton("import os")


OTHER = """
def cost(config, args, device, launch):
    wide = config.TILE * config.DEPTH * args.source.itemsize
    return 3 + wide + config.num_warps * args.count + args.target.shape[0] + args.TILE
"""


def test_another_kernels_cost_function_reads_what_this_kernel_has() -> None:
    problem = TABLE.problem
    tensors = [a.name for a in problem.arguments if a.kind == "tensor"]
    numbers = [a.name for a in problem.arguments if a.kind != "tensor"]
    text = in_names_of(OTHER, problem, ["BLOCK"])
    assert "config.BLOCK * config.BLOCK * args." + tensors[0] in text
    assert f"args.{tensors[1 % len(tensors)]}.shape[0] + args.BLOCK" in text
    assert f"config.num_warps * args.{numbers[0]}" in text
    times = RecordedTimes.of(TABLE)
    with pytest.raises(AdviceError):
        cost_figures(parse_cost_function(OTHER), [times])
    assert np.isfinite(cost_figures(parse_cost_function(text), [times]).spearman)
    with pytest.raises(AdviceError, match="no meta-parameter that TILE could stand for"):
        in_names_of(OTHER, problem, [])


def test_the_recorded_order_is_perfect_and_ties_are_no_order() -> None:
    times = RecordedTimes.of(TABLE)
    right = order_figures(np.nan_to_num(times.log2_ms, nan=99.0), times)
    assert right.spearman == pytest.approx(1.0)
    assert right.log_regret == 0.0
    wrong = order_figures(-np.nan_to_num(times.log2_ms, nan=-99.0), times)
    assert wrong.spearman == pytest.approx(-1.0)
    assert wrong.log_regret > 0.0
    assert order_figures(np.zeros(times.subject.size), times).spearman == 0.0


def test_constants_that_change_no_order_are_not_asked_for() -> None:
    times = RecordedTimes.of(TABLE)
    function = parse_cost_function(
        "def cost(config, args, device, launch):\n"
        "    whole = constant(5)\n    best = constant(64)\n"
        "    return whole * (1 + abs(log2(config.BLOCK / best)))\n"
    )
    assert deciding_constants(function, times.subject, 3) == [1]
    ways = choices_of_constants(function, [1], [times])
    assert set(ways) == {(i,) for i in range(len(FACTORS))}
    assert ways[(choices.STATED,)] == cost_figures(function, [times])
    assert len({f.spearman for f in ways.values()}) > 1
    assert [value_text(x) for x in (0.0625, 1200.0, 1 / 3, 6.0)] == ["0.0625", "1200", "0.333", "6"]


def test_a_choice_without_a_positive_cost_says_nothing() -> None:
    times = RecordedTimes.of(TABLE)
    function = parse_cost_function(
        "def cost(config, args, device, launch):\n"
        "    return config.BLOCK + 33 - constant(16, label='saved')\n"
    )
    assert deciding_constants(function, times.subject, 3) == [0]
    ways = choices_of_constants(function, [0], [times])
    assert ways[(4,)].spearman == 0.0
    assert ways[(3,)] == ways[(2,)] == cost_figures(function, [times])


def row(name: str, with_it: list[float], alone: list[float], constants: list[list[float]]) -> dict[str, Any]:
    told = {"as written": with_it, "constants": constants}
    zero = {"as written": alone, "constants": [[0.0] * 5 for _ in constants]}
    return {
        "kernel": name,
        "figures": [{"spearman": s, "log_regret": 1.0 - s} for s in (0.8, 0.0, 0.0, 0.0)],
        "constants": [f"c{i}" for i in range(len(constants))],
        "ways": [[[i], 0.1 * i, 0.0] for i in range(5)] if constants else [[[], 0.0, 0.0]],
        "shared names": {"as written": [0.5, 0.1, 0.1, 0.1]},
        "answers": {"likelihood": told, "without the kernel": zero},
    }


def test_a_choice_is_worth_what_the_chosen_one_is() -> None:
    rows = [
        row("a", [-2.0, -1.0, -3.0, -3.0], [-4.0, -1.0, -3.0, -3.0], [[0.0, 1.0, 0.0, 0.0, 0.0]]),
        row("b", [-1.0, -2.0, -3.0, -3.0], [-1.0, -2.0, -3.0, -3.0], [[0.0, 0.0, 1.0, 0.0, 0.0]]),
        row("c", [-1.0, -2.0, -3.0, -3.0], [-9.0, -2.0, -3.0, -3.0], []),
    ]
    found = choices.skeleton_summary(rows, "as written")
    assert found["likelihood"]["own_first"]["value"] == pytest.approx(2 / 3)
    assert found["shared names"]["own_first"]["value"] == 1.0
    assert found["own"]["spearman"] == 0.8
    assert found["random choice"]["spearman"] == pytest.approx(0.2)
    assert found["likelihood"]["spearman"] == pytest.approx(2 / 3 * 0.8, abs=1e-3)
    constants = choices.constant_summary(rows)
    assert constants["kernels"] == constants["constants"] == 2
    assert constants["likelihood"]["chosen"] == [0, 1, 1, 0, 0]
    assert constants["likelihood"]["spearman"] == pytest.approx(0.15)
    assert constants["stated"]["spearman"] == constants["random choice"]["spearman"] == pytest.approx(0.2)
    assert constants["best"]["spearman"] == pytest.approx(0.4)


def test_ties_are_broken_by_lot_and_shares_have_exact_intervals() -> None:
    assert choices.choose([0.0, 2.0, 1.0]) == 1
    assert {choices.choose([1.0, 1.0, 0.0, 1.0], f"k{i}") for i in range(60)} == {0, 1, 3}
    found = choices.share(0, 10)
    assert (found["value"], found["low"]) == (0.0, 0.0)
    assert found["high"] == pytest.approx(1 - 0.025**0.1)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> ContinuationScorer:
    return ContinuationScorer(tiny_models.saved(tmp_path_factory.mktemp("model"), "llama"), device="cpu")


def test_likelihoods_after_a_kept_beginning_are_those_of_whole_texts(scorer: ContinuationScorer) -> None:
    import torch

    texts = [" BLOCK=64", " num_warps=4 BLOCK=128 kernel", "\nx"] * 3
    past = scorer.go_on(scorer.begin("A kernel:\n"), "def f")
    told = scorer.log_likelihoods(past, texts)
    for text, values in zip(texts, told, strict=True):
        own = scorer.tokens.suffixes([text])[0]
        ids = torch.as_tensor(np.concatenate([past.ids, own]))[None]
        with torch.inference_mode():
            logits = scorer.model(input_ids=ids).logits[0].float().log_softmax(-1).numpy()
        expected = [logits[len(past) - 1 + i, token] for i, token in enumerate(own)]
        np.testing.assert_allclose(values, expected, atol=0.02 if scorer.dtype == "bfloat16" else 1e-4)
    cut = scorer.log_likelihoods(past, texts[:2], most_tokens=2)
    assert [len(values) for values in cut] == [2, 2]
    np.testing.assert_allclose(cut[1], told[1][:2], atol=0.02)
    with pytest.raises(ValueError, match="a token at least"):
        scorer.log_likelihoods(past, [""])


@pytest.mark.slow
def test_a_kernel_of_the_corpus_is_asked_and_its_choices_are_summed_up(scorer: ContinuationScorer) -> None:
    kernels = advice_skeletons.advised_kernels(1, 0)
    chosen = advice_skeletons.spread_over_families(kernels, 22, 0)
    assert len({k.family for k in chosen}) == 22
    kernel = min(chosen, key=lambda k: len(k.tables[0].by_candidate()))
    work = advice_skeletons.prepared(kernel, kernels, 0)
    assert work is not None
    choice = work.choice
    assert choice.kernels[0] == kernel.name
    families = {k.name: k.family for k in kernels}
    assert kernel.family not in {families[name] for name in choice.kernels[1:]}
    asking = advice_skeletons.Asking(scorer, prompt=600, tokens=40)
    found = {**work.worth, **advice_skeletons.ask_kernel(asking, work)}
    assert found["tokens"] < 1600
    summary = advice_skeletons.summarised([found, found])
    assert summary["skeletons"]["own names"]["likelihood"]["own_first"]["count"] == 2
    assert summary["constants"]["stated"]["spearman"] == summary["skeletons"]["as written"]["own"]["spearman"]


def test_words_of_the_question_give_the_own_skeleton_away() -> None:
    assert shared_names("config.BLOCK + args.rows", "BLOCK of args in config, rows") == 1.0
    assert shared_names("config.TILE", "config") == 0.5


def test_a_long_source_keeps_its_ends(scorer: ContinuationScorer) -> None:
    source = "\n".join(f"line_{i} = {i}" for i in range(100))
    short = advice_skeletons.shortened(source, scorer, 200)
    assert short.startswith("line_0")
    assert short.endswith("line_99 = 99")
    assert "    # ..." in short
    assert scorer.length(short) < 220
    assert advice_skeletons.shortened("a\nb", scorer, 200) == "a\nb"
