"""Sources of files and of a record: what is asked, and every way in which it can fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from forecast_autotune.records import Outcome
from forecast_autotune.variants.records import Origin
from forecast_harness.authors import open_author
from forecast_harness.authors.author import Author
from forecast_harness.records import NodeResult, ProposalRequest, Proposed
from forecast_harness.targets.search_target import open_target
from tests.harness.authors.proposal_examples import node, pack_target, plain_target, request

TARGET = plain_target()
SEED = node(TARGET, "def run(x):\n    return x\n", note="the first")


# --- files ---

ASKED = request(TARGET, SEED)
SOURCE = "# one pass\ndef run(x):\n    return x + 1\n"


def answered(
    folder: Path,
    write: Callable[[Path], object],
    author: Author | None = None,
    asked: ProposalRequest = ASKED,
    name: str = "0001",
) -> Proposed:
    """What comes back once `write` has been given the request's folder."""
    author = author or open_author(f"files:{folder}", TARGET)
    answers: list[Proposed] = []
    asking = threading.Thread(target=lambda: answers.append(author.propose(asked)))
    asking.start()
    place = folder / name
    while not (place / "request.json").exists():
        asking.join(0.01)
    write(place)
    asking.join(60)
    author.close()
    return answers[0]


def test_files_and_their_remarks_become_an_answer(tmp_path: Path) -> None:
    def write(place: Path) -> None:
        (place / "a.py").write_text(SOURCE)
        (place / "b.cu").write_text("#include <cuda.h>\n")
        (place / "notes.txt").write_text("not a source")
        (place / "done").write_text('{"author": "m", "tokens": 7}')

    answer = answered(tmp_path, write)
    first, second = answer.nodes
    assert (first.source, first.provenance.note, first.provenance.author) == (SOURCE, "one pass", "m")
    assert (first.language, first.provenance.origin) == ("torch", Origin.LLM)
    assert (second.provenance.note, second.language) == ("b.cu", "cuda")
    assert answer.spent.tokens == 7
    again = open_author(f"files:{tmp_path}", TARGET).propose(request(TARGET, SEED))
    assert again.nodes == answer.nodes, "what was answered is not asked again"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_source_that_is_empty_costs_what_was_paid(tmp_path: Path) -> None:
    def write(place: Path) -> None:
        (place / "a.py").write_text("\n")
        (place / "done").write_text('{"tokens": 5}')

    answer = answered(tmp_path, write)
    assert "a source must not be empty: a.py" in answer.problem
    assert answer.spent.tokens == 5


@pytest.mark.parametrize(
    ("done", "said"),
    [("", "no sources in 0001"), ("{", "must be empty or an object"), ("[1]", "object in JSON, not a list")],
)
def test_files_that_are_no_answer_say_why(tmp_path: Path, done: str, said: str) -> None:
    answer = answered(tmp_path, lambda place: (place / "done").write_text(done))
    assert said in answer.problem


def test_closing_ends_the_wait_for_files(tmp_path: Path) -> None:
    author = open_author(f"files:{tmp_path}", TARGET)
    assert "closed" in answered(tmp_path, lambda place: author.close(), author).problem


def test_the_request_holds_what_an_agent_needs_as_json_and_as_text(tmp_path: Path) -> None:
    target, (seed,) = open_target("embedding_sum", device="cpu")
    (tmp_path / "0001").mkdir()
    author = open_author(f"files:{tmp_path}", target)
    failed = node(target, "def run(x):\n    return y\n", parents=[seed])
    told = {
        seed.id: NodeResult(Outcome.OK, log2_ratio=-1.0, seconds={"host": 2e-6}, feedback="Right."),
        failed.id: NodeResult(Outcome.RUNTIME_ERROR, stage="verify", feedback="NameError: y"),
    }
    asked = request(target, seed, failures=[failed], judged=told, score=-1.5)
    answered(tmp_path, lambda place: (tmp_path / "stop").touch(), author, asked, "0002")
    data = json.loads((tmp_path / "0002" / "request.json").read_text())
    assert (data["type"], data["schema"], data["n"], data["score"]) == ("request", 1, 4, -1.5)
    assert data["target"] == {
        "kind": "pack",
        "name": "embedding_sum",
        "id": target.id,
        "language": "torch",
        "entry": "run",
        "statement": target.statement,
    }
    parent = data["parents"][0]
    assert parent.pop("judged")["feedback"] == "Right."
    assert parent == {"id": seed.id, "source": seed.source, "language": "torch", "note": seed.provenance.note}
    assert data["failures"][0]["judged"]["feedback"] == "NameError: y"
    assert data["work"]["host"]["axes"] == {"R": 10000, "D": 64, "B": 512, "L": 16}
    text = (tmp_path / "0002" / "request.md").read_text()
    for said in (
        "embedding_sum: up to 4 new sources",
        "Rules for a source:",
        "| host | R=10000, D=64, B=512, L=16 |",
        "it was timed beside: 0.500",
        "host: 2 us",
        "said: Right.",
        seed.source.strip(),
        failed.source.strip(),
    ):
        assert said in text


# --- a record ---


def numbered(number: int) -> str:
    return f"def run(x):\n    return x + {number}\n"


def folder(path: Path, count: int = 6) -> str:
    for i in range(count):
        (path / f"part{i % 2}").mkdir(exist_ok=True)
        (path / f"part{i % 2}" / f"s{i}.py").write_text(numbered(i))
    (path / "notes.txt").write_text("def run(x): no source")
    (path / "helper.py").write_text("def other(x):\n    return x\n")
    return f"recorded:{path}"


def test_a_folder_is_dealt_until_nothing_is_left(tmp_path: Path) -> None:
    author = open_author(folder(tmp_path), TARGET)
    seed = node(TARGET, numbered(100))
    known, dealt = [seed], []
    for batch in range(3):
        answer = author.propose(request(TARGET, seed, n=2, seed=batch, known=known))
        assert answer.exhausted == (batch == 2)
        assert not answer.problem
        assert all(n.parents == (seed.id,) and n.request == answer.request for n in answer.nodes)
        dealt += answer.nodes
        known += answer.nodes
    assert sorted(n.source for n in dealt) == [numbered(i) for i in range(6)], "all of them, none twice"
    last = author.propose(request(TARGET, seed, known=known))
    assert (last.nodes, last.exhausted) == ((), True)
    assert "known already" in last.problem


def test_a_pack_takes_a_folder_of_solutions(tmp_path: Path) -> None:
    target, seed = pack_target("softmax")
    (tmp_path / "native.py").write_text("import torch\n\n\ndef run(x):\n    return torch.softmax(x, -1)\n")
    (tmp_path / "again.py").write_text(seed.source)
    answer = open_author(f"recorded:{tmp_path}", target).propose(request(target, seed, known=[seed]))
    assert [n.provenance.note for n in answer.nodes] == ["native.py"], "the seed itself is known"
