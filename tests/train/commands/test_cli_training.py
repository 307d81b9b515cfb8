"""The commands of the trainer, as a user types them: what they write, what they refuse, what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.commands import main
from forecast_autotune.records.table import write_tables
from forecast_autotune.surrogates.learned import LearnedModel
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.llm.data.examples import read_examples
from forecast_train.llm.runs import write_json


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    """stdout as JSON, or stderr where the command is to fail."""
    result = main([*arguments, "--json"] if status == 0 else list(arguments))
    captured = capsys.readouterr()
    assert result == status, captured.err
    return json.loads(captured.out) if status == 0 else captured.err


@pytest.mark.slow
def test_data_writes_three_sides_and_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, few = tmp_path / "set", tmp_path / "few.jsonl"
    write_tables(few, load(shipped_tables())[::3])  # one problem of each kernel
    asked = [str(few), "--out", str(out), "--moments", "2", "--most", "12"]
    result = said(capsys, "train", "data", *asked)
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md", "test.parquet", "train.parquet", "validation.parquet",
    ]  # fmt: skip
    for side in ("train", "validation", "test"):
        rows = sum(len(e.candidates) for e in read_examples(out / f"{side}.parquet"))
        assert rows == result["sides"][side]["rows"] > 0
    families = [set(result["sides"][side]["families"]) for side in result["sides"]]
    assert not families[0] & families[1] | families[0] & families[2] | families[1] & families[2]
    assert said(capsys, "train", "data", *asked) == result


@pytest.mark.slow
def test_data_takes_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = ["--store", str(tmp_path / "store")]
    said(capsys, "import", *map(str, shipped_tables()), *store)
    out = str(tmp_path / "set")
    asked = ["--from-store", "--out", out, "--moments", "1", "--most", "4", "--guess", "formula", *store]
    result = said(capsys, "train", "data", *asked)
    assert sum(side["problems"] for side in result["sides"].values()) == len(load(shipped_tables()))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--hold-out", "nothing"], "no family is named nothing"),
        (["--from-store"], "too few"),
    ],
)
def test_data_that_cannot_be_made_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    out = tmp_path / "set"
    given = ["train", "data", "--out", str(out), "--store", str(tmp_path / "none"), *arguments]
    assert text in said(capsys, *given, status=2)
    assert not out.exists()


@pytest.mark.parametrize("kind", ["llm", "grpo"])
def test_runs_without_a_file_or_with_a_wrong_one_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = tmp_path / "run.toml"
    assert "no TOML file" in said(capsys, "train", kind, str(path), status=2)
    path.write_text("speed = 3")
    assert "speed is not known" in said(capsys, "train", kind, str(path), status=2)


def test_export_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = said(capsys, "train", "export", str(tmp_path), "--out", str(tmp_path / "out"), status=1)
    assert "no finished run" in message
    run = tmp_path / "run"
    (run / "trained").mkdir(parents=True)
    (run / "trained" / "model.safetensors").write_bytes(b"weights")
    write_json(run / "run.json", {"steps": 1, "settings": {"model": "m"}, "versions": {}, "log": []})
    result = said(capsys, "train", "export", str(run), "--out", str(tmp_path / "out"))
    assert result["files"]["model.safetensors"] == 7


# --- train surrogate ---


Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two problems of each of two families."""
    tables = [t for t in load(shipped_tables()) if t.problem.extra["family"] in ("transpose", "scan")]
    path = tmp_path_factory.mktemp("tables") / "few.jsonl.gz"
    write_tables(path, [t for t in tables if not t.problem.extra["label"].endswith("1000")][:4])
    return str(path)


def test_a_model_is_fitted_and_told_about(few: str, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "mine.npz"
    assert main(["train", "surrogate", few, "--out", str(out), "--trees", "8", "--json"]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert captured.err.startswith("fitting ...\n")
    assert data["path"] == str(out)
    assert data["bytes"] == out.stat().st_size
    assert (data["problems"], data["kernels"]) == (4, 2)
    assert list(data["tools"]) == ["this project"]
    assert len(LearnedModel.load(out).kin.roots) == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "model.txt"], "must end in .npz"),
        (["--out", "no/such/place/model.npz"], "there is no directory"),
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
