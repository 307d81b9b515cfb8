"""Language models that know the answer, more or less: to test what surrounds a model without one.

An `OracleBackend` reads the question like any backend, finds the table that it is about, and answers with the true
bins, with errors of a chosen size, or with lies. It is deterministic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.llm.backend import Backend, BackendResponse, LLMError, Usage
from forecast_autotune.llm.bins import BINS, AnswerLabel
from forecast_autotune.llm.calibration import BlendWeight, LLMCalibration, ModelLatency
from forecast_autotune.llm.prompt import ProblemDescription, ReferenceTime, forecast_prompt, shown
from forecast_autotune.records import digest
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.ensemble import EnsembleSurrogate
from forecast_autotune.surrogates.language_model.surrogate import LLMSurrogate
from forecast_autotune.testing import query_of
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.commands.calibrate_llm import _summary_text
from forecast_train.llm.calibration.answers import ModelAnswers, collect_answers
from forecast_train.llm.calibration.fit import (
    fit_calibration,
    isotonic,
)
from forecast_train.llm.calibration.saving import (
    PairedReplay,
    always_ask,
    estimate_saving,
    replay_pairs,
)
from forecast_train.splits import kernel_of
from tests.core.llm.words import thinned

OracleBehaviour = Literal["honest", "liar", "blind"]
"""What is said: the truth with errors; the truth mirrored, so that the fastest sounds slowest; the same
distribution for every candidate."""


class OracleBackend(Backend):
    """A `Backend` with `error` (log2) as the standard deviation of its mistakes, and of what it states."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        error: float = 0.2,
        character: OracleBehaviour = "honest",
        token_s: float = 1e-5,
        seed: int = 0,
    ) -> None:
        self.name = f"oracle:{character}-{error:g}-{seed}"
        self._error, self._character, self._token_s, self._seed = error, character, token_s, seed
        self._known: Mapping[str, dict[str, float]] = {
            _subject(
                forecast_prompt(ProblemDescription(t.problem), ["x"], ReferenceTime(0.0, "x", False)).prefix
            ): {shown(c): math.log2(m.ms) if m.ok else math.nan for c, m in t.by_candidate().items()}
            for t in tables
        }
        self.asked = 0

    def forecast(
        self, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel], *, timeout_s: float
    ) -> BackendResponse:
        """The truth, or what this one makes of it. Raises `LLMError` for a table that it does not know."""
        times = self._known.get(_subject(prefix))
        if times is None:
            raise LLMError("an oracle knows its own tables only")
        self.asked += 1
        configs = [_config(s) for s in suffixes]
        true = np.array([times[c] for c in configs])
        base = times.get(_reference(prefix), math.nan)
        ratio = true - (float(np.nanmin(true)) if math.isnan(base) else base)
        if self._character == "liar":
            low, high = np.nanmin(ratio), np.nanmax(ratio)
            ratio = low + high - ratio
        if self._character == "blind":
            ratio = np.zeros_like(ratio)
        lots = [np.random.default_rng(int(digest(self._seed, prefix, c), 16)) for c in configs]
        noise = np.array([lot.standard_normal() for lot in lots])
        stated = BINS.soft_targets(ratio + self._error * noise, max(self._error, 0.02))
        tokens = (len(prefix) + sum(map(len, suffixes))) // 3
        return BackendResponse(stated, np.ones(len(stated)), Usage(1, tokens, seconds=tokens * self._token_s))


def _subject(prefix: str) -> str:
    """The part of a prefix that says which problem it is about."""
    return prefix.split("\nKernel ", 1)[1].split("\nWork of one launch")[0].split("\n\nReference:")[0]


def _reference(prefix: str) -> str:
    """The config that times are compared with."""
    return prefix.split("\nReference: ", 1)[1].split("\n", 1)[0].rsplit(": ", 1)[0]


def _config(suffix: str) -> str:
    return suffix.split("\n", 1)[0].split(" | ", 1)[0]


KERNELS = ("softmax", "transpose", "layer_norm", "swiglu", "splitk_gemv", "cumsum")


@pytest.fixture(scope="module")
def tables() -> list[Table]:
    """Two problems each of six families."""
    every = load(shipped_tables())
    return [
        thinned(t, slice(None, None, 3))
        for name in KERNELS
        for t in [t for t in every if kernel_of(t.problem) == name][:2]
    ]


def formula(tables: object) -> AnalyticSurrogate:
    """The formula in place of a learned surrogate: nothing has to be fitted."""
    return AnalyticSurrogate()


def heard(tables: list[Table], **options: object) -> list[ModelAnswers]:
    return collect_answers(tables, OracleBackend(tables, **options), learn=formula)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def honest(tables: list[Table]) -> list[ModelAnswers]:
    return heard(tables, error=0.1)


def test_an_honest_model_is_followed_and_the_more_the_less_it_errs(
    tables: list[Table], honest: list[ModelAnswers]
) -> None:
    fine, rough = fit_calibration(honest), fit_calibration(heard(tables, error=1.5))
    assert fine.skilled
    assert fine.weight.mean > 0.7
    sharp, vague = (
        np.mean([c.trust(h.stated, h.mass).mean() for h in hs])
        for c, hs in ((fine, honest), (rough, heard(tables, error=1.5)))
    )
    assert rough.weight.mean * vague < 0.5 * fine.weight.mean * sharp


@pytest.mark.parametrize("character", ["liar", "blind"])
def test_a_model_that_lies_or_knows_nothing_gets_no_weight(tables: list[Table], character: str) -> None:
    """Also not for agreeing with nobody: one that says the same of all would flatten every forecast."""
    result = fit_calibration(heard(tables, character=character))
    assert not result.skilled
    assert result.weight == BlendWeight()


def test_a_model_that_guesses_is_rarely_followed(tables: list[Table]) -> None:
    """On twelve problems chance helps some: as a rule it does not, and on average it weighs little."""
    weights = [
        fit_calibration(heard(tables, character="blind", error=1.0, seed=seed)).weight.mean
        for seed in range(8)
    ]
    assert sum(weight > 0 for weight in weights) <= 3
    assert np.mean(weights) < 0.2


def test_a_correction_never_turns_an_order_around() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal(200), generator.standard_normal(200)
    for target in (y, -x, x):
        curve = isotonic(x, target, np.ones(200))
        assert (np.diff(curve(np.sort(x))) >= -1e-12).all()
    assert np.ptp(isotonic(x, -x, np.ones(200))(x)) < 1e-9
    constant = isotonic(np.full(10, 0.3), np.arange(10.0), np.ones(10))
    assert constant(np.array([0.3])).tolist() == [4.5]


def test_the_summary_tells_weight_counts_gain_and_latency() -> None:
    about = {"problems": 70, "families": ["a", "b"], "log_score": 0.0123}
    calibration = LLMCalibration(
        "m", weight=BlendWeight(0.2, 0.1), saved=0.05, pace=ModelLatency(answer_s=0.034), about=about
    )
    assert _summary_text(calibration, Path("c.json")).splitlines() == [
        "m: weight 0.20 beside the learned surrogate; saves 5% of the measurements",
        "fitted to 70 problems of 2 families; log score gained: 0.0123 nats per candidate",
        "an answer takes 0.034 s (median)",
        "written: c.json",
    ]
    unskilled = _summary_text(replace(calibration, weight=BlendWeight()), Path("c.json"))
    assert unskilled.startswith("m: it knows nothing that the learned surrogate does not")


def test_a_question_is_the_one_that_an_ensemble_asks(tables: list[Table]) -> None:
    table = tables[0]
    asked: list[tuple[str, tuple[str, ...]]] = []

    class Spy(OracleBackend):
        def forecast(self, prefix, suffixes, labels, *, timeout_s):  # type: ignore[no-untyped-def]
            asked.append((prefix, tuple(suffixes)))
            return super().forecast(prefix, suffixes, labels, timeout_s=timeout_s)

    collect_answers([table, *tables[2:4]], spy := Spy(tables), learn=formula)
    cal = LLMCalibration("x", "forecast-2", weight=BlendWeight(0.5, 0.3))
    result = EnsembleSurrogate(
        DefaultSurrogate(AnalyticSurrogate()),
        LLMSurrogate(spy, cal),
        patient=True,
        gate=always_ask,
    )
    result.forecast(query_of(table))
    assert asked[-1] in asked[:3]


def test_answers_are_kept_and_taken_up(tables: list[Table], tmp_path: Path) -> None:
    path, oracle = tmp_path / "answers.jsonl", OracleBackend(tables)
    few = tables[:6:2]
    one = collect_answers(few, oracle, learn=formula, kept=path)
    asked = oracle.asked
    two = collect_answers(few, oracle, learn=formula, kept=path)
    assert oracle.asked == asked == 3
    assert [h.to_json() for h in one] == [h.to_json() for h in two]
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2][:50]]))  # cut off by a kill
    collect_answers(few, oracle, learn=formula, kept=path)
    assert oracle.asked == asked + 1
    assert len({json.loads(s)["asked"] for s in lines}) == 3


def test_a_damaged_answer_is_refused(tables: list[Table], tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"asked": "x", "problem": "y"}\n')
    with pytest.raises(RecordError, match="delete it"):
        collect_answers(tables[:4], OracleBackend(tables), learn=formula, kept=path)


# --- saving ---


def test_savings_are_measurements_to_the_same_regret() -> None:
    rows = [
        PairedReplay("a", 0.0, 0.0, 8, 4),
        PairedReplay("b", 0.01, 0.01, 4, 4),
        PairedReplay("c", 0, 0, 8, 7),
    ]
    result = estimate_saving(rows)
    assert result.saved == result.expected == pytest.approx(1 - 15 / 20)
    assert result.regret == 0.0
    left = np.array([1 - 11 / 12, 1 - 11 / 16, 1 - 8 / 12])
    assert result.error == pytest.approx(math.sqrt(2 / 3 * ((left - left.mean()) ** 2).sum()))


def test_a_good_model_decides_better_and_a_useless_one_costs_nothing(
    tables: list[Table], honest: list[ModelAnswers]
) -> None:
    two = Settings(max_measurements=2)
    # By one seed the difference is smaller than its own error.
    assert (
        estimate_saving(replay_pairs(tables, honest, learn=formula, seeds=(0, 1, 2), settings=two)).regret
        < 0.0
    )
    useless = replay_pairs(
        tables[:6],
        heard(tables[:6], character="blind"),
        learn=formula,
        seeds=(0,),
        calibrated=lambda h: LLMCalibration("x", "forecast-2"),
    )
    for p in useless:
        assert (p.regret, p.needed) == (p.plain_regret, p.plain_needed)


@pytest.mark.slow
@pytest.mark.parametrize("character", ["liar", "blind"])
def test_a_model_that_began_to_lie_after_its_calibration_is_found_out(
    tables: list[Table], honest: list[ModelAnswers], character: str
) -> None:
    """The measurements of a decision refute it: regrets stay those of the learned surrogate, up to noise."""

    def vouched(others: list[ModelAnswers]) -> LLMCalibration:
        return fit_calibration([h for h in honest if h.family in {o.family for o in others}])

    answer = heard(tables, error=0.1, character=character)
    result = estimate_saving(replay_pairs(tables, answer, learn=formula, seeds=(0, 1), calibrated=vouched))  # type: ignore[arg-type]
    assert result.regret <= max(0.005, 2 * result.regret_error)
