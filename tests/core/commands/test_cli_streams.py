"""Standard streams that are closed, full or nobody's: one line and a status, never a traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forecast_autotune.commands import main
from forecast_autotune.records.table import Table

pytestmark = pytest.mark.usefixtures("root")


def shell(redirected: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Our command line, called by a shell with redirections."""
    words = [sys.executable, "-m", "forecast_autotune", *arguments]
    return subprocess.run(
        ["bash", "-c", f'"$@" {redirected}', "bash", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def assert_told(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 1
    assert re.match(
        "forecast-autotune: error: (standard output: |No space left)", done.stderr.splitlines()[-1]
    )
    assert done.stderr.count("forecast-autotune: error: ") == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert "internal error" not in done.stderr


@pytest.mark.parametrize(
    ("words", "redirected"),
    [
        ("search --help", ">&-"),
        ("show --json", ">/dev/full"),
        ("export", ">&- <&-"),
        ("export", ">/dev/full"),
        ("clear --advice --yes", ">&-"),
    ],
)
def test_output_that_is_lost_is_an_error(tuned: Table, words: str, redirected: str) -> None:
    """A help, a JSON document, rows, and the line of a change: all commands print by the same stream."""
    assert_told(shell(redirected, *words.split()))


def test_without_stderr_or_stdin_the_result_is_there(tuned: Table) -> None:
    whole = shell("", "export").stdout
    assert whole.count("\n") > 5
    for redirected in ("2>&-", "2>/dev/full", "<&-", "2>&- <&-"):
        done = shell(redirected, "export")
        assert (done.returncode, done.stdout) == (0, whole)
        assert not done.stderr or redirected == "<&-"


@pytest.mark.parametrize(
    ("words", "redirected", "status"),
    [
        ("explain none-such", ">&- 2>&-", 1),
        ("nonsense", ">&- 2>&- <&-", 2),
        ("import /nowhere", ">/dev/full 2>/dev/full", 2),
        ("nonsense", "2>&-", 2),
    ],
)
def test_the_status_tells_what_no_stream_can(words: str, redirected: str, status: int) -> None:
    done = shell(redirected, *words.split())
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def test_the_commands_own_error_comes_before_that_of_its_stream() -> None:
    done = shell(">&-", "nonsense")
    assert done.returncode == 2
    assert "invalid choice" in done.stderr


def test_closed_input_is_told(tuned: Table) -> None:
    done = shell("<&-", "import", "-")
    assert done.returncode == 2
    assert "standard input is closed" in done.stderr
    assert done.stderr.count("\n") == 1
    done = shell("<&-", "clear")
    assert done.returncode == 2
    assert "pass --yes" in done.stderr


def test_no_file_of_ours_becomes_standard_output(tuned: Table, tmp_path: Path) -> None:
    """With descriptor 1 closed, the next file that is opened gets its number, and what is printed is in it."""
    exported = tmp_path / "out.jsonl"
    assert main(["export", str(exported)]) == 0
    whole = exported.read_bytes()
    done = shell(">&- 2>&- <&-", "export", str(exported))
    assert done.returncode == 1
    assert exported.read_bytes() == whole
    logs = [p for p in (tmp_path / "store").rglob("*") if p.is_file()]
    assert logs
    assert not any(b"forecast-autotune:" in p.read_bytes() for p in logs)


@pytest.mark.parametrize(("words", "unbuffered"), [("--help", ""), ("show", "1"), ("search --help", "")])
def test_nobody_reads(words: str, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "forecast_autotune", *words.split()],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_program_that_is_run_keeps_pythons_own_streams(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__)\n")
    done = shell("", "run", str(script))
    assert (done.returncode, done.stdout) == (0, "True True\n")
    script.write_text("import sys\nsys.exit(0 if sys.stdout is None and sys.stderr is None else 3)\n")
    assert shell(">&- 2>&-", "run", str(script)).returncode == 0


def test_a_terminal_without_a_micro_sign_is_told_us(tuned: Table) -> None:
    for encoding, sign in (("ascii", "us"), ("latin-1", "µs")):
        done = subprocess.run(
            [sys.executable, "-m", "forecast_autotune", "explain", "example"],
            capture_output=True,
            timeout=300,
            check=True,
            env=os.environ | {"PYTHONIOENCODING": encoding},
        )
        assert f" {sign} " in done.stdout.decode(encoding)
