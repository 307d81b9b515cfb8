"""Queries -> questions: what is asked, compared with what, and what a model is shown."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import numpy as np
import pytest

from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.prompt import shown
from forecast_autotune.records import Candidate, Device, Measurement, Outcome, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.questions import (
    MAX_OWN_FAILED,
    MAX_OWN_TIMED,
    MAX_RELATIVE_FAILED,
    MAX_RELATIVE_TIMED,
    MAX_RELATIVES,
    ForecastQuestion,
    build_formula_question,
    build_question,
    select_candidates,
)
from forecast_autotune.surrogates.language_model.surrogate import LLMSurrogate
from forecast_autotune.surrogates.protocol import Query, Relative
from forecast_autotune.testing import query_of
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_integrations.models.factory import backend
from tests.core.llm.words import TABLE


@pytest.fixture(scope="module")
def matmul() -> Table:
    return next(t for t in load(shipped_tables()) if t.problem.kernel.name == "w8a16_matmul")


def asked(query: Query, **options: object) -> ForecastQuestion:
    before = AnalyticSurrogate().prior(query)
    return build_question(query, before, before.mean, **options)  # type: ignore[arg-type]


def known(prefix: str) -> list[str]:
    """The lines of measured results in a prefix."""
    if "\nMeasured, as time" not in prefix:
        return []
    return prefix.split("\nMeasured, as time")[1].split("\nAnswer with")[0].strip().split("\n")[1:]


def test_the_same_question_whatever_the_order_of_the_list(matmul: Table) -> None:
    query = query_of(matmul, 7)
    turned = replace(
        query, candidates=list(reversed(query.candidates)), measured=list(reversed(query.measured))
    )
    one, two = asked(query), asked(turned)
    assert one.prompt.prefix == two.prompt.prefix
    assert one.prompt.suffixes == two.prompt.suffixes[::-1]
    assert (one.against, one.log2_ms) == (two.against, two.log2_ms)


def test_the_reference_is_the_fastest_measured(matmul: Table) -> None:
    query = query_of(matmul, 9)
    best = min((m for m in query.measured if m.ok), key=lambda m: m.ms)
    found = asked(query)
    assert found.measured
    assert found.log2_ms == math.log2(best.ms)
    assert f"Reference: {shown(best.candidate)}: {best.ms:.4g} ms (measured)" in found.prompt.prefix


def test_without_measurements_it_is_the_estimated_best_and_said_to_be_estimated(matmul: Table) -> None:
    query = query_of(matmul)
    before = AnalyticSurrogate().prior(query)
    found = asked(query)
    assert found.reference is not None
    assert not found.measured
    assert before.p_fail[found.reference] < 0.5
    assert found.log2_ms == before.mean[found.reference]
    assert (
        f"{shown(query.candidates[found.reference])}: {2**found.log2_ms:.4g} ms (estimated"
        in found.prompt.prefix
    )


def test_own_results_are_a_handful_from_fast_to_slow_with_failures_among_them() -> None:
    rows = [*TABLE.measurements]
    found = known(asked(replace(query_of(TABLE), measured=rows)).prompt.prefix)
    failed = [line for line in found if line.endswith(f"{BINS.labels[BINS.failure_index].token} (fails)")]
    assert len(failed) == min(MAX_OWN_FAILED, sum(not m.ok for m in rows)) == 1
    times = sorted(m.ms for m in rows if m.ok)
    ratios = [float(line.rsplit("(", 1)[1].rstrip(")")) for line in found if line not in failed]
    assert len(ratios) == MAX_OWN_TIMED
    assert ratios == sorted(ratios)
    assert ratios[-1] == pytest.approx(times[-1] / times[0], abs=0.01)
    assert ratios[0] == pytest.approx(times[1] / times[0], abs=0.01)  # the fastest is the reference itself


def relative(table: Table, size: int, count: int) -> Relative:
    old = table.problem
    arguments = [replace(a, value=size) if a.kind == "scalar" else a for a in old.arguments]
    other = Problem.of(old.kernel, arguments, Device("another GPU"), key=(str(size),))
    return Relative(other, tuple(replace(m, problem=other.id) for m in table.measurements[-count:]))


def test_relatives_are_shown_where_they_come_from_and_few_of_them() -> None:
    others = [relative(TABLE, size, 30) for size in (128, 256, 512)]
    found = known(asked(replace(query_of(TABLE), relatives=others)).prompt.prefix)
    assert len(found) == MAX_RELATIVES * (MAX_RELATIVE_TIMED + MAX_RELATIVE_FAILED)
    assert all(" at n=" in line and " on another GPU, against the fastest there: " in line for line in found)
    assert not any("n=512" in line for line in found), "the nearest relatives come first"
    assert sum("(1.00)" in line for line in found) == MAX_RELATIVES


def test_of_many_candidates_the_most_promising_are_asked_about(matmul: Table) -> None:
    query = query_of(matmul)
    before = AnalyticSurrogate().prior(query)
    rows = select_candidates(before, before.mean, most=20)
    fit = np.flatnonzero(before.p_fail < 0.9)
    assert set(rows) == set(fit[np.argsort(before.mean[fit], kind="stable")[:20]])
    assert list(asked(query, among=rows).rows) == sorted(rows)


def test_candidates_that_cannot_launch_are_not_asked_about(matmul: Table) -> None:
    tiny = replace(matmul.problem.device, shared_memory_bytes=40_000)
    query = replace(query_of(matmul), problem=replace(matmul.problem, device=tiny))
    before = AnalyticSurrogate().prior(query)
    hopeless = set(np.flatnonzero(before.p_fail >= 0.9))
    assert hopeless
    assert not hopeless & set(asked(query).rows)


def test_variants_are_shown_as_changes(matmul: Table) -> None:
    source = matmul.problem.kernel.source
    changed = source.replace("tl.float32", "tl.float16")
    plain = query_of(matmul)
    candidate = Candidate(plain.candidates[0].config, "halved")
    query = replace(plain, candidates=[*plain.candidates, candidate], sources={"halved": changed})
    found = asked(query)
    suffix = found.prompt.suffixes[list(found.rows).index(len(plain.candidates))]
    assert "Changed kernel:" in suffix
    assert "+    acc = tl.zeros((BM, BN), dtype=tl.float16)" in suffix
    assert suffix.rstrip().endswith("Bin:")
    assert "Changed kernel" not in asked(replace(query, sources={})).prompt.suffixes[-1]


def test_true_ratios_are_against_the_true_time_of_an_estimated_reference(matmul: Table) -> None:
    query = query_of(matmul)
    found, truth = asked(query), np.array(matmul.log2_ms())
    ratios = found.ratios(truth)
    place = list(found.rows).index(found.reference)
    assert ratios[place] == 0.0
    shifted = found.ratios(truth + 1.0)  # an error in the level moves no label
    np.testing.assert_allclose(ratios, shifted)
    lost = truth.copy()
    lost[found.reference] = math.nan
    np.testing.assert_allclose(
        found.ratios(lost)[place + 1 :], truth[found.rows][place + 1 :] - found.log2_ms
    )


def test_a_learned_surrogate_changes_guesses_and_no_facts() -> None:
    """The formula's facts are what a model was trained on, whatever was learned beside it since."""
    single = default_surrogate(None).single
    assert isinstance(single, AnalyticSurrogate)
    learned = 0
    for table in load(shipped_tables())[::4]:
        query = query_of(table)
        before, plain = single.prior(query), AnalyticSurrogate().prior(query)
        learned += not np.allclose(before.mean, plain.mean)
        rows = select_candidates(before, before.mean)
        assert build_formula_question(query, among=rows, believed=before.mean).prompt == (
            build_question(query, plain, before.mean, among=rows).prompt
        )
    assert learned > 5


def test_guesses_are_told_in_the_words_of_the_answer(matmul: Table) -> None:
    query = query_of(matmul)
    believed = np.linspace(-4.0, -1.0, len(query.candidates))
    before = AnalyticSurrogate().prior(query)
    before.p_fail[3] = 0.8
    failing = set(np.flatnonzero(before.p_fail > 0.5))
    found = build_question(query, before, believed)
    told = [suffix.split("\n")[-2] for suffix in found.prompt.suffixes]
    level = believed[found.reference]
    for row, line in zip(found.rows, told, strict=True):
        letter = BINS.labels[
            BINS.failure_index if row in failing else int(BINS.index(believed[row] - level))
        ].token
        assert line.startswith(f"Guess: {letter} ("), (row, line)
    assert told[int(np.flatnonzero(found.rows == found.reference)[0])] == "Guess: F (1.00)"


def test_nothing_but_labels_is_shown_of_a_broken_harness() -> None:
    fault = Measurement(TABLE.problem.id, TABLE.measurements[0].candidate, Outcome.INFRASTRUCTURE)
    query = replace(query_of(TABLE), measured=[fault])
    assert asked(query).prompt == asked(query_of(TABLE)).prompt


WEIGHTS = os.environ.get("FORECAST_AUTOTUNE_TEST_WEIGHTS")


@pytest.mark.slow
@pytest.mark.skipif(not WEIGHTS, reason="FORECAST_AUTOTUNE_TEST_WEIGHTS names no folder with a real model")
def test_a_real_model_reads_short_suffixes_and_answers_with_labels(matmul: Table) -> None:
    """Zero-shot it knows little, but it understands that a letter is asked for."""
    from transformers import AutoTokenizer

    query = replace(query_of(matmul), candidates=list(matmul.by_candidate())[:6])
    found = asked(query)
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    for row, suffix in zip(found.rows, found.prompt.suffixes, strict=True):
        facts = len(tokenizer(suffix).input_ids) - len(tokenizer(str(query.candidates[row].config)).input_ids)
        assert facts <= 55
    model = LLMSurrogate(backend(f"transformers:{WEIGHTS}"), timeout_s=600.0)
    view = model.consult(query, AnalyticSurrogate().prior(query))
    np.testing.assert_allclose(view.stated[view.question.rows].sum(axis=1), 1.0, atol=1e-4)
    assert view.usable
    assert view.usage.prompt_tokens > 500
