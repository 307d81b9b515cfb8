"""FlagGems' databases of times, written here as its own release 5.0 lays them out."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Device, Outcome
from forecast_autotune.store.formats import flaggems, format_of, read_file

NAME = "TunedConfig_NVIDIA_H200_triton_3_6.db"
TABLE = f"mm_kernel_{'a' * 64}_benchmark-{'b' * 32}"


def database(path: Path, *rows: tuple[object, ...], table: str = TABLE) -> Path:
    with sqlite3.connect(path) as opened:
        opened.execute(
            f'CREATE TABLE "{table}" (key_0 INTEGER, key_1 VARCHAR, "BLOCK_M" INTEGER, num_warps INTEGER, '
            "num_ctas INTEGER, num_stages INTEGER, p50 FLOAT, p20 FLOAT, p80 FLOAT)"
        )
        opened.executemany(f'INSERT INTO "{table}" VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)', rows)
    return path


def test_rows_become_measurements_by_key(tmp_path: Path) -> None:
    path = database(
        tmp_path / NAME,
        (4096, "torch.float16", 64, 4, 1, 3, 0.5, 0.4, 0.6),
        (4096, "torch.float16", 128, 8, 1, 3, float("inf"), float("inf"), float("inf")),
        (8192, "torch.float16", 64, 4, 1, 3, 0.9, 0.8, 1.0),
    )
    assert format_of(path) is flaggems.FORMAT
    small, large = read_file(path)
    assert (small.problem.kernel.name, small.problem.key) == ("mm_kernel", ("4096", "torch.float16"))
    assert small.problem.device == Device("NVIDIA H200")
    assert [(m.outcome, m.median_ms) for m in small.measurements] == [
        (Outcome.OK, 0.5),
        (Outcome.RUNTIME_ERROR, None),
    ]
    config = small.measurements[0].candidate.config
    assert (dict(config.kwargs), config.num_warps, config.num_stages) == ({"BLOCK_M": 64}, 4, 3)
    assert large.measurements[0].median_ms == 0.9


def test_a_device_that_is_given_counts_over_the_name(tmp_path: Path) -> None:
    path = database(tmp_path / "tuned.db", (1, "x", 64, 4, 1, 3, 0.5, 0.4, 0.6))
    with pytest.raises(RecordError, match="pass --device-name"):
        read_file(path)
    assert read_file(path, Device("A"))[0].problem.device.name == "A"


def test_rows_that_break_a_rule_are_refused_one_by_one(tmp_path: Path) -> None:
    rows = ((1, "x", 64, 4, 1, 3, "soon", 0.4, 0.6), (1, "x", 32, 4, 1, 3, 0.5, 0.4, 0.6))
    path = database(tmp_path / NAME, *rows)
    with pytest.raises(RecordError, match="p50 must be a number of milliseconds, not 'soon'"):
        read_file(path)
    refused: list[RecordError] = []
    (table,) = read_file(path, refuse=refused.append)
    assert len(table.measurements) == len(refused) == 1


@pytest.mark.parametrize("damage", ["other", "cut"])
def test_a_database_of_another_program_or_cut_short_is_named(tmp_path: Path, damage: str) -> None:
    path = database(
        tmp_path / NAME, (1, "x", 64, 4, 1, 3, 0.5, 0.4, 0.6), table="notes" if damage == "other" else TABLE
    )
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(RecordError, match=NAME):
        read_file(path)
