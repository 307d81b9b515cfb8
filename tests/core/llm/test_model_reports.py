"""Whoever names a model hears what it did: `explain`, `show --calibration`, and the end of `run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forecast_autotune.commands import main
from forecast_autotune.records import Decision, LLMConsultation
from forecast_autotune.report.summary import summary_line
from forecast_autotune.store import Store
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.ensemble import UnaskedModelSurrogate
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_integrations.commands.run import RunSummary
from tests.core.llm.words import TABLE, Said, ensemble, favours
from tests.core.tuning.loop import Bench, decide

PLAIN = DefaultSurrogate(AnalyticSurrogate())
UNASKED = UnaskedModelSurrogate(PLAIN, "said", "nobody wants it")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path))
    return tmp_path


def decided(root: Path, surrogate: Surrogate) -> Decision:
    return decide(Store(root), Bench(TABLE), table=TABLE, surrogate=surrogate)


def test_explain_tells_the_models_part(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decision = decided(root, ensemble(Said(favours(64))))
    assert main(["explain", TABLE.problem.kernel.name]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "language model language model said asked" not in shown
    assert decision.llm is not None
    assert f"said asked (always): {decision.llm.effect or 'moved nothing'}" in shown
    assert main(["explain", TABLE.problem.kernel.name, "--json"]) == 0
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["decision"]["llm"]["asked"] is True


def test_explain_tells_why_a_model_was_not_asked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decided(root, UNASKED)
    assert main(["explain", TABLE.problem.kernel.name]) == 0
    assert "not asked: nobody wants it" in " ".join(capsys.readouterr().out.split())


def test_a_calibration_has_a_section_on_the_model(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that is wrong about the sizes is further from the measurements than one that says nothing."""
    decision = decided(root, ensemble(Said(favours(1024))))
    assert main(["show", "--calibration", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["language_models"]
    assert decision.llm is not None
    assert (record["model"], record["decisions"], record["asked"]) == ("said", 1, 1)
    assert (record["moved_in"], record["moved_out"]) == (decision.llm.moved_in, decision.llm.moved_out)
    assert record["forecasts"] > 3
    assert 0.0 <= record["learned_error"] < record["error"]
    assert main(["show", "--calibration"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "language model said: asked in 1 of 1 decision, moved" in shown
    assert f"its forecasts of {record['forecasts']} measured candidates were off by" in shown


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
    tally = RunSummary()
    tally.add_decision("k", decided(root, PLAIN))
    assert "language model" not in tally.line()
    assert "llm" not in tally.to_json()
    tally = RunSummary()
    tally.add_decision("k", decided(root / "a", ensemble(Said(favours(64)))))
    tally.add_decision("k", decided(root / "b", UNASKED))
    assert "; language model: asked in 1 of 2 decisions, moved" in tally.line()
    assert tally.line().endswith("; not asked: nobody wants it")
    assert tally.to_json()["llm"]["not_asked"] == {"nobody wants it": 1}
