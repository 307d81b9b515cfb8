"""Answers on disk: found again by content, never from an error, never wrong, never too many."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forecast_autotune.llm.backend import Backend, BackendResponse, LLMError, Usage
from forecast_autotune.llm.bins import BINS, AnswerLabel
from forecast_autotune.store import answer_files
from forecast_integrations.models import cache
from forecast_integrations.models.cache import CachingBackend
from tests.integrations.models.faulty_server import PREFIX, suffixes, truth


@dataclass
class Model(Backend):
    """Answers truly, and remembers what it was asked."""

    name: str = "model"
    change: Callable[[BackendResponse], BackendResponse] = lambda answer: answer
    asked: list[list[str]] = field(default_factory=list)
    fails: bool = False
    weights: str = ""

    def identity(self) -> str:
        return self.weights or self.name

    def forecast(
        self, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel], *, timeout_s: float
    ) -> BackendResponse:
        self.asked.append(list(suffixes))
        if self.fails:
            raise LLMError("the network is down")
        rows = np.array([truth(s, labels) for s in suffixes])
        return self.change(BackendResponse(rows, np.full(len(rows), 0.9), Usage(1, 100)))

    def ready(self) -> bool:
        return False

    def prepare(self) -> None:
        self.asked.append(["prepare"])

    def close(self) -> None:
        self.asked.append(["close"])


def ask(
    it: Backend, asked: Sequence[str], labels: Sequence[AnswerLabel] = BINS.labels, prefix: str = PREFIX
) -> BackendResponse:
    return it.forecast(prefix, asked, labels, timeout_s=1.0)


def files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file())


def test_what_is_known_is_not_asked_again(tmp_path: Path) -> None:
    model = Model()
    asked = suffixes(4)
    first = ask(CachingBackend(model, tmp_path), asked[:3])
    again = ask(CachingBackend(model, tmp_path), [asked[3], asked[1], asked[0], asked[1]])
    assert model.asked == [asked[:3], [asked[3]]]
    assert np.array_equal(again.probabilities, [truth(asked[i]) for i in (3, 1, 0, 1)])
    assert np.array_equal(again.mass, np.full(4, 0.9))
    assert first.usage == again.usage == Usage(1, 100)
    assert ask(CachingBackend(model, tmp_path), asked).usage == Usage()
    assert len(files(tmp_path)) == 1
    model.weights = "trained again"
    ask(CachingBackend(model, tmp_path), asked[:1])
    assert model.asked[2:] == [asked[:1]]


@pytest.mark.parametrize(
    "other",
    [
        {"prefix": PREFIX + "x"},
        {"labels": BINS.labels[:3]},
        {"labels": [AnswerLabel("A", "other"), *BINS.labels[1:]]},
        {"name": "model+adapter"},
        {"salt": "http://elsewhere"},
    ],
)
def test_whatever_an_answer_depends_on_makes_another_question(tmp_path: Path, other: dict[str, Any]) -> None:
    ask(CachingBackend(Model(), tmp_path), suffixes(2))
    model = Model(other.pop("name", "model"))
    it = CachingBackend(model, tmp_path, salt=other.pop("salt", ""))
    ask(it, suffixes(2), **other)
    assert model.asked == [suffixes(2)]


def test_errors_and_missing_rows_are_asked_again(tmp_path: Path) -> None:
    def lose(answer: BackendResponse) -> BackendResponse:
        answer.probabilities[1] = 0.0
        answer.probabilities[2] = np.nan
        answer.probabilities[3] *= 0.9
        return answer

    model = Model(fails=True)
    it = CachingBackend(model, tmp_path)
    with pytest.raises(LLMError, match="down"):
        ask(it, suffixes(5))
    assert files(tmp_path) == []
    model.fails, model.change = False, lose
    ask(it, suffixes(5))
    model.change = lambda answer: answer
    assert ask(it, suffixes(5)).answered.all()
    assert model.asked[-1] == suffixes(5)[1:4]


def test_what_is_known_is_answered_when_the_model_is_not_there(tmp_path: Path) -> None:
    model = Model()
    it = CachingBackend(model, tmp_path)
    ask(it, suffixes(2))
    model.fails = True
    answer = ask(it, suffixes(3))
    assert answer.answered.tolist() == [True, True, False]
    assert answer.trouble == ("the network is down",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"schema": 99, "rows": {}}',
        *(
            json.dumps({"schema": cache.SCHEMA, "rows": {"KEY": row}}).encode()
            for row in (
                None,
                [],
                [[0.25, 0.75]],
                [[0.25], 1.0],
                [[0.5, 0.75], 1.0],
                [[-0.25, 1.25], 1.0],
                [[float("nan"), 1.0], 1.0],
                [[0.25, 0.75], float("inf")],
                [["a", "b"], 1.0],
                [[0.25, 0.75], None],
                {"0": [0.25, 0.75]},
            )
        ),
    ],
)
def test_damaged_files_count_as_absent(tmp_path: Path, content: bytes) -> None:
    model = Model()
    it = CachingBackend(model, tmp_path)
    labels = BINS.labels[:2]
    ask(it, ["s"], labels)
    (path,) = files(tmp_path)
    (key,) = json.loads(path.read_bytes())["rows"]
    path.write_bytes(content.replace(b"KEY", key.encode()))
    assert np.array_equal(ask(it, ["s"], labels).probabilities[0], truth("s", labels))
    assert model.asked == [["s"], ["s"]]
    ask(it, ["s"], labels)
    assert len(model.asked) == 2, "and it is mended"


def test_the_directory_is_bounded_and_the_oldest_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_files, "WRITES_PER_SWEEP", 2)
    it = CachingBackend(Model(), tmp_path, limit_bytes=20_000)
    for i in range(60):
        before = set(files(tmp_path))
        ask(it, suffixes(3), prefix=f"{i}")
        for path in set(files(tmp_path)) - before:
            os.utime(path, (i, i))
    size = sum(p.stat().st_size for p in files(tmp_path))
    assert 5_000 < size < 25_000
    ages = [p.stat().st_mtime for p in files(tmp_path)]
    assert min(ages) > 59 - len(ages) - 1, "the newest are kept"


def test_a_directory_that_cannot_be_written_costs_no_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    it = CachingBackend(Model(), tmp_path / "file" / "below")
    with pytest.warns(UserWarning, match="FORECAST_AUTOTUNE_CACHE_DIR"):
        assert ask(it, suffixes(2)).answered.all()
    assert ask(it, suffixes(2)).answered.all()


def test_threads_do_not_lose_each_others_rows(tmp_path: Path) -> None:
    model = Model()
    it = CachingBackend(model, tmp_path)
    asked = suffixes(40)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda suffix: ask(it, [suffix]), asked))
    ask(it, asked)
    assert sum(map(len, model.asked)) == 40
    assert [p.suffix for p in files(tmp_path)] == [".json"], "no part is left over"
