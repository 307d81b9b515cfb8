"""Proposals of a real child process: the form of what is said, and every way in which it can fail."""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from pathlib import Path

import pytest

from forecast_autotune.errors import SettingsError
from forecast_autotune.records import Outcome
from forecast_autotune.variants.records import Origin
from forecast_harness.authors import open_author
from forecast_harness.authors.external import ExternalAuthor
from forecast_harness.records import NodeResult
from tests.harness.search.proposal_examples import node, plain_target, request
from tests.waiting import is_running

AGENT = Path(__file__).with_name("agent.py")
TARGET = plain_target()
SEED = node(TARGET, "def run(x):\n    return x\n", note="the first")


def command(mode: str, *more: str | Path) -> str:
    return shlex.join([sys.executable, str(AGENT), mode, *map(str, more)])


def opened(mode: str, *more: str | Path, timeout_s: float = 30.0) -> ExternalAuthor:
    return ExternalAuthor(command(mode, *more), TARGET, timeout_s=timeout_s)


def test_answers_become_nodes_with_their_cost(tmp_path: Path) -> None:
    proposer = open_author(f"external:{command('honest', tmp_path / 'starts')}", TARGET)
    try:
        one = proposer.propose(request(TARGET, SEED, n=3, seed=10))
        two = proposer.propose(request(TARGET, SEED, n=3, seed=11, known=one.nodes))
    finally:
        proposer.close()
    assert [n.source for n in one.nodes] == [f"def run(x):\n    return x * {i}\n" for i in (10, 11, 12)]
    first = one.nodes[0]
    assert (first.parents, first.request, first.arm) == ((SEED.id,), one.request, "it/single")
    assert (first.provenance.author, first.provenance.note) == ("agent 7", "times 0")
    assert (one.spent.tokens, one.spent.money) == (11, 0.25)
    assert one.spent.wall_seconds > 0
    assert [n.source[-3:-1] for n in two.nodes] == ["13"], "what is known is left out"
    assert len((tmp_path / "starts").read_text().splitlines()) == 1, "one process for all requests"


def test_the_request_holds_what_an_agent_needs() -> None:
    failed = node(TARGET, "def run(x):\n    return y\n", parents=[SEED])
    told = NodeResult(Outcome.RUNTIME_ERROR, stage="verify", feedback="NameError: y")
    proposer = opened("echo")
    try:
        answer = proposer.propose(
            request(TARGET, SEED, failures=[failed], judged={failed.id: told}, score=-1.5)
        )
    finally:
        proposer.close()
    (echoed,) = answer.nodes
    asked = json.loads(echoed.source)
    assert (asked["type"], asked["schema"], asked["n"], asked["score"]) == ("request", 1, 4, -1.5)
    assert asked["target"] == {
        "kind": "pack",
        "name": "made_up",
        "id": TARGET.id,
        "language": "torch",
        "entry": "run",
        "statement": "Compute it.",
    }
    assert asked["parents"][0] == {
        "id": SEED.id,
        "source": SEED.source,
        "language": "torch",
        "note": "the first",
        "judged": None,
    }
    assert asked["failures"][0]["judged"]["feedback"] == "NameError: y"
    assert (echoed.language, echoed.provenance.origin) == ("cuda", Origin.HAND)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("dies", "it ended without an answer; it said: out of ideas"),
        ("garbage", "an answer that is not JSON: I think that {"),
        ("list", "an answer that is no object"),
        ("other", "it answers 'another', and was asked '0001-single-1'"),
    ],
)
def test_a_child_that_answers_badly_is_started_once_more(mode: str, said: str, tmp_path: Path) -> None:
    proposer = opened(mode, tmp_path / "starts")
    try:
        answer = proposer.propose(request(TARGET, SEED))
    finally:
        proposer.close()
    assert said in answer.problem
    assert (answer.nodes, answer.exhausted) == ((), False)
    pids = (tmp_path / "starts").read_text().split()
    assert len(pids) == 2
    assert not any(is_running(int(p)) for p in pids)


def test_a_second_start_can_succeed(tmp_path: Path) -> None:
    proposer = opened("once", tmp_path / "starts")
    try:
        answer = proposer.propose(request(TARGET, SEED))
    finally:
        proposer.close()
    assert (len(answer.nodes), answer.problem) == (4, "")


def test_silence_ends_in_time(tmp_path: Path) -> None:
    proposer = opened("sleeps", tmp_path / "starts", timeout_s=0.5)
    try:
        answer = proposer.propose(request(TARGET, SEED))
    finally:
        proposer.close()
    assert "no answer within 0.5 s" in answer.problem
    assert not any(is_running(int(p)) for p in (tmp_path / "starts").read_text().split())


def test_what_was_paid_for_is_counted_and_not_bought_again(tmp_path: Path) -> None:
    proposer = opened("sourceless", tmp_path / "starts")
    try:
        answer = proposer.propose(request(TARGET, SEED))
    finally:
        proposer.close()
    assert "every node needs a source" in answer.problem
    assert answer.spent.tokens == 5
    assert len((tmp_path / "starts").read_text().split()) == 1


def test_no_more_ideas_and_own_problems_are_told() -> None:
    for mode, exhausted, said in (
        ("empty", True, "it gave no source"),
        ("problem", False, "no key was given"),
    ):
        proposer = opened(mode)
        try:
            answer = proposer.propose(request(TARGET, SEED))
        finally:
            proposer.close()
        assert (answer.nodes, answer.exhausted, answer.problem) == ((), exhausted, said)


def test_more_than_one_line_is_never_taken_for_the_next_answer() -> None:
    proposer = opened("chatty")
    try:
        answers = [proposer.propose(request(TARGET, SEED, n=1, seed=s)) for s in (5, 9)]
    finally:
        proposer.close()
    assert [a.nodes[0].source[-2] for a in answers] == ["5", "9"]


def test_closing_ends_the_whole_group(tmp_path: Path) -> None:
    proposer = opened("nested", tmp_path / "starts")
    proposer.propose(request(TARGET, SEED))
    pids = [int((tmp_path / "starts").read_text()), int((tmp_path / "starts.child").read_text())]
    assert all(is_running(p) for p in pids)
    proposer.close()
    assert not any(is_running(p) for p in pids)
    assert "closed" in proposer.propose(request(TARGET, SEED)).problem


def test_closing_ends_a_request_under_way(tmp_path: Path) -> None:
    proposer = opened("sleeps", tmp_path / "starts", timeout_s=60.0)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(proposer.propose(request(TARGET, SEED))))
    thread.start()
    while not (tmp_path / "starts").exists():
        time.sleep(0.01)
    proposer.close()
    thread.join(20.0)
    assert not thread.is_alive()
    assert answers[0].nodes == ()
    assert answers[0].problem


def test_commands_that_cannot_be_run_are_told() -> None:
    with pytest.raises(SettingsError, match="no command line"):
        ExternalAuthor("python 'unclosed", TARGET)
    with pytest.raises(SettingsError, match="needs a program that can be run, and '/nowhere/agent' is none"):
        ExternalAuthor("/nowhere/agent --fast", TARGET)


def test_a_program_that_is_gone_when_it_is_asked_is_told(tmp_path: Path) -> None:
    program = tmp_path / "agent"
    program.touch(mode=0o755)
    proposer = ExternalAuthor(str(program), TARGET)
    program.unlink()
    assert "cannot be started" in proposer.propose(request(TARGET, SEED)).problem
