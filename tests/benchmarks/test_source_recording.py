"""Recording sources with their configs: interrupted, with other options, on a device that is broken or not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.processes.kernel_processes import read_lines
from benchmarks.lib.search.source_pool import BASE, tables_of_recording
from benchmarks.lib.search.source_recording import record_kernels
from forecast_autotune.records import Measurement
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.learned import shipped_model

ROOT = Path(__file__).parents[2]

CHILD = """
import json, sys, time
given = json.loads(sys.argv[sys.argv.index("--given") + 1])
role = sys.argv[sys.argv.index("--child") + 1]
say = lambda **line: print(json.dumps({"case": given["case"], **line}), flush=True)
if role == "compile":
    with open(given["ahead"], "w") as out:
        json.dump({"rows": {}, "ttir": {"BLOCK=1": "module {}"}}, out)
    say(compiled=3, failed=0, seconds=1.0)
else:
    for name in given["variants"]:
        say(begin=name)
        if name.endswith("01_half_maximum"):
            sys.exit(3)
        say(variant=name, sha256="", outcome="ok")
"""


def options(out: Path, **more: Any) -> Namespace:
    usual = {"only": "vis_max_pool", "mechanical": 1, "each": 2, "workers": 1, "seconds": 60.0}
    return Namespace(**{**usual, "limit": 20.0, "null": True, "out": out, **more})


def test_a_second_recording_goes_on_where_the_first_one_ended(tmp_path: Path) -> None:
    script, out = tmp_path / "child.py", tmp_path / "lines.jsonl"
    script.write_text(CHILD, encoding="utf-8")
    assert record_kernels(str(script), options(out)) == 0
    lines = read_lines(out)
    ended = {line["variant"]: line["outcome"] for line in lines if "outcome" in line}
    assert ended[BASE] == "ok"
    assert [n for n, o in ended.items() if o != "ok"] == ["vis_max_pool/01_half_maximum"]
    assert sum(name.startswith("vis_max_pool/") for name in ended) == 12
    assert any("ttir" in line for line in lines)
    kept = [line for line in lines if line.get("variant") not in (BASE, "vis_max_pool/02_clamped_window")]
    text = "".join(json.dumps(line) + "\n" for line in kept)
    out.write_text(text, encoding="utf-8")
    assert record_kernels(str(script), options(out)) == 0
    new = [line["variant"] for line in read_lines(out)[len(kept) :] if "outcome" in line]
    assert new == [BASE, "vis_max_pool/02_clamped_window"]


def test_a_recording_with_other_options_is_not_added_to(tmp_path: Path) -> None:
    script, out = tmp_path / "child.py", tmp_path / "lines.jsonl"
    script.write_text(CHILD, encoding="utf-8")
    assert record_kernels(str(script), options(out, seconds=-1.0)) == 1, "there was no time for anything"
    with pytest.raises(ValueError, match="recorded with other each"):
        record_kernels(str(script), options(out, each=3))


def test_a_device_on_which_nothing_works_is_given_up_soon(tmp_path: Path) -> None:
    script, out = tmp_path / "child.py", tmp_path / "lines.jsonl"
    script.write_text("import sys; sys.exit(1)", encoding="utf-8")
    assert record_kernels(str(script), options(out, only="vis_max_pool,rows_argmax,cumsum")) == 1
    assert not any("outcome" in line for line in read_lines(out))


def command(*words: str) -> subprocess.CompletedProcess[str]:
    asked = [sys.executable, "-m", "benchmarks.search.sources_and_configs", *words]
    return subprocess.run(
        asked, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.slow
def test_the_whole_of_it_on_a_device_that_is_not_there(tmp_path: Path) -> None:
    """A kernel is compiled, timed with invented times, packed, and searched."""
    lines, packed, out = (str(tmp_path / n) for n in ("r.jsonl", "t.jsonl.gz", "o.json"))
    small = ("--mechanical", "1", "--each", "3", "--workers", "2", "--only", "vis_max_pool")
    first = command("--record", "--null", "--out", lines, *small)
    assert first.returncode == 0, first.stdout + first.stderr
    (table,) = tables_of_recording(Path(lines))
    assert_whole(table, 3)
    assert command("--pack", lines, "--out", packed).returncode == 0
    model = shipped_model()
    assert model is not None
    replace(model, about={"without": table.problem.extra["family"]}).save(
        tmp_path / f"{table.problem.extra['family']}.npz"
    )
    words = ("--models", str(tmp_path), "--seeds", "1", "--budgets", "9", "--trials", "3", "--out", out)
    done = command("--replay", packed, *words)
    assert "written" in done.stdout, done.stdout + done.stderr
    summary_ = json.loads(Path(out).read_text(encoding="utf-8"))["summary"]
    assert set(summary_["measured"].values()) == {9.0}


def assert_whole(table: Table, each: int) -> None:
    """Every source has its configs, times, grids and IR."""
    told: dict[str, dict[str, str]] = table.problem.extra["sources"]
    rows: Sequence[Measurement] = list(table.by_candidate().values())
    assert {m.candidate.variant for m in rows} == set(told)
    assert all(one["outcome"] == "ok" and one["text"] for one in told.values())
    assert {one["origin"] for one in told.values()} == {"base", "llm", "mechanical"}
    counts = [sum(m.candidate.variant == name for m in rows) for name in told]
    assert max(counts) == each
    assert all(
        m.ok and m.grid is not None and m.compile_s is not None for m in rows if "turns" not in m.protocol
    )
    assert table.problem.ttir
    assert table.problem.extra["facts"]["rows"]
