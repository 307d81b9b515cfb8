"""An agent that answers in files: what it is shown, what it may answer, and that its answers can be dealt again."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.records import Outcome
from forecast_harness.authors.external import ExternalAuthor
from forecast_harness.authors.file_agent import answer_in_files, readable_request
from forecast_harness.records import NodeResult
from forecast_harness.targets.search_target import open_target
from tests.harness.search.proposal_examples import request

SOURCE = "# one pass\ndef run(x):\n    return x\n"
ASKED: dict[str, Any] = {
    "id": "0001-ask-1",
    "n": 2,
    "target": {"name": "sums", "statement": "Add them."},
    "work": {"host": {"axes": {"M": 4}, "bytes": 64, "flops": 12}},
    "parents": [
        {
            "id": "a",
            "source": SOURCE,
            "language": "torch",
            "note": "plain",
            "judged": {"outcome": "ok", "log2_ratio": -1.0, "seconds": {"host": 2e-6}, "feedback": "Right."},
        }
    ],
    "failures": [],
}


def answered(folder: Path, write: Callable[[Path], object]) -> dict[str, Any]:
    """What comes back once `write` has been given the request's folder."""
    found: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: found.append(answer_in_files(ASKED, folder)))
    asking.start()
    place = folder / "0001"
    while not (place / "request.json").exists():
        asking.join(0.01)
    write(place)
    asking.join(60)
    return found[0]


def test_sources_and_their_remarks_become_an_answer(tmp_path: Path) -> None:
    def write(place: Path) -> None:
        (place / "a.py").write_text(SOURCE)
        (place / "b.cu").write_text("#include <cuda.h>\n")
        (place / "notes.txt").write_text("not a source")
        (place / "done").write_text('{"author": "m", "tokens": 7}')

    answer = answered(tmp_path, write)
    assert answer["tokens"] == 7
    first, second = answer["nodes"]
    assert first == {"source": SOURCE, "note": "one pass", "author": "m", "origin": "llm"}
    assert (second["note"], second["language"]) == ("b", "cuda")
    assert answer_in_files(ASKED, tmp_path) == answer, "what was answered is not asked again"


@pytest.mark.parametrize(
    ("done", "said"),
    [("", "no sources in 0001"), ("{", "must be empty or an object"), ("[1]", "object in JSON, not a list")],
)
def test_answers_that_are_none_say_why(tmp_path: Path, done: str, said: str) -> None:
    answer = answered(tmp_path, lambda place: (place / "done").write_text(done))
    assert said in answer["problem"]


def test_a_stop_ends_what_is_asked_now_and_later(tmp_path: Path) -> None:
    def stop(place: Path) -> None:
        (tmp_path / "stop").touch()

    assert answered(tmp_path, stop)["exhausted"]
    assert answer_in_files({**ASKED, "id": "another"}, tmp_path)["exhausted"]


def test_a_request_can_be_read() -> None:
    text = readable_request(ASKED)
    for said in (
        "up to 2 new sources",
        "Add them.",
        "| host | M=4 | 64 | 12 |",
        "0.500",
        "host: 2 us",
        SOURCE,
    ):
        assert said in text


def test_an_agent_in_a_search_is_told_the_work_and_asked_through_files(tmp_path: Path) -> None:
    target, (seed,) = open_target("embedding_sum", device="cpu")
    proposer = ExternalAuthor(f"{sys.executable} -m forecast_harness.authors.file_agent {tmp_path}", target)
    place = tmp_path / "0001"

    def write() -> None:
        while not (place / "request.json").exists():
            threading.Event().wait(0.02)
        (place / "bag.py").write_text(SOURCE)
        (place / "done").touch()

    writing = threading.Thread(target=write)
    writing.start()
    try:
        told = NodeResult(Outcome.OK, log2_ratio=0.0, seconds={"host": 1e-3})
        found = proposer.propose(request(target, seed, judged={seed.id: told}))
    finally:
        proposer.close()
    writing.join(60)
    assert [n.provenance.note for n in found.nodes] == ["one pass"]
    work = json.loads((place / "request.json").read_text())["work"]
    assert work["host"]["axes"] == {"R": 10000, "D": 64, "B": 512, "L": 16}
