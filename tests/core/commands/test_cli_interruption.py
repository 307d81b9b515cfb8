"""Signals that ask a command to end, at any moment: one line, its status, no file or process left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.commands import interruption, main
from forecast_autotune.commands import replay as replay_command
from forecast_autotune.commands.interruption import CommandInterrupted, InterruptHandlers
from forecast_autotune.records import Problem
from forecast_autotune.records.table import Table, write_tables
from forecast_autotune.store import Store
from forecast_autotune.testing import example_table
from forecast_autotune.tuning.replays.replay import ReplayReport
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("root")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
COMMANDS = {
    "export": ["export", "out.jsonl.gz", "--store", "filled"],
    "import": ["import", "table.jsonl", "--store", "other"],
    "bench": ["bench", "softmax", "torch_plain", "torch_plain", "--device", "cpu", "--seconds", "30"],
}
READY = "# ready\n"
PROGRAM = f"""
import os, sys
os.write(2, {READY.encode()!r})
from forecast_autotune.commands import main
sys.exit(main())
"""
"""What comes before it is Python's own start, in which a signal is Python's to handle."""
WAIT_S = 240.0
"""For the end of a command on a machine under any load; a command that does not end at all is what it finds."""


def marked_processes(mark: str) -> Iterator[int]:
    """Processes with a mark in their environment."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"TEST_MARK={mark}".encode() in (entry / "environ").read_bytes():
                    yield int(entry.name)
            except OSError:
                continue


def none_left(mark: str) -> bool:
    """Whether all of them have ended."""
    return not list(marked_processes(mark))


@pytest.fixture(scope="module")
def long_table(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A table file that keeps a command busy for a while."""
    path = tmp_path_factory.mktemp("long") / "table.jsonl"
    write_tables(path, [example_table(sizes=range(1, 700), warps=(1, 2, 4, 8))])
    return path.read_bytes()


@pytest.fixture
def python_handlers() -> Iterator[None]:
    """The handlers that Python begins with; a library that an earlier test loaded may have set its own."""
    defaults = (signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL)
    before = [signal.signal(number, handler) for number, handler in zip(SIGNALS, defaults, strict=True)]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.sampled(3)
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_alike_at_any_moment(
    name: str, number: signal.Signals, tmp_path: Path, long_table: bytes
) -> None:
    if name == "bench":
        pytest.importorskip("torch")
    chance = random.Random(f"{name} {number}")
    (tmp_path / "table.jsonl").write_bytes(long_table)
    Store(tmp_path / "filled").import_tables([example_table()])
    for turn in range(2):
        scratch, mark = tmp_path / f"scratch-{turn}", f"{tmp_path.name}-{turn}"
        scratch.mkdir()
        environment = {**os.environ, "TMPDIR": str(scratch), "TEST_MARK": mark}
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *COMMANDS[name]],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == READY
            time.sleep(chance.uniform(0.1, 5.0 if name == "bench" else 2.0))
            process.send_signal(number)
            out, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode in (0, 128 + number, -number), errors
        assert "Traceback" not in out + errors
        assert "Exception ignored" not in errors
        assert "internal error" not in errors
        if process.returncode == 128 + number:
            message = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
            assert errors.splitlines()[-1] == f"forecast-autotune: {message}"
        assert eventually(partial(none_left, mark)), "a child is left"
        # The lock of a device stays: it is everybody's.
        left = [
            p.name for p in scratch.iterdir() if not p.name.startswith(("torchinductor_", "forecast-device-"))
        ]
        assert left == []
        assert not list(tmp_path.rglob("*.part"))


def _send_and_wait(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(5)


@pytest.mark.usefixtures("python_handlers")
def test_handlers_are_put_back_and_a_second_signal_waits() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with InterruptHandlers() as handlers:
        with pytest.raises(CommandInterrupted) as caught:
            _send_and_wait(signal.SIGTERM)
        assert caught.value.number == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)  # while it cleans up: the same wish
        time.sleep(0.01)
        assert handlers.received == signal.SIGTERM
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.usefixtures("python_handlers")
def test_what_is_ignored_stays_ignored() -> None:
    """`nohup` ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with InterruptHandlers() as handlers:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
        assert handlers.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("python_handlers")
def test_a_forked_child_has_the_defaults() -> None:
    for number in SIGNALS * 2:
        with InterruptHandlers():
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            os.kill(child, number)  # perhaps before it has begun
            _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -number


class Swallowing:
    """Python prints what a finalizer raises, and goes on."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.001)


def _drop_one_and_wait() -> None:
    Swallowing()
    time.sleep(5)


@pytest.mark.usefixtures("python_handlers")
@pytest.mark.parametrize("later_s", [interruption._RAISED_AGAIN_S, 0.0], ids=["later", "at once"])
def test_a_signal_that_a_finalizer_swallows_is_raised_again(
    later_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: while Python still tells what it has swallowed, as on a busy machine."""
    monkeypatch.setattr(interruption, "_RAISED_AGAIN_S", later_s)
    with InterruptHandlers() as handlers:
        with pytest.raises(CommandInterrupted):
            _drop_one_and_wait()
        assert handlers.received == signal.SIGINT


def test_an_interrupted_replay_shows_the_problems_that_it_has_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = example_table()
    problem = Problem.of(first.problem.kernel, first.problem.arguments, first.problem.device, key=("8192",))
    second = Table(problem, [replace(m, problem=problem.id) for m in first.measurements])
    write_tables(tmp_path / "two.jsonl", [first, second])
    real = replay_command.replay_tables

    def interrupted_in_the_second(tables: list[Table], **options: Any) -> ReplayReport:
        real(tables[:1], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(replay_command, "replay_tables", interrupted_in_the_second)
    assert main(["replay", str(tmp_path / "two.jsonl")]) == 130
    shown = capsys.readouterr().out
    assert "interrupted after 1 of 2 replays" in shown
    assert "1 of 1 kernel" in shown
