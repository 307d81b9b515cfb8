"""A disk that is full while a command writes: one line, a status, and neither a torn file nor a part of one."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from forecast_autotune.records.table import write_tables
from forecast_autotune.store import Store
from forecast_autotune.testing import example_table

pytestmark = pytest.mark.usefixtures("root")

LIMIT = 1500
"""Most bytes of any file in the process: a write beyond it fails as one on a full disk does."""
WRITING = [
    (["export", "out.jsonl.gz", "--store", "filled"], "out.jsonl.gz"),
    (["show", "--page", "out.html", "--store", "filled"], "out.html"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tables(tmp_path / "table.jsonl", [example_table(sizes=range(1, 40))])
    Store(tmp_path / "filled").import_tables([example_table(sizes=range(1, 40))])
    return tmp_path


def run(folder: Path, words: list[str], limit: int) -> subprocess.CompletedProcess[str]:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [sys.executable, "-m", "forecast_autotune", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=limited,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "target"), WRITING, ids=lambda v: "-".join(v)[:40] if isinstance(v, list) else v
)
def test_a_full_disk_leaves_nothing_torn(words: list[str], target: str, folder: Path) -> None:
    done = run(folder, words, LIMIT)
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert done.stderr.splitlines()[-1].startswith("forecast-autotune: error: "), done.stderr
    assert "File too large" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr
    path = folder / target
    assert not path.is_file()
    parts = [p.name for p in folder.rglob("*.part")]
    assert parts == []


@pytest.mark.parametrize("is_there", [False, True])
def test_a_bundle_that_does_not_fit_leaves_the_folder_as_it_was(is_there: bool, folder: Path) -> None:
    target = folder / "tuned"
    if is_there:
        target.mkdir()
    words = ["store", "bundle", "tuned", "--store", "filled"]
    (rows,) = [p.stat().st_size for p in (folder / "filled").rglob("log-*.jsonl")]
    filled_up = run(folder, words, rows // 2)
    assert (filled_up.returncode, "File too large" in filled_up.stderr) == (1, True)
    assert target.exists() == is_there
    assert not is_there or list(target.iterdir()) == []
    assert run(folder, words, resource.RLIM_INFINITY).returncode == 0
