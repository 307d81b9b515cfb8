"""Folders of answers: bounded, the oldest first to go; what cannot be written or read costs a warning at most."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from forecast_autotune.store import answer_files
from forecast_autotune.store.answer_files import AnswerFiles


def test_the_oldest_files_go_once_the_limit_is_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_files, "WRITES_PER_SWEEP", 2)
    files = AnswerFiles(tmp_path, "texts", limit_bytes=4000, most_file_bytes=2000)
    for number in range(9):
        files.write(tmp_path / f"{number}.json", {"text": "x" * 900})
        os.utime(tmp_path / f"{number}.json", (number, number))
    kept = sorted(p.stem for p in tmp_path.glob("*.json"))
    assert kept == [str(n) for n in range(9 - len(kept), 9)]
    assert 2 <= len(kept) <= 4
    (tmp_path / "8.json").write_text("[" * 3000)
    for name, error in (("8", ValueError), ("0", OSError)):
        with pytest.raises(error):
            files.read(tmp_path / f"{name}.json")


def test_a_folder_that_cannot_be_is_warned_of_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    files = AnswerFiles(tmp_path / "file" / "below", "texts", limit_bytes=10, most_file_bytes=10)
    with pytest.warns(UserWarning, match="texts cannot be kept below"):
        files.write(files.directory / "a.json", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files.write(files.directory / "b.json", {})
