"""Judgements that were made before a search: read from a file, blended with what the search has learnt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forecast_autotune.errors import SettingsError
from forecast_autotune.records import Outcome
from forecast_autotune.variants.records import (
    Origin,
    Provenance,
    SourceJudgement,
    read_judgements,
    source_digest,
)
from forecast_harness.records import Node, NodeForecast, NodeResult, SearchTarget, TargetKind
from forecast_harness.search.events import NodeForecastRequest
from forecast_harness.search.forecasters import RecordedForecaster, open_forecaster
from forecast_harness.search.lineage import LineageForecaster

PACK = SearchTarget(TargetKind.PACK, "sums", "id", "torch", "run", "Sums of rows.")
SEED = Node("seed", "x.sum(1)", "torch", (), Provenance(Origin.HAND))


def child(name: str) -> Node:
    return Node(name, f"{name}(x)", "torch", ("seed",), Provenance(Origin.REWRITE), arm="mechanical/a")


NODES = tuple(child(f"n{i}") for i in range(6))
JUDGED = {
    source_digest(n.source): SourceJudgement(ratio, 0.1, 0.02)
    for n, ratio in zip(NODES, (-0.3, -0.2, 0.0, 0.2, 0.4), strict=False)
}


def beliefs(*ran: tuple[Node, float], reference: Node = SEED) -> dict[str, NodeForecast]:
    known = [(SEED, NodeResult(Outcome.OK, "seed", 0.0), 0.0)]
    known += [(n, NodeResult(Outcome.OK, "seed", s, sd=0.01), s) for n, s in ran]
    lineage = {n.id: n.parents for n, _, _ in known}
    done = {n.id for n, _ in ran}
    left = tuple(n for n in NODES if n.id not in done)
    asked = NodeForecastRequest(1, reference, left, tuple(known), lineage, PACK)
    return dict(RecordedForecaster(JUDGED, LineageForecaster()).forecast(asked).beliefs)


def test_judgements_say_what_nothing_else_knows() -> None:
    found = beliefs()
    assert [found[n.id].mean for n in NODES[:5]] == [-0.3, -0.2, 0.0, 0.2, 0.4]
    assert not any(found[n.id].abstains for n in NODES[:5])
    assert found["n5"].abstains, "nobody has judged it, and nothing has run"
    assert found["n0"].p_better > 0.8 > 0.1 > found["n4"].p_better
    assert found["n0"].p_fail > 0.02


def test_they_are_relative_to_the_best_so_far() -> None:
    first = NODES[0]
    assert beliefs((first, -0.3), reference=first)["n1"].mean == pytest.approx(0.1, abs=0.01)


def test_results_move_the_others() -> None:
    before, after = beliefs(), beliefs((NODES[0], -0.1), (NODES[2], 0.2))
    assert before["n1"].mean < after["n1"].mean < before["n1"].mean + 0.2


def test_a_file_of_judgements(tmp_path: Path) -> None:
    path = tmp_path / "judged.jsonl"
    rows = [{"source_sha256": key, **vars(said)} for key, said in JUDGED.items()]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert read_judgements(path) == JUDGED
    made = open_forecaster(f"recorded:{path}", PACK)
    assert made is not None
    assert made.name.endswith(f"+{LineageForecaster.name}")
    path.write_text('{"source_sha256": "a", "log2_ratio": 0.1, "sd": 0, "p_wrong": 0.1}\n')
    with pytest.raises(SettingsError, match="line 1: a judgement has"):
        read_judgements(path)
    with pytest.raises(SettingsError, match="give a file of JSON Lines"):
        read_judgements(tmp_path / "none")
