"""The benchmark of searches with a local model: what it starts, what it reads off logs, and how it stops."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from benchmarks.lib import model_server
from benchmarks.lib.search import llm_search_runs
from benchmarks.lib.search.llm_search_runs import (
    RunningSearch,
    SearchRun,
    command,
    covered_seconds,
    has_ended,
    read_run,
    run_row,
    run_searches,
)
from benchmarks.search import llm_written_sources
from benchmarks.search.llm_written_sources import contest_summary, retime_best, summary
from forecast_autotune.commands.console import grammar
from forecast_autotune.llm.backend import LLMError, Usage
from forecast_autotune.llm.writers import TextGenerator, UsageCallback
from forecast_autotune.records import Outcome
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.search.history.events import (
    Chosen,
    ConfirmationJob,
    Confirmed,
    Event,
    Finished,
    Proposed,
    Started,
    Stopped,
)
from forecast_harness.search.history.log import SearchLog
from forecast_harness.search.records import (
    Node,
    NodeResult,
    SearchContext,
    SearchCost,
    SearchTarget,
    TargetKind,
)
from forecast_integrations.models.factory import text_generator
from tests.integrations.models import tiny_models

TARGET = SearchTarget(TargetKind.PACK, "softmax", "t", "triton", "run", "Compute it.")
SEED = Node("seed", "s", "triton", (), Provenance(Origin.HAND))
OPTIONS = Namespace(
    model="folder/qwen", evaluations=16, samples=8, k=2, trials=6, surrogate="auto", alone=False, jobs=2,
    device="cpu",
)  # fmt: skip


# --- what is started ---


def parsed(run: SearchRun, a: Namespace = OPTIONS) -> Namespace:
    words = command(run, a, "http://127.0.0.1:9", 99.0, Path("out"))
    assert words[:3] == [sys.executable, "-m", "forecast_autotune"]
    return grammar.build().parse_args(words[3:])


def test_arms_differ_in_who_decides_and_in_nothing_that_is_paid_for() -> None:
    mine, theirs = parsed(SearchRun("softmax", "filtered")), parsed(SearchRun("softmax", "unfiltered"))
    assert (mine.surrogate, theirs.surrogate) == ("auto", "none")
    assert (mine.samples, theirs.samples) == (8, 2), "who does not choose asks for what it measures"
    for name in ("gpu_budget", "k", "trials", "seconds", "proposer", "seed", "target", "archive"):
        assert getattr(mine, name) == getattr(theirs, name)
    assert mine.proposer == ["mechanical"]
    assert mine.llm == [
        "http://127.0.0.1:9/softmax-filtered/v1?model=qwen&kind=chat&concurrency=64&attempts=2"
    ]


def test_a_model_may_propose_alone() -> None:
    alone = parsed(SearchRun("a/kernels.py:scale", "filtered"), Namespace(**{**vars(OPTIONS), "alone": True}))
    assert alone.proposer is None
    assert "/scale-filtered/v1" in alone.llm[0]


# --- time ---


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Runs and their seconds; each is a process that ends at once."""
    found: list[tuple[str, float]] = []

    def start(run: SearchRun, a: Namespace, url: str, seconds: float, work: Path) -> RunningSearch:
        found.append((run.name, seconds))
        process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
        return RunningSearch(run, process, 0.0, time.monotonic() + seconds)

    monkeypatch.setattr(llm_search_runs, "start", start)
    return found


def test_time_is_divided_among_rounds(started: list[tuple[str, float]], tmp_path: Path) -> None:
    runs = [SearchRun(str(n), "filtered") for n in range(4)]
    until = time.monotonic() + 10_000
    done = [one.run for one in run_searches(runs, OPTIONS, "", until, tmp_path)]
    assert sorted(r.name for r in done) == [name for name, _ in started]
    first, second, third, fourth = (seconds for _, seconds in started)
    assert first == pytest.approx(second, rel=0.01)
    assert third == pytest.approx(fourth, rel=0.01)
    assert 4000 < first < 5001 < third, "what the first round leaves is the second one's"


def test_nothing_is_begun_that_cannot_end(started: list[tuple[str, float]], tmp_path: Path) -> None:
    runs = [SearchRun(str(n), "filtered") for n in range(3)]
    assert list(run_searches(runs, OPTIONS, "", time.monotonic() + 20.0, tmp_path)) == []
    assert started == []


STUBBORN = "import signal, time; signal.signal(signal.SIGINT, lambda *_: print('asked', flush=True)); \
print('ready', flush=True); time.sleep(600)"


def test_a_late_search_is_interrupted_once_and_then_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    one = RunningSearch(SearchRun("a", "filtered"), process, 0.0, time.monotonic() + 600)  # type: ignore[arg-type]
    assert not has_ended(one)
    assert not one.interrupted
    one.until = time.monotonic() - 1.0
    assert not has_ended(one)
    assert not has_ended(one)
    monkeypatch.setattr(llm_search_runs, "GRACE_S", 0.0)
    assert has_ended(one)
    assert "asked\n".startswith(process.stdout.read()), (
        "asked once at most: it may be killed while it says so"
    )
    assert process.returncode == -signal.SIGKILL


# --- logs ---


def node(name: str, arm: str) -> Node:
    return Node(name, name, "triton", ("seed",), Provenance(Origin.LLM), arm, 1, f"r-{arm}")


def ok(ratio: float, against: str = "seed") -> NodeResult:
    return NodeResult(Outcome.OK, against, ratio, 0.01, {}, {"WARPS": 8}, stage="time", wall_seconds=2.0)


def logged(folder: Path, arm: str, name: str = "fast", ratio: float = -0.5) -> None:
    """A search in which the model gave one good and one broken source, and rewrites another."""
    nodes = (node(name, "llm:m/rewrite"), node("broken", "llm:m/rewrite"))
    spent = SearchCost(wall_seconds=3.0, tokens=70)
    events: list[Event] = [
        Finished("j0", "seed", 0, NodeResult(Outcome.OK, "seed", 0.0, 0.0, {}, {"WARPS": 4}, stage="time")),
        Proposed("r-llm:m/rewrite", nodes, spent, batch=1, arm="llm:m/rewrite", parent="seed"),
        Proposed("r-llm:m/diff", (), spent, "llm:m: no block", batch=1, arm="llm:m/diff", parent="seed"),
        Proposed("r-mechanical/single", (node("turned", "mechanical/single"),), batch=1,
                 arm="mechanical/single", parent="seed"),
    ]  # fmt: skip
    closing: list[Event] = [
        Finished("j1", name, 1, ok(ratio)),
        Finished("j2", "broken", 1, NodeResult(Outcome.COMPILE_ERROR, "seed", stage="compile")),
        Finished("j3", "turned", 1, ok(0.1)),
        Confirmed({name: ok(ratio), "seed": ok(0.0)}),
        Stopped("measurements 4 of 4 spent"),
    ]
    path = folder / SearchRun("softmax", arm).name / "search" / "log.jsonl"
    chosen = Chosen(1, (name, "broken", "turned"), ("top",) * 3, (1.0,) * 3)
    context = SearchContext("t", ("seed",), "cpu", {}, "none", "h")
    with SearchLog.create(path, Started(context, TARGET, (SEED,), "now")) as log:
        for event in (*events, chosen, *closing):
            log.append(event)


def ended(arm: str) -> RunningSearch:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return RunningSearch(SearchRun("softmax", arm), process, time.monotonic(), 0.0)


def text(who: str, begin: float, end: float) -> dict[str, Any]:
    return {"who": who, "begin": begin, "end": end, "prompt_tokens": 10, "output_tokens": 5, "text": "x"}


def test_a_run_says_how_far_its_sources_came(tmp_path: Path) -> None:
    logged(tmp_path, "filtered")
    said = [text("softmax-filtered", 0, 4), text("softmax-filtered", 3, 6), text("softmax-unfiltered", 0, 99)]
    found = run_row(ended("filtered"), said, tmp_path)
    model = found["model"]
    assert [model[k] for k in ("texts", "sources", "evaluated", "compiled", "verified")] == [2, 2, 2, 1, 1]
    assert (model["output_tokens"], model["model_seconds"]) == (10, 6.0)
    assert model["problems"] == [("llm:m: no block", 1)]
    assert [found["mechanical"][k] for k in ("sources", "evaluated", "verified")] == [1, 1, 1]
    assert found["speedup"] == pytest.approx(2**0.5, rel=1e-3)
    assert (found["evaluations"], found["evidence"]) == (4, "confirmed")
    assert found["best"] == {"arm": "llm:m/rewrite", "config": {"WARPS": 8}}
    json.dumps(found)


def test_a_search_that_never_began_shows_why(tmp_path: Path) -> None:
    (tmp_path / "softmax-filtered").mkdir()
    (tmp_path / "softmax-filtered" / "output").write_text("error: no such pack\n")
    found = run_row(ended("filtered"), [], tmp_path)
    assert (found["speedup"], "no such pack" in found["ended"]) == (None, True)
    assert summary([found], {})["ratio"] is None


def test_seconds_side_by_side_count_once() -> None:
    assert covered_seconds([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.7)]) == pytest.approx(4.0)
    assert covered_seconds([]) == 0.0


# --- the end ---


class Judges:
    """Knows how fast each source is; notes what it was asked."""

    def __init__(self) -> None:
        self.level = {"seed": 0.0, "fast": -0.5, "faster": -1.0}
        self.asked: list[ConfirmationJob] = []

    def confirm(self, confirm: ConfirmationJob) -> dict[str, NodeResult]:
        self.asked.append(confirm)
        rival = confirm.seed_node.id
        return {n.id: ok(self.level[n.id] - self.level[rival], rival) for n in confirm.nodes}

    def close(self) -> None:
        pass


def test_the_best_are_timed_beside_the_seed_and_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged(tmp_path, "filtered", "faster", -0.9)
    logged(tmp_path, "unfiltered", "fast", -0.5)
    judges = Judges()
    monkeypatch.setattr(llm_written_sources, "open_judge", lambda *_, **__: judges)
    states = {
        arm: state
        for arm in llm_written_sources.ARMS
        if (state := read_run(SearchRun("softmax", arm), tmp_path))
    }
    found = retime_best(states, "cpu", 60.0, tmp_path)
    ratios = {name: one["ratio"] for name, one in found.items()}
    assert ratios == pytest.approx({"filtered": 2.0, "unfiltered": 2**0.5, "each_other": 2**0.5}, rel=1e-3)
    assert [c.seed_node.id for c in judges.asked] == ["seed", "fast"]
    assert judges.asked[0].configs == {"seed": {"WARPS": 4}, "fast": {"WARPS": 8}, "faster": {"WARPS": 8}}
    assert all(c.seconds == 30.0 for c in judges.asked)


def test_equal_sources_are_not_timed_against_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arm in llm_written_sources.ARMS:
        logged(tmp_path, arm)
    judges = Judges()
    monkeypatch.setattr(llm_written_sources, "open_judge", lambda *_, **__: judges)
    states = {
        arm: state
        for arm in llm_written_sources.ARMS
        if (state := read_run(SearchRun("softmax", arm), tmp_path))
    }
    found = retime_best(states, "cpu", 60.0, tmp_path)
    assert found["each_other"] == {"ratio": 1.0, "standing": "the same source"}
    assert len(judges.asked) == 1


def test_what_was_refused_has_no_ratio_and_the_mean_leaves_it_out() -> None:
    refused = contest_summary(NodeResult(Outcome.INCORRECT, feedback="wrong"), False)
    assert (refused["ratio"], refused["standing"]) == (None, "refused")
    assert contest_summary(None, False)["standing"] == "not timed"
    again = {
        name: {"filtered": one, "unfiltered": one, "each_other": one}
        for name, one in (
            ("a", contest_summary(ok(-1.0), False)),
            ("b", contest_summary(ok(1.0), False)),
            ("c", refused),
        )
    }
    assert summary([], again)["ratio"] == pytest.approx(1.0)
    assert summary([], again)["by_problem"] == {"a": 2.0, "b": 0.5, "c": None}


# --- the server ---


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[model_server.ModelServer]:
    def opened(model: str, told: UsageCallback) -> TextGenerator:
        def write(prompt: str, n: int) -> list[str]:
            if prompt == "fail":
                raise LLMError("no memory")
            told(Usage(1, len(prompt), 0, 3))
            return [f"{model}: {prompt}"] * n

        return write

    monkeypatch.setattr(model_server, "opened", opened)
    with model_server.ModelServer("m", tmp_path / "log") as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def ask(server: model_server.ModelServer, prompt: str, path: str = model_server.PATH) -> Any:
    body = json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode()
    asked = Request(f"http://127.0.0.1:{server.server_address[1]}{path}", data=body)
    return json.loads(urlopen(asked, timeout=60).read())


def test_a_served_model_answers_and_its_log_says_who_asked(
    server: model_server.ModelServer, tmp_path: Path
) -> None:
    answer = ask(server, "hello", f"/softmax-filtered{model_server.PATH}")
    assert answer["choices"][0]["message"]["content"] == "m: hello"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 3}
    (line,) = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert (line["who"], line["output_tokens"], line["text"]) == ("softmax-filtered", 3, "m: hello")
    assert line["begin"] <= line["end"]


@pytest.mark.parametrize(
    ("prompt", "path", "status"), [("fail", model_server.PATH, 500), ("x", "/v1/models", 404)]
)
def test_trouble_has_a_status(server: model_server.ModelServer, prompt: str, path: str, status: int) -> None:
    with pytest.raises(HTTPError) as error:
        ask(server, prompt, path)
    assert error.value.code == status


@pytest.mark.slow
def test_a_real_model_is_loaded_once_and_asked_as_any_server(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = tiny_models.saved(tmp_path / "tiny", "qwen2")
    a = Namespace(model=model, temperature=1.0, max_tokens=8)
    with llm_written_sources.serve_model(a, tmp_path) as url:
        texts = text_generator(f"{url}/me/v1?model=m&kind=chat")("kernel", 3)
        assert len(texts) == 3
    said = llm_search_runs.read_texts(tmp_path)
    assert [line["who"] for line in said] == ["warm-up", "me", "me", "me"]
    assert {line["text"] for line in said[1:]} == set(texts)
    with (
        pytest.raises(RuntimeError, match="could not be loaded"),
        llm_written_sources.serve_model(
            Namespace(**{**vars(a), "model": tmp_path / "none"}), tmp_path / "tiny"
        ),
    ):
        pass
