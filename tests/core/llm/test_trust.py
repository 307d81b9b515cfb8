"""FORECAST_AUTOTUNE_LLM_TRUST, and what a decision says of the model that is named, asked or not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from forecast_autotune.commands import main
from forecast_autotune.llm.calibration import BlendWeight, LLMCalibration
from forecast_autotune.llm.gate import GateInputs, decide_asking
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.records import Decision, LLMConsultation
from forecast_autotune.report.summary import ModelTally, summary_line
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.factory import surrogate_for
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.ensemble import (
    DEFAULT_WEIGHT,
    forced_trust,
)
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_integrations.commands.run import RunSummary
from tests.core.captured_output import Capture
from tests.core.llm.words import TABLE, Said, calibrated, ensemble, favours
from tests.core.tuning.loop import Bench, decide

PLAIN = DefaultSurrogate(AnalyticSurrogate())


def test_a_model_that_must_be_asked_is_heard_without_a_calibration_and_that_is_said() -> None:
    answer = Said(favours(64))
    trusted, gate = forced_trust(LLMCalibration("said", FORECAST_VERSION), None)
    surrogate = ensemble(answer, trusted, gate=gate)
    decision = decide(Store(None), Bench(TABLE), table=TABLE, surrogate=surrogate)
    assert len(answer.questions) == 1
    assert "FORECAST_AUTOTUNE_LLM_TRUST=always; not calibrated: default weight 0.5" in decision.reason
    assert decision.llm.asked


def test_what_a_calibration_has_found_stands_where_it_found_anything() -> None:
    trusted, gate = forced_trust(calibrated(0.3, 0.1))
    assert trusted.weight == BlendWeight(0.3, 0.1)
    assert forced_trust(calibrated(0.0))[0].weight == DEFAULT_WEIGHT
    assert trusted.scope.doubts(TABLE.problem, 10**6) != []
    assert not trusted.fitted, "without which no scope is looked at"
    assert gate(GateInputs(3, 16, 0.5, 0.0)).ask, "three candidates, and nothing was ever saved"
    assert not decide_asking(GateInputs(3, 16, 0.5, 0.0)).ask


def test_a_stated_weight_is_the_weight() -> None:
    trusted, gate = forced_trust(calibrated(0.3), 0.8)
    assert trusted.weight == BlendWeight(0.8, 0.8)
    assert "stated" in gate(GateInputs(3, 16, 0.5, 0.0)).reason


def test_never_asks_nobody_and_every_decision_says_so(tmp_path: Path) -> None:
    settings = Settings(llm="http://127.0.0.1:1/v1?model=m", llm_trust="never", cache_dir=tmp_path)
    decision = decide(Store(None), Bench(TABLE), table=TABLE, surrogate=surrogate_for(settings))
    part = LLMConsultation("m at http://127.0.0.1:1/v1", asked=False, why="FORECAST_AUTOTUNE_LLM_TRUST=never")
    assert decision.llm == part
    assert "language model not asked: FORECAST_AUTOTUNE_LLM_TRUST=never" in decision.reason


def test_the_model_stays_with_the_decision_and_old_decisions_have_none() -> None:
    store = Store(None)
    decision = decide(store, Bench(TABLE), table=TABLE, surrogate=ensemble(Said(favours(64))))
    assert Decision.from_json(decision.to_json()) == decision
    plain = decide(Store(None), Bench(TABLE), table=TABLE, surrogate=PLAIN)
    assert plain.llm is None
    assert "llm" not in plain.to_json()
    assert Decision.from_json(plain.to_json()) == plain


def test_summaries_say_what_the_model_did() -> None:
    asked = decide(Store(None), Bench(TABLE), table=TABLE, surrogate=ensemble(Said(favours(64))))
    assert "language model said asked (always): moved" in summary_line("k", asked)
    tally = ModelTally()
    assert tally.line() == ""
    tally.add(None)
    assert tally.line() == ""
    for part in (
        LLMConsultation("m", seconds=0.5, moved_in=3, moved_out=2),
        LLMConsultation("m", seconds=0.3, moved_in=1),
        LLMConsultation("m", trouble="no answer within 1 s"),
        LLMConsultation("m", asked=False, why="few candidates"),
        LLMConsultation("m", asked=False, why="few candidates"),
    ):
        tally.add(part)
    assert tally.line() == (
        "language model: asked in 3 of 5 decisions, moved 4 candidates into and 2 out of the plans, 0.8 s; "
        "not heard: no answer within 1 s; not asked: few candidates (2x)"
    )


def decided(root: Path, surrogate: Surrogate) -> Decision:
    return decide(Store(root), Bench(TABLE), table=TABLE, surrogate=surrogate)


def test_explain_tells_the_models_part(root: Path, capsys: Capture) -> None:
    decision = decided(root, ensemble(Said(favours(64))))
    assert main(["explain", TABLE.problem.kernel.name]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "language model language model said asked" not in shown
    assert f"said asked (always): {decision.llm.effect or 'moved nothing'}" in shown
    assert main(["explain", TABLE.problem.kernel.name, "--json"]) == 0
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["decision"]["llm"]["asked"] is True


def test_a_stored_decision_says_that_it_was_made_before(root: Path) -> None:
    """Whatever a model said then: nobody is asked now."""
    first = decided(root, ensemble(Said(favours(64))))
    again = decide(
        Store(root), Bench(TABLE), table=TABLE, surrogate=PLAIN, llm="http://127.0.0.1:9/v1?model=m"
    )
    assert (again.evidence, again.chosen) == ("stored", first.chosen)
    part = LLMConsultation("m at http://127.0.0.1:9/v1", asked=False, why="it was decided before")
    assert again.llm == part
    assert "nothing timed; language model m at http://127.0.0.1:9/v1 not asked" in summary_line("k", again)
    assert decide(Store(root), Bench(TABLE), table=TABLE, surrogate=PLAIN).llm is None


def test_the_end_of_a_run_sums_up_what_the_model_did(root: Path) -> None:
    tally, plain = RunSummary(), decided(root, PLAIN)
    tally.add_decision("k", plain)
    assert "language model" not in tally.line()
    assert "llm" not in tally.to_json()
    for part in (LLMConsultation("m", moved_in=3), LLMConsultation("m", asked=False, why="nobody wants it")):
        tally.add_decision("k", replace(plain, llm=part))
    assert "; language model: asked in 1 of 2 decisions, moved" in tally.line()
    assert tally.line().endswith("; not asked: nobody wants it")
    assert tally.to_json()["llm"]["not_asked"] == {"nobody wants it": 1}
