"""`export`, `import` and `clear`."""

from __future__ import annotations

import io
import os
import pty
from pathlib import Path

import pytest

from forecast_autotune.commands import main
from forecast_autotune.records.table import Table, read_tables
from forecast_autotune.store import Store
from forecast_autotune.testing import example_table
from tests.core.captured_output import Capture, needs_triton, shown
from tests.core.store.stored import log_of

pytestmark = pytest.mark.usefixtures("root")  # no test may see the user's own store


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.jsonl.xz"])
def test_what_was_exported_can_be_imported(
    name: str, file: Path, tmp_path: Path, root: Path, capsys: Capture
) -> None:
    assert main(["import", str(file), "--json"]) == 0
    counts = {"problems": 1, "measurements": 15, "added": 15, "variants": 0}
    assert shown(capsys) == {**counts, "store": str(root)}
    out = tmp_path / name
    assert main(["export", str(out), "--json"]) == 0
    written = {"file": str(out), "format": "jsonl", "problems": 1, "measurements": 15, "variants": 0}
    assert shown(capsys) == written
    assert read_tables(out)[0].measurements == example_table().measurements
    other = tmp_path / "other"
    assert main(["import", str(out), "--store", str(other), "--json"]) == 0
    assert shown(capsys)["added"] == 15
    assert main(["import", str(out), "--store", str(other)]) == 0
    assert "added 0 measurements of 1 problem; 15 known already" in capsys.readouterr().out


def test_what_a_file_repeats_counts_once(file: Path, root: Path, capsys: Capture) -> None:
    file.write_bytes(file.read_bytes() + file.read_bytes().splitlines(keepends=True)[-1] * 3)
    assert main(["import", str(file), str(file)]) == 0
    assert "added 15 distinct measurements of 1 problem\n" in capsys.readouterr().out
    assert main(["import", str(file), "--json"]) == 0
    counts = {"problems": 1, "measurements": 15, "added": 0, "variants": 0}
    assert shown(capsys) == {**counts, "store": str(root)}
    assert main(["store", "check"]) == 0
    assert "16 rows (1 problem, 15 measurements, 0 decisions), 0 faults" in " ".join(
        capsys.readouterr().out.split()
    )


def test_export_writes_the_table_to_stdout(file: Path, tmp_path: Path, capsys: Capture) -> None:
    main(["import", str(file)])
    capsys.readouterr()
    assert main(["export"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "15 measurements of 1 problem\n"
    again = tmp_path / "again.jsonl"
    again.write_text(captured.out, encoding="utf-8")
    assert read_tables(again)[0].measurements == example_table().measurements


def test_an_export_of_nothing_fails_and_leaves_what_was_there(
    file: Path, tmp_path: Path, capsys: Capture
) -> None:
    main(["import", str(file)])
    for name in ("-", str(file), str(tmp_path / "new.jsonl")):
        assert main(["export", name, "--kernel", "other"]) == 1
        captured = capsys.readouterr()
        assert "nothing to export" in captured.err
        assert "--kernel" in captured.err
    assert read_tables(file)
    assert not (tmp_path / "new.jsonl").exists()
    assert main(["export", "--store", str(tmp_path)]) == 1
    assert "holds no measurement\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "first"),
    [
        (b"", ""),
        (b'{"a":1}\n', ""),
        (b"{}\n", ""),
        (bytes(range(256)) * 40, "refused rows the first: "),
        (b'{"type":"problem"}\n', "1 refused row the first: "),
    ],
    ids=["empty", "another object", "no fields", "binary", "no problem"],
)
def test_a_file_of_no_known_format_is_one_error(
    data: bytes, first: str, file: Path, tmp_path: Path, capsys: Capture
) -> None:
    odd = tmp_path / "odd.json"
    odd.write_bytes(data)
    assert main(["import", str(odd)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert f"{odd}: of none of the known formats (tables of `export`" in captured.err
    assert first in captured.err
    assert main(["import", str(odd), str(file)]) == 2
    captured = capsys.readouterr()
    assert "added 15 measurements" in captured.out
    assert "1 file refused" in captured.err


def test_a_folder_that_import_cannot_read_says_why(
    file: Path, root: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["import", str(file)]) == 0
    assert main(["store", "bundle", str(tmp_path / "bundle")]) == 0
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    for folder, message in (
        (tmp_path / "bundle", "is a bundle: `forecast-autotune store merge"),
        (root, "is a store: `forecast-autotune store merge"),
        (tmp_path / "empty", "no file in it is of the known formats"),
    ):
        assert main(["import", str(folder)]) == 2
        assert message in capsys.readouterr().err


@needs_triton
def test_without_a_gpu_a_triton_cache_needs_the_devices_name(tmp_path: Path, capsys: Capture) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine knows its device")
    (tmp_path / "softmax.autotune.json").write_text("{}", encoding="utf-8")
    assert main(["import", str(tmp_path)]) == 2
    assert "--device-name" in capsys.readouterr().err


def test_import_into_a_place_that_cannot_be_written_fails(
    file: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "plain").write_text("", encoding="utf-8")
    assert main(["import", str(file), "--store", str(tmp_path / "plain")]) == 2
    assert "a file where a folder of the store belongs" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc on this system")
def test_an_import_that_cannot_be_saved_names_the_option(file: Path, capsys: Capture) -> None:
    assert main(["import", str(file), "--store", "/proc/no-such-store"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "not all was saved in /proc/no-such-store" in error
    assert "--store" in error
    assert "FORECAST_AUTOTUNE_CACHE_DIR" not in error


def test_clear_wants_a_yes_and_tells_the_number(
    tuned: Table, root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(Store(root).measurements(tuned.problem))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["clear"]) == 2
    assert f"{count} measurements of 1 kernel and 1 decision" in capsys.readouterr().err
    assert main(["clear", "--kernel", "other", "--yes", "--json"]) == 0
    assert shown(capsys)["measurements"] == 0
    assert len(Store(root).measurements(tuned.problem)) == count
    assert main(["clear", "--yes", "--json"]) == 0
    counts = {"measurements": count, "decisions": 1, "unread_lines": 0, "unread_decisions": 0}
    assert shown(capsys) == {**counts, "store": str(root)}
    assert Store(root).measurements(tuned.problem) == []
    assert main(["clear"]) == 0
    assert "removed 0 measurements" in capsys.readouterr().out


def test_clear_counts_what_this_release_cannot_read(
    tuned: Table, root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, decision = log_of(root), next(root.rglob("decisions/*.json"))
    log.write_bytes(log.read_bytes().replace(b'"schema":1', b'"schema":9') + b"torn")
    decision.write_bytes(decision.read_bytes().replace(b'"schema":1', b'"schema":9'))
    lines, before = len(log.read_bytes().splitlines()), log.read_bytes()
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["clear"]) == 2
    assert f"with {lines} lines and 1 file that this release cannot read" in capsys.readouterr().err
    assert log.read_bytes() == before
    assert main(["clear", "--yes"]) == 0
    assert f"and 0 decisions, with {lines} lines and 1 file" in " ".join(capsys.readouterr().out.split())
    assert not decision.exists()
    assert main(["clear"]) == 0
    assert "cannot read" not in capsys.readouterr().out


@pytest.mark.parametrize(("answer", "status"), [("", 1), ("y", 0)])
def test_clear_asks_on_a_terminal(
    tuned: Table, root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, answer: str, status: int
) -> None:
    keyboard, terminal = pty.openpty()
    with os.fdopen(keyboard, "w") as writing, os.fdopen(terminal) as reading:
        print(answer, file=writing, flush=True)
        monkeypatch.setattr("sys.stdin", reading)
        assert main(["clear"]) == status
    assert "[y/N]" in capsys.readouterr().err
    assert bool(Store(root).measurements(tuned.problem)) == bool(status)
