"""`search` as a new user meets it: one command, its folder, Ctrl-C, and what it says to mistakes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.commands import grammar, main
from forecast_harness.commands.search import resume_command
from forecast_harness.search.events import Finished, Resumed, Stopped
from forecast_harness.search.log import encode, read_log
from tests.core.captured_output import Capture, shown
from tests.harness.search.example_log import ExampleSearch
from tests.harness.small import small_folder
from tests.waiting import wait_until

SMALL = ("--device", "cpu", "--gpu-budget", "2", "--samples", "2")


def command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Our command line in a process of its own; others that time on this machine may keep it waiting long."""
    words = [sys.executable, "-m", "forecast_autotune", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=900, check=False, cwd=cwd)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_folder("swiglu", tmp_path_factory.mktemp("packs"))


def refused(capture: Capture, *arguments: str) -> str:
    """What a command that is wrong in itself says."""
    assert main(["search", *arguments]) == 2
    return capture.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "say what to search"),
        (("swiglu", "--show", "x"), "not both"),
        (("swiglu", "--archive", "best"), "invalid choice: 'best'"),
        (
            ("swiglu", "--device", "cpu", "--proposer", "gpt"),
            "mechanical, recorded:FOLDER, files:FOLDER or llm:SPEC",
        ),
        (("swiglu", "--device", "cpu", "--surrogate", "gpt"), "no forecaster is called 'gpt'"),
        (("swiglu", "--device", "cpu", "--out", "/dev/null/x"), "/dev/null/x"),
        (("swiglow", "--device", "cpu"), "error: swiglow is neither a shipped pack"),
        (("kernel.py:fn", "--device", "cpu"), "interpreted"),
        (("package.module:fn", "--device", "cpu"), "package.module:fn: a Triton kernel can only be searched"),
        (("--show", "nowhere"), "there is no log.jsonl"),
        (("swiglu", "--resume"), "leave out --resume"),
    ],
)
def test_mistakes_are_named_before_the_pack_is_checked_or_anything_is_written(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    errors = refused(capsys, *arguments)
    assert said in errors
    assert "checking" not in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("out", "said"), [("thesis.txt", "--out must be a folder"), (".", "is not empty")], ids=["file", "folder"]
)
def test_what_lies_in_the_place_of_the_folder_is_left_alone(
    capsys: Capture, tmp_path: Path, out: str, said: str
) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert said in refused(capsys, "swiglu", "--out", str(tmp_path / out))
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("thesis.txt", "mine")]


@pytest.mark.parametrize(
    "line",
    [
        "swiglu",
        "swiglu --seconds 300 --money 0.5 --gpu-budget 7 --seed 3",
        "'my packs/x' --proposer mechanical --proposer 'recorded:my sources' --llm 'http://h/v1?model=m&kind=chat'",
        "swiglu --quiet --json --device cpu",
        "swiglu --lanes 2 --archive greedy --surrogate none",
    ],
)
def test_the_command_that_goes_on_means_the_same_search(line: str) -> None:
    options = grammar.build().parse_args(["search", *shlex.split(line), "--out", "elsewhere"])
    words = shlex.split(resume_command(options, Path("my searches/a")))
    assert words[0] == "forecast-autotune"
    repeated = vars(grammar.build().parse_args(words[1:]))
    assert repeated.pop("resume") is True
    assert repeated.pop("out") == "my searches/a"
    before = vars(options)
    assert repeated == {k: v for k, v in before.items() if k not in ("resume", "out")}


def test_a_folder_is_shown_and_its_report_brought_up_to_date(capsys: Capture, tmp_path: Path) -> None:
    events = list(ExampleSearch(stopped=False).events())  # as after a kill: no report, no end
    (tmp_path / "log.jsonl").write_bytes(b"".join(map(encode, events)))
    assert main(["search", "--show", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())  # lines are broken where the terminal ends
    assert "confirmed in a fresh process" in out
    assert "under way, or ended without saying so" in out
    assert "Search of swiglu" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert main(["search", "--show", str(tmp_path), "--json"]) == 0
    data = shown(capsys)
    assert data["folder"] == str(tmp_path)
    assert data["speedup"] > 1


def test_an_empty_log_is_no_search(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(b"")
    assert "has not begun" in refused(capsys, "--show", str(tmp_path))


@pytest.mark.slow
def test_a_pack_that_cannot_tell_right_from_wrong_is_not_searched(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = tmp_path / "nothing"
    (pack / "solutions").mkdir(parents=True)
    tensor = {"shape": ["M"], "dtype": "float32"}
    about = {"schema": 1, "name": "nothing", "axes": {"M": {"low": 1, "high": 9}}}
    about |= {"inputs": {"x": tensor}, "outputs": {"y": tensor}}
    (pack / "definition.json").write_text(json.dumps(about))
    (pack / "workloads.json").write_text('[{"name": "one", "axes": {"M": 8}}]')
    (pack / "reference.py").write_text("def reference(x):\n    return x * 0\n")
    (pack / "solutions" / "plain.py").write_text("def run(x):\n    return x * 0\n")
    monkeypatch.chdir(tmp_path)
    assert main(["search", "nothing", "--device", "cpu", "--quiet"]) == 1
    said = capsys.readouterr().err
    assert "pack nothing cannot tell right from wrong" in said
    assert "zeros" in said
    assert [p.name for p in tmp_path.iterdir()] == ["nothing"]


def jobs_of(folder: Path) -> list[str]:
    return [e.job for e in read_log(folder / "log.jsonl") if isinstance(e, Finished)]


def test_one_command_from_nothing_to_a_result(
    tmp_path: Path, pack: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "search-swiglu"
    (folder / "lanes" / "0").mkdir(parents=True)  # as one leaves that is killed before it has begun
    (folder / "log.jsonl.lock").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["search", pack, *SMALL, "--json"]) == 0
    data = shown(capsys)
    assert data["folder"] == "search-swiglu"
    assert set(data["command_seconds"]) == {"opening", "searching", "closing"}
    assert data["measured"] == 2
    assert data["stopped"]
    assert len(jobs_of(folder)) == len(set(jobs_of(folder))) == data["measured"]
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert "Search of swiglu" in report
    assert "finished" in report

    # What it calls the best is a solution that the pack's own verifier takes.
    status = main(["verify", pack, str(folder / "best.py"), "--device", "cpu", "--json"])
    assert status == 0, capsys.readouterr()

    told = refused(capsys, pack, *SMALL)
    assert "search-swiglu holds a search already" in told
    assert "--resume" in told
    assert "settings.k: 4 in the log, 3 now" in refused(capsys, pack, *SMALL, "--k", "3", "--resume")
    # One that began with more and smaller batches under way, as on a device, goes on so: no option says how many.
    first = (folder / "log.jsonl").read_text().splitlines()[0]
    assert '"depth":2' in first
    deeper = tmp_path / "deeper"
    deeper.mkdir()
    (deeper / "log.jsonl").write_text(
        first.replace('"depth":2', '"depth":7').replace('"parents":2', '"parents":1') + "\n"
    )
    told = refused(capsys, pack, *SMALL, "--k", "3", "--resume", "--out", str(deeper))
    assert "settings.k: 4 in the log, 3 now" in told
    assert "depth" not in told
    assert "parents" not in told
    capsys.readouterr()
    assert main(["search", pack, *SMALL, "--resume", "--json"]) == 0
    assert shown(capsys)["measured"] == data["measured"]


@pytest.mark.slow
def test_an_interrupted_search_says_how_to_go_on_and_goes_on(tmp_path: Path, pack: str) -> None:
    more = ("--gpu-budget", "6", "--out", "mine")  # enough that it cannot end before it is interrupted
    words = [sys.executable, "-m", "forecast_autotune", "search", pack, *SMALL, *more]
    process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    log = tmp_path / "mine" / "log.jsonl"
    try:
        wait_until(
            lambda: (
                process.poll() is not None
                or (log.is_file() and log.read_bytes().count(b'"type":"finished"') >= 2)
            ),
            seconds=600,
        )
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Ctrl-C again ends it" in said
    last = said.strip().splitlines()[-1]
    assert last.startswith(f"interrupted. To go on: forecast-autotune search {pack}")
    ended = read_log(log)[-1]
    assert isinstance(ended, Stopped)
    assert ended.interrupted
    assert (tmp_path / "mine" / "report.html").is_file()

    before = jobs_of(tmp_path / "mine")
    on = command(*shlex.split(last.partition("forecast-autotune ")[2]), "--json", cwd=tmp_path)
    assert on.returncode == 0, on.stderr
    data: dict[str, Any] = json.loads(on.stdout)
    after = jobs_of(tmp_path / "mine")
    assert after[: len(before)] == before
    assert len(after) == len(set(after)) == data["measured"]
    assert not data["interrupted"]
    assert any(isinstance(e, Resumed) for e in read_log(log))
