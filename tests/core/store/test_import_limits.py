"""Imports of hostile files: bombs, huge numbers and damaged rows cost an error each, and no other row."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.commands import main
from forecast_autotune.errors import RecordError
from forecast_autotune.records import Device, Measurement
from forecast_autotune.records import named_lines as limits
from forecast_autotune.records.table import read_tables, table_lines
from forecast_autotune.store import Store
from forecast_autotune.store.formats import read_file
from forecast_autotune.testing import example_table
from tests.core.captured_output import Capture
from tests.core.store.test_flaggems import NAME, database

TABLE = example_table()
LINES = [line.encode() for line in table_lines([TABLE])]


def packed(path: Path, data: bytes) -> Path:
    path.write_bytes(gzip.compress(data, mtime=0))
    return path


def stored(root: Path) -> list[Measurement]:
    return [m for t in Store(root).tables() for m in t.measurements]


# --- bounds of files ---


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "row", [b"\0" * 64, b'{"type":"x"}\n', b"[", b'{"type":"measurement","problem":"p"}\n']
)
@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_a_bomb_is_refused(
    tmp_path: Path, row: bytes, capsys: Capture, compress: Callable[[bytes], bytes]
) -> None:
    bomb = tmp_path / "bomb.jsonl.gz"
    bomb.write_bytes(compress(row * (16_000_000 // len(row))) * 8)
    assert bomb.stat().st_size < 500_000
    assert main(["import", str(bomb), "--store", str(tmp_path / "s")]) == 2
    message = capsys.readouterr().err.splitlines()
    assert len(message) <= 5
    assert any(words in message[-1] for words in ("bytes per compressed byte", "lines", "rows break a rule"))


def test_a_file_of_many_gigabytes_is_not_begun(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "t.jsonl"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)
    assert main(["import", str(path), "--store", str(tmp_path / "s")]) == 2
    assert "split it" in capsys.readouterr().err


def test_a_small_file_may_have_any_ratio(tmp_path: Path) -> None:
    (table,) = read_tables(packed(tmp_path / "t.jsonl.gz", b"".join(LINES) + b"\n" * 5_000))
    assert table == TABLE


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("MAX_BYTES", 1500, "1500 bytes once unpacked"), ("MAX_LINES", 3, "more than 3 lines")],
)
def test_bounds_of_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: int, said: str
) -> None:
    monkeypatch.setattr(limits, name, value)
    with pytest.raises(RecordError, match=rf"t\.jsonl\.gz: .*{said}.*split it"):
        read_tables(packed(tmp_path / "t.jsonl.gz", b"".join(LINES)))


def test_a_line_that_is_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LINE_BYTES", 2_000)
    monkeypatch.setattr(limits, "_CHUNK", 500)
    long = json.dumps({"type": "note", "text": "x" * 9_000}).encode() + b"\n"
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join([*LINES[:4], long, *LINES[4:], long[:-1]]))
    with pytest.raises(RecordError, match=r"t\.jsonl:5: a line has at most 2000 bytes"):
        read_tables(path)
    refused: list[RecordError] = []
    (table,) = read_tables(path, refuse=refused.append)
    assert table == TABLE
    assert [str(error).split(": ")[0] for error in refused] == [f"{path}:5", f"{path}:{len(LINES) + 2}"]


def test_a_file_that_is_cut_off_keeps_its_begin(tmp_path: Path, capsys: Capture) -> None:
    # Text that packs badly, so that a part of the file holds a part of the rows.
    lines = [
        *LINES,
        *(json.dumps({"type": "note", "n": n * 7919 % 10007}).encode() + b"\n" for n in range(3000)),
    ]
    path = packed(tmp_path / "cut.jsonl.gz", b"".join(lines))
    path.write_bytes(path.read_bytes()[:-200])
    assert main(["import", str(path), "--store", str(tmp_path / "s")]) == 2
    assert "cut off" in capsys.readouterr().err
    assert len(stored(tmp_path / "s")) == len(TABLE.measurements)


# --- rows ---

HUGE = ["9" * 400, "-" + "9" * 5000, "1e999", "-1e999", "NaN", "Infinity"]


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize("field", ["median_ms", "compile_s", "repeats", "BLOCK", "num_warps"])
def test_a_number_that_nobody_can_hold_costs_its_row(
    tmp_path: Path, field: str, number: str, capsys: Capture
) -> None:
    row = json.loads(LINES[3])
    (row["config"]["kwargs"] if field == "BLOCK" else row["config"] if field == "num_warps" else row)[
        field
    ] = "?"
    bad = json.dumps(row).replace('"?"', number).encode() + b"\n"
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join([*LINES[:3], bad, *LINES[4:]]))
    assert main(["import", str(path), "--store", str(tmp_path / "s")]) == 2
    message = capsys.readouterr().err
    assert f"{path}:4: " in message.replace("\n", " ")
    assert "1 row refused" in message
    assert len(message) < 1500
    assert stored(tmp_path / "s") == [m for i, m in enumerate(TABLE.measurements) if i != 2]


def test_much_that_is_refused_is_told_in_few_words(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join([*LINES, *[b"garbage\n"] * 1000]))
    assert main(["import", str(path), "--store", str(tmp_path / "s")]) == 2
    message = capsys.readouterr().err.splitlines()
    assert len(message) == 4
    assert "1000 rows refused" in message[-1]
    assert len(stored(tmp_path / "s")) == len(TABLE.measurements)


# --- other tools' files ---

DEVICE = Device("NVIDIA H100")
HEAD = "status,perf_ms,compile_time_s,config\n"
SOUND = 'ok,1.5,0.4,"Config(a=1)"\n'


@pytest.mark.parametrize(
    "row",
    [
        f'ok,{"9" * 400},0.4,"Config(a=2)"',
        'ok,1e999,0.4,"Config(a=2)"',
        'ok,1.0,1e999,"Config(a=2)"',
        f'ok,1.0,0.4,"Config(a={"9" * 400})"',
        f'ok,1.0,0.4,"Config(a={"9" * 5000})"',
        f'ok,1.0,0.4,"Config(num_warps={"9" * 400})"',
        'ok,1.0,0.4,"Config(num_warps=[4])"',
        f'ok,1.0,0.4,"Config(a={"-" * 60_000}1)"',
        f'ok,1.0,0.4,"Config(a={"[" * 5_000})"',
        'ok,1.0,0.4,"Config(a=2)',
        "ok,1.0",
        "ok," + "x" * 200_000,
        'ok,1.0,0.4,"Config(a=\x00)"',
    ],
    ids=lambda row: row[:40].replace("\x00", "0"),
)
def test_a_bad_row_of_helions_costs_no_other(tmp_path: Path, row: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(HEAD + SOUND + row + "\n" + SOUND.replace("a=1", "a=3"))
    refused: list[RecordError] = []
    tables = read_file(path, DEVICE, refuse=refused.append)
    results = [m.candidate.config.parameters()["a"] for t in tables for m in t.measurements]
    if row.endswith("Config(a=2)"):  # a quote that nobody closes ends with its line
        assert results == [1, 2, 3]
        return
    assert results == [1, 3]
    (error,) = refused
    assert str(error).startswith(f"{path}:3: ")
    assert len(str(error)) < 500
    with pytest.raises(RecordError, match=r"log\.csv:3"):
        read_file(path, DEVICE)


def tuner_cache(**rows: Any) -> str:
    named = {"device_name": "A4000", "kernel_name": "k", "problem_size": 64, "tune_params_keys": ["x"]}
    sound = {"8": {"x": 8, "time": 1.0}, "16": {"x": 16, "time": 2.0}}
    return json.dumps({**named, "cache": {**sound, **rows}}, indent=1)


@pytest.mark.parametrize("number", [*HUGE, '"\\ud800"', "[1]", "null", "-1.0"])
@pytest.mark.parametrize("field", ["x", "time", "compile_time"])
def test_a_bad_config_of_kernel_tuners_costs_no_other(tmp_path: Path, field: str, number: str) -> None:
    path = tmp_path / "cache.json"
    path.write_text(tuner_cache(bad={"x": 32, "time": 1.0, field: "?"}).replace('"?"', number))
    refused: list[RecordError] = []
    (table,) = read_file(path, refuse=refused.append)
    odd = (field == "x" and number in ('"\\ud800"', "-1.0")) or (field == "compile_time" and number == "null")
    assert len(table.measurements) == 2 + odd
    assert len(refused) == 1 - odd
    assert all("config bad" in str(error) for error in refused)


def kernel_tuners(folder: Path) -> Any:
    path = folder / "cache.json"
    path.write_text(tuner_cache(**{f"{i}": {"x": i, "time": "no time"} for i in range(5)}))
    return partial(read_file, path)


def flaggems(folder: Path) -> Any:
    rows = [(i, "x", 64, 4, 1, 3, "no time", 0.4, 0.6) for i in range(5)]
    return partial(read_file, database(folder / NAME, *rows))


@pytest.mark.parametrize("bad", [kernel_tuners, flaggems])
def test_a_file_of_which_much_is_refused_is_refused_whole(
    tmp_path: Path, bad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_REFUSED", 3)
    refused: list[RecordError] = []
    imported = bad(tmp_path)
    with pytest.raises(RecordError, match="more than 3 rows break a rule"):
        imported(refuse=refused.append)
    assert len(refused) == 3


def test_what_is_said_of_a_row_is_bounded() -> None:
    refused: list[RecordError] = []
    long = RecordError("x" * 10_000)
    limits.refuse_row(long, refused.append)
    assert len(str(refused[0])) == limits.MAX_REASON
    with pytest.raises(RecordError, match=f"^x{{{limits.MAX_REASON}}}$"):
        limits.refuse_row(long, None)


def test_a_bad_config_of_tritons_costs_no_other(tmp_path: Path) -> None:
    (tmp_path / "ABC").mkdir()
    path = tmp_path / "ABC" / "k.autotune.json"
    timings = [
        [{"kwargs": {"B": n}, "num_warps": 4, "num_stages": 3, "num_ctas": 1}, [1.0]] for n in (1, 2, 3)
    ]
    text = json.dumps({"key": [], "configs_timings": timings})
    path.write_text(
        text.replace('"B": 2', '"B": ' + "9" * 400).replace('"num_warps": 4', '"num_warps": 1e999', 1)
    )
    refused: list[RecordError] = []
    (table,) = read_file(path, DEVICE, refused.append)
    assert [str(error).split(": ")[1] for error in refused] == ["config 0", "config 1"]
    assert len(table.measurements) == 1
