"""`llm ask`: the questions of decisions go out, answers come back, and the same decisions hear them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.commands import main
from forecast_autotune.llm.open_question import OpenQuestion, question_key
from forecast_autotune.records.table import Table, write_tables
from forecast_autotune.store import Store
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_integrations.commands.llm import KINDS, questions_of
from forecast_integrations.models.recorded import RecordedAnswers, read_questions
from tests.core.llm.words import thinned


@pytest.fixture(scope="module")
def few() -> list[Table]:
    """One problem each of three families."""
    every = load(shipped_tables())
    names = ("softmax", "transpose", "swiglu")
    return [
        thinned(next(t for t in every if str(t.problem.extra["label"]).startswith(n)), slice(24))
        for n in names
    ]


@pytest.fixture
def tables(tmp_path: Path, few: list[Table]) -> str:
    path = tmp_path / "tables.jsonl"
    write_tables(path, few)
    return str(path)


Run = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """A command's status, what it prints as JSON, and its errors."""

    def command(*arguments: object) -> tuple[int, dict[str, Any], str]:
        status = main([*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        return status, json.loads(out) if out.strip() else {}, err

    return command


def replies(questions: Path, path: Path, *more: dict[str, Any]) -> Path:
    """An answer to every question: candidates are slower, the later they are listed."""
    lines = []
    for q in read_questions(questions).values():
        slowdown = [0.05 * i for i in range(len(q.suffixes))]
        lines.append({"type": "answer", "key": q.key, "log2_slowdown": slowdown, "sd": 0.3})
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *more]))
    return path


WHO = ("--model", "m-1", "--author", "a", "--how", "by hand", "--blind")


@pytest.mark.parametrize("surrogate", ["analytic", "default"])
def test_a_replay_hears_the_answers_to_the_questions_that_were_exported(
    run: Run, surrogate: str, tables: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From questions to decisions, by files only; and a replay says what they changed."""
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl.gz"
    status, found, _ = run("llm", "ask", "--export", questions, tables, "--surrogate", surrogate)
    assert (status, found["questions"]) == (0, 3)
    got = replies(questions, tmp_path / "got.jsonl")
    status, found, _ = run("llm", "ask", "--import", got, "--questions", questions, "--to", answers, *WHO)
    assert (status, found["taken"], found["refused"]) == (0, 3, [])
    provenance = dict(RecordedAnswers.read(str(answers)).provenance)
    assert date.fromisoformat(provenance.pop("date"))
    assert provenance == {"author": "a", "how": "by hand", "blind": True}

    command = ("replay", tables, "--surrogate", surrogate, "--llm", f"recorded:{answers}?weight=0.5")
    status, told, _ = run(*command)
    assert status == 0
    parts = [row["llm"] for row in told["problems"]]
    assert all(p["asked"] and not p["trouble"] and p["model"] == "recorded:m-1" for p in parts), parts
    tally = told["language_model"]
    assert (tally["decisions"], tally["asked"], tally["not_asked"]) == (3, 3, {})
    assert tally["moved_in"] == sum(p["moved_in"] for p in parts) > 0
    alone = run("replay", tables, "--surrogate", surrogate)[1]
    for with_it, one in zip(told["without_llm"]["problems"], alone["problems"], strict=True):
        assert (with_it["chosen"], with_it["measured"]) == (one["chosen"], one["measured"])

    monkeypatch.setenv("FORECAST_AUTOTUNE_LLM_TRUST", "never")
    never = run(*command)[1]
    assert never["language_model"]["not_asked"] == {"FORECAST_AUTOTUNE_LLM_TRUST=never": 3}
    assert [r["chosen"] for r in never["problems"]] == [r["chosen"] for r in alone["problems"]]


def test_a_replay_shows_people_both_rows(
    tables: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = tmp_path / "answers.jsonl"
    RecordedAnswers("m-1", {"author": "a"}).write(answers)
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path))
    assert main(["replay", tables, "--llm", f"recorded:{answers}"]) == 0
    out, err = capsys.readouterr()
    assert "until then it is not asked" in err
    shown = " ".join(out.split())
    assert "without it" in shown
    assert "asked in 0 of 3 decisions" in shown
    assert "not calibrated" in shown


def test_answers_that_are_none_are_refused_one_by_one(
    run: Run, tables: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    run("llm", "ask", "--export", questions, tables, "--surrogate", "analytic")
    key, q = next(iter(read_questions(questions).items()))
    n = len(q.suffixes)
    bad = (
        {"type": "answer", "key": "0" * 64, "log2_slowdown": [0.0], "sd": 1},
        {"type": "answer", "key": key, "log2_slowdown": [0.0] * (n - 1), "sd": 1},
        {"type": "answer", "key": key, "text": "fast"},
        {"type": "answer", "key": key, "probabilities": [[0.5, 0.5]] * n},
        {"type": "answer", "key": key, "log2_slowdown": [1e400] * n, "sd": 1},
    )
    got = replies(questions, tmp_path / "got.jsonl", *bad)
    command = ("llm", "ask", "--import", got, "--questions", questions, "--to", answers, *WHO)
    status, found, _ = run(*command)
    assert (status, found["taken"]) == (1, 3)
    assert [r["line"] for r in found["refused"]] == [4, 5, 6, 7, 8]
    whys = [r["why"] for r in found["refused"]]
    for why, part in zip(
        whys, ("no question", f"{n - 1} suffixes", "numbers", "16 numbers", ""), strict=True
    ):
        assert part in why
    assert main([*map(str, command)]) == 1
    assert "line 5" in capsys.readouterr().out
    assert len(RecordedAnswers.read(str(answers)).answers) == 3, "good ones are kept all the same"


def test_what_is_answered_is_no_open_question(run: Run, tables: str, tmp_path: Path) -> None:
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    export = ("llm", "ask", "--export", questions, tables, "--surrogate", "analytic", "--to", answers)
    assert run(*export)[1]["questions"] == 3, "no file is no answer"
    got = replies(questions, tmp_path / "got.jsonl")
    got.write_text("".join(got.read_text().splitlines(keepends=True)[:2]))
    run("llm", "ask", "--import", got, "--to", answers, *WHO)
    assert run(*export)[1]["questions"] == 1
    got = replies(questions, tmp_path / "got.jsonl")
    run("llm", "ask", "--import", got, "--to", answers, *WHO)
    assert run(*export)[1]["questions"] == 0
    assert len(RecordedAnswers.read(str(answers)).answers) == 3


def test_a_file_holds_one_model_and_one_provenance(run: Run, tables: str, tmp_path: Path) -> None:
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    run("llm", "ask", "--export", questions, tables, "--surrogate", "analytic")
    got = replies(questions, tmp_path / "got.jsonl")
    run("llm", "ask", "--import", got, "--to", answers, *WHO)
    before = answers.read_bytes()
    for changed in (("--model", "m-2"), ("--author", "b"), ("--how", "otherwise")):
        status, _, err = run("llm", "ask", "--import", got, "--to", answers, *WHO, *changed)
        assert status != 0
        assert "give another file" in err
    assert answers.read_bytes() == before


def test_a_store_that_was_measured_exhaustively_can_be_asked_about(
    run: Run, few: list[Table], tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    for m in few[0].measurements:
        store.add(few[0].problem, m)
    store.sync()
    questions = tmp_path / "q.jsonl"
    command = ("llm", "ask", "--export", questions, "--store", tmp_path / "store")
    status, found, _ = run(*command)
    assert (status, found["questions"]) == (0, 1)
    (question,) = read_questions(questions).values()
    assert question.kernel == few[0].problem.kernel.name
    assert len(question.suffixes) <= len(few[0].measurements)


def test_the_questions_of_a_calibration_can_be_answered_offline(
    run: Run, tables: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "cache"))
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    export = ("llm", "ask", "--export", questions, tables, "--kind", "calibration")
    assert run(*export)[1]["questions"] == 3
    got = replies(questions, tmp_path / "got.jsonl")
    run("llm", "ask", "--import", got, "--questions", questions, "--to", answers, *WHO)
    status, found, err = run("train", "calibrate-llm", tables, "--llm", f"recorded:{answers}", "--seeds", 1)
    assert status == 0, err
    assert found["model"] == "recorded:m-1"
    assert found["about"]["problems"] == 3
    assert 0.0 <= found["weight"]["mean"] <= 1.0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--export", "q.txt"], ".jsonl"),
        (["--export", "/no/such/q.jsonl"], "there is no directory"),
        (["--export", "q.jsonl", "--kind", "riddle"], "choose from advice, calibration, forecast"),
        (["--import", "a.jsonl", "--model", "m"], "--author and --to"),
        (["--import", "a.jsonl", "--export", "q.jsonl"], "not allowed with"),
        ([], "--export"),
    ],
)
def test_mistakes_are_refused(
    arguments: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["llm", "ask", *arguments]) == 2
    assert complaint in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_other_kinds_have_their_place(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind is a function from the command's options to questions, with suffixes or without."""
    monkeypatch.setitem(KINDS, "riddle", lambda options: iter([OpenQuestion("riddle", "r-1", "k", "what?")]))
    questions, answers = tmp_path / "q.jsonl", tmp_path / "a.jsonl"
    assert run("llm", "ask", "--export", questions, "--kind", "riddle")[1]["questions"] == 1
    got = tmp_path / "got.jsonl"
    got.write_text(json.dumps({"key": question_key("r-1", "what?"), "text": "a kernel"}) + "\n")
    command = ("llm", "ask", "--import", got, "--questions", questions, "--to", answers, *WHO)
    assert run(*command)[0] == 0
    (kept,) = RecordedAnswers.read(str(answers)).answers.values()
    assert (kept.text, kept.version, kept.kernel) == ("a kernel", "r-1", "k")
    assert questions_of("calibration").__name__ == "calibration_questions"
