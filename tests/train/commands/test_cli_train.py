"""`train surrogate` and `replay --leave-out`: from tables to a model, and to honest figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.commands import main
from forecast_autotune.records.table import write_tables
from forecast_autotune.surrogates.learned import LearnedModel
from forecast_autotune.tuning.replays.replay import load, shipped_tables

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two problems of each of two families."""
    tables = [t for t in load(shipped_tables()) if t.problem.extra["family"] in ("transpose", "scan")]
    path = tmp_path_factory.mktemp("tables") / "few.jsonl.gz"
    write_tables(path, [t for t in tables if not t.problem.extra["label"].endswith("1000")][:4])
    return str(path)


def printed(capture: Capture) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(capture.readouterr().out)
    return data


def test_a_model_is_fitted_and_told_about(few: str, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "mine.npz"
    assert main(["train", "surrogate", few, "--out", str(out), "--trees", "8", "--json"]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert captured.err == "fitting ...\n"
    assert data["path"] == str(out)
    assert data["bytes"] == out.stat().st_size
    assert (data["problems"], data["kernels"]) == (4, 2)
    assert len(LearnedModel.load(out).kin.roots) == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "model.txt"], "must end in .npz"),
        (["--out", "no/such/place/model.npz"], "in a directory that exists"),
        (["--out", "model.npz", "--trees", "0"], "--trees: must be an integer from 1"),
        ([], "--out"),
    ],
)
def test_wrong_words_are_answered_before_anything_is_fitted(
    words: list[str], said: str, few: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "surrogate", few, *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_replay_with_a_family_left_out_has_replays_keys_and_the_scores(few: str, capsys: Capture) -> None:
    words = ["replay", few, "--leave-out", "family", "--baselines", "random", "--seeds", "1", "--json"]
    assert main(words) == 0
    held_out = printed(capsys)
    assert main(["replay", few, "--json"]) == 0
    plain = printed(capsys)
    assert plain.keys() <= held_out.keys()
    assert plain["summary"].keys() == held_out["summary"].keys()
    assert plain["problems"][0].keys() == held_out["problems"][0].keys()
    assert held_out["summary"]["surrogate"].startswith("learned/")
    assert held_out["leave_out"] == "family"
    assert set(held_out["evaluation"]["methods"]) == {"learned", "random"}
    assert held_out["evaluation"]["folds"].keys() == {"scan", "transpose"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--baselines", "random"], "--baselines belongs to --leave-out"),
        (["--leave-out", "family", "--baselines", "magic"], "--baselines magic: choose from random"),
        (["--leave-out", "family", "--seeds", "0"], "--seeds: must be an integer from 1"),
        (["--leave-out", "device"], "leaving out one device at a time needs two or more"),
        (["--leave-out", "family", "--prior", "tuned"], "leave out --prior"),
    ],
)
def test_wrong_words_of_a_left_out_replay(words: list[str], said: str, few: str, capsys: Capture) -> None:
    assert main(["replay", few, *words]) == 2
    assert said in capsys.readouterr().err
