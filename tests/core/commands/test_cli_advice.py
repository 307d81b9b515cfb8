"""Advice in `explain`, `show`, `doctor`, `clear`, `export` and `import`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.commands import main
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.records import Decision
from forecast_autotune.records.table import write_tables
from forecast_autotune.store import Store
from forecast_autotune.surrogates.advised import AdviceWeights, advised_forecasts
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.testing import query_of
from tests.core.captured_output import Capture, shown
from tests.core.tuning import loop
from tests.core.tuning.loop import TABLE, Bench

pytestmark = pytest.mark.usefixtures("root")
TEXT = """SUMMARY = "middle-sized blocks; spills at 8 warps"
def cost(config, args, device, launch):
    far = abs(log2(config.BLOCK) - 6.4) ** 2
    return exp2(constant(0.3, spread=2.0) * far + term(abs(log2(config.num_warps) - 2) * 0.1, "warps"))
"""
NOISE = """def cost(config, args, device, launch):
    return exp2((log2(config.BLOCK) * 7 + log2(config.num_warps) * 5) % 11)
"""
ELSEWHERE = TEXT.replace("config.BLOCK", "config.TILE")


def decide(store: Store, **settings: Any) -> Decision:
    return loop.decide(store, Bench(TABLE), surrogate=default_surrogate(), **settings)


def advised_store(tmp_path: Path, text: str = TEXT) -> Store:
    store = Store(tmp_path / "store")
    store.put_advice(Advice("example", "0" * 64, text, "writer-1"))
    return store


def test_a_decision_says_what_became_of_the_advice(tmp_path: Path) -> None:
    assert decide(Store(None)).advice == ""
    followed = decide(advised_store(tmp_path))
    assert followed.advice.startswith("advice at weight 0.")
    assert Decision.from_json(followed.to_json()).advice == followed.advice
    other = decide(advised_store(tmp_path / "2", ELSEWHERE))
    assert other.advice.startswith("advice does not apply: line 3: no candidate has config.TILE")


def test_advice_that_the_clock_contradicts_loses_its_weight(tmp_path: Path) -> None:
    right, wrong = (
        decide(advised_store(tmp_path / str(len(t)), t), mode="exhaustive").advice for t in (TEXT, NOISE)
    )
    weights = [
        float(message.rpartition(" ")[2]) if "weight" in message else 0.0 for message in (right, wrong)
    ]
    assert weights[1] < weights[0] / 2, (right, wrong)


def test_advice_without_a_chance_is_dropped() -> None:
    query = replace(query_of(TABLE, 5), advice=Advice("example", "0" * 64, NOISE))
    answer = advised_forecasts(AnalyticSurrogate(), query, AdviceWeights(log_odds=-20.0))
    assert answer.advice == "advice dropped: measurements contradict it"
    assert answer.reason.endswith(answer.advice)
    assert (answer.mean == AnalyticSurrogate().forecast(replace(query, advice=None)).mean).all()


def test_the_setting_off_leaves_it_alone(tmp_path: Path) -> None:
    assert decide(advised_store(tmp_path), advice="off").advice == ""
    assert decide(advised_store(tmp_path / "2"), mode="deterministic").advice == "", "it reads no store"


def test_explain_shows_summary_terms_and_outcome(tmp_path: Path, capsys: Capture) -> None:
    decision = decide(advised_store(tmp_path))
    assert main(["explain", "example", "--json"]) == 0
    (entry,) = shown(capsys)["problems"]
    text = entry["advice"]
    assert text["outcome"] == decision.advice
    assert text["summary"] == "middle-sized blocks; spills at 8 warps"
    assert [t["term"] for t in text["terms"]] == ["cost", "warps"]
    assert text["terms"][0]["chosen"] <= text["terms"][0]["median"]
    (constant,) = text["constants"]
    assert (constant["constant"], constant["stated"]) == ("line 4", 0.3)
    assert 0.1 < constant["fitted"] < 0.25, "0.15 is what the times were made with"
    assert main(["explain", "example"]) == 0
    message = capsys.readouterr().out
    assert "line 4: stated 0.3, by these measurements about 0." in message
    assert "advice (writer-1): middle-sized blocks; spills at 8 warps" in message
    assert decision.advice in message
    assert "warps: " in message


def test_explain_of_advice_that_cannot_be_evaluated(tmp_path: Path, capsys: Capture) -> None:
    decide(Store(tmp_path / "store"))
    advised_store(tmp_path, ELSEWHERE)
    assert main(["explain", "example"]) == 0
    message = capsys.readouterr().out
    assert "it cannot be evaluated here: line 3: no candidate has config.TILE" in message
    assert "not asked about in this decision" in message


def test_show_and_doctor_count_it(tmp_path: Path, capsys: Capture) -> None:
    advised_store(tmp_path).import_tables([TABLE])
    assert main(["show"]) == 0
    assert "advice on 1 kernel source\n" in capsys.readouterr().out
    assert main(["show", "--json"]) == 0
    assert shown(capsys)["advised_sources"] == 1
    main(["doctor", "--json"])
    (row,) = [c for c in shown(capsys)["checks"] if c["name"] == "advice"]
    assert row["detail"] == "on 1 kernel sources, by writer-1"
    (tmp_path / "store" / "advice" / ("1" * 64 + ".json")).write_text("{")
    main(["doctor", "--json"])
    (row,) = [c for c in shown(capsys)["checks"] if c["name"] == "advice"]
    assert row["status"] == "warn"
    assert "1 unreadable" in row["detail"]


def test_it_travels_and_can_be_cleared(tmp_path: Path, capsys: Capture) -> None:
    advised_store(tmp_path).import_tables([TABLE])
    file, other = str(tmp_path / "table.jsonl.gz"), tmp_path / "other"
    assert main(["export", file]) == 0
    assert main(["import", file, "--store", str(other)]) == 0
    assert Store(other).advice("0" * 64) == Store(tmp_path / "store").advice("0" * 64)
    shutil.rmtree(other / "advice")
    assert Store(other).advice("0" * 64) is None
    assert main(["clear", "--advice", "--device", "x", "--yes"]) == 2
    assert main(["clear", "--advice", "--variants", "--yes"]) == 2
    assert main(["clear", "--yes"]) == 0
    assert Store(tmp_path / "store").advice_of(), "measurements go, what was written of sources stays"
    capsys.readouterr()
    assert main(["clear", "--advice", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["advice"] == 1
    assert not Store(tmp_path / "store").advice_of()


def test_a_replay_shows_decisions_with_advice_and_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advice of the table, or of the store; none is followed where it is off."""
    bare, carrying = tmp_path / "bare.jsonl", tmp_path / "carrying.jsonl"
    write_tables(bare, [TABLE])
    advice = Advice(TABLE.problem.kernel.name, TABLE.problem.kernel.source_sha256, TEXT, "writer-1")
    write_tables(carrying, [TABLE.with_extra("advice", advice.to_json())])

    def replayed(*options: str) -> dict[str, Any]:
        assert main(["replay", "--json", "--surrogate", "default", *options]) == 0
        data: dict[str, Any] = json.loads(capsys.readouterr().out)
        return data

    alone = replayed(str(bare))
    assert "without_advice" not in alone
    both = replayed(str(carrying))
    assert both["problems"][0]["advice"].startswith("advice at weight")
    assert [r["chosen"] for r in both["without_advice"]["problems"]] == [
        r["chosen"] for r in alone["problems"]
    ]
    advised_store(tmp_path)
    store = Store(tmp_path / "store")
    store.put_advice(advice)
    assert replayed(str(bare))["problems"][0]["advice"] == both["problems"][0]["advice"]
    assert main(["replay", str(bare)]) == 0
    assert "in 1 of 1 decisions" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setenv("FORECAST_AUTOTUNE_ADVICE", "off")
    assert "without_advice" not in replayed(str(carrying))
