"""Files that a command is given and that are none: one line that names the file, at once, whatever it is."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from forecast_autotune import file_access
from forecast_autotune.commands import main
from forecast_autotune.records.table import write_tables
from forecast_autotune.testing import example_table
from tests.core.captured_output import Capture
from tests.core.special_files import SPECIAL_FILES

pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("root")

KINDS = ("binary", "folder", "pipe", "absent", "bomb")
"""One of each way in which a file is refused; test_file_access has the others."""
PYTHON = [
    ["verify", "softmax", "FILE", "--device", "cpu"],
    ["verify", "FILE", "--device", "cpu"],
    ["search", "FILE", "--device", "cpu", "--out", "s"],
    ["variants", "FILE:fn", "--mechanical", "--no-verify"],
    ["variants", "KERNEL:fn", "--from", "FILE", "--no-verify"],
    ["advise", "FILE:fn", "--llm", "recorded:ANSWERS"],
]
LINES = [
    ["replay", "FILE"],
    ["import", "FILE", "--device-name", "card"],
    ["llm", "ask", "--import", "FILE", "--to", "o.jsonl", "--model", "m", "--author", "a"],
    ["llm", "ask", "--export", "q.jsonl", "--to", "FILE", "TABLE"],
    ["replay", "--llm", "recorded:FILE"],
    ["advise", "--from", "FILE"],
    ["train", "surrogate", "FILE", "--out", "m.npz"],
    ["eval", "FILE"],
    ["search", "--show", "FILE"],
]
KERNEL = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef fn(x):\n    tl.store(x, 1.0)\n"
TAKEN = {"import folder", "advise folder", "variants folder", "llm absent"}
"""Where that kind is something else that the command takes: a cache, a store, a folder of sources, a new file."""


def make(kind: str, path: Path) -> None:
    if kind == "binary":
        path.write_bytes(bytes(range(256)) * 400)
    elif kind == "bomb":
        path.write_bytes(gzip.compress(b"a" * (32 * 2**20), 9))
    elif kind in SPECIAL_FILES:
        SPECIAL_FILES[kind](path)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("words", [*PYTHON, *LINES], ids=lambda words: "-".join(words)[:40])
def test_what_is_no_such_file_is_told_at_once(
    words: list[str], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    if kind == "bomb" and words in PYTHON:
        return  # for the sandbox, which has tests of its own
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(file_access, "PIPE_WAIT_S", 0.05)
    Path("kernel_of_mine.py").write_text(KERNEL)
    head = {"type": "answers", "schema": 1, "model": "m", "provenance": {"author": "a"}}
    Path("answers.jsonl").write_text(json.dumps(head) + "\n")
    write_tables(Path("table.jsonl"), [example_table()])
    file = Path("given.py" if words in PYTHON else "given.jsonl")
    make(kind, file)
    names = {
        "FILE": str(file),
        "KERNEL": "kernel_of_mine.py",
        "ANSWERS": "answers.jsonl",
        "TABLE": "table.jsonl",
    }
    line = " ".join(words)
    for name, value in names.items():
        line = line.replace(name, value)
    before = {p.name for p in tmp_path.iterdir()}
    status = main(line.split())
    captured = capsys.readouterr()
    if f"{words[0]} {kind}" in TAKEN or f"{words[0]} {words[1]} {kind}" in TAKEN:
        assert status in (0, 1, 2)
    else:
        assert status in (1, 2), captured.out
        assert (captured.err.splitlines() or [""])[-1].startswith(
            ("forecast-autotune: error: ", "refused: ")
        ) or captured.out
    assert "Traceback" not in captured.out + captured.err
    assert "internal error" not in captured.err, captured.err
    assert len(captured.err) < 8000
    assert {p.name for p in tmp_path.iterdir()} - before <= {"store", "s", "e", "d", "q.jsonl", "__pycache__"}
    shutil.rmtree(tmp_path / "store", ignore_errors=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def fn(:\n", "broken_of_mine.py is none: invalid syntax"),
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("1 / 0\n", "ZeroDivisionError"),
        ("raise ValueError('\\x1b[2J' + 'x' * 10**6)\n", "ValueError"),
        ("fn = 1\n", "has no kernel 'fn'"),
        ("", "has no kernel 'fn'"),
    ],
)
def test_what_a_users_file_raises_is_told(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken_of_mine.py").write_text(text)
    assert main(["variants", "broken_of_mine.py:fn", "--mechanical"]) in (1, 2)
    captured = capsys.readouterr()
    *progress, message = captured.err.splitlines()
    assert all(line.startswith(("reading ", "opening ")) for line in progress)
    assert said in message
    assert message.isprintable()
    assert "internal error" not in message
