"""Recording a pool of sources: what is chosen, what a cut leaves, what wrong sources become."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kernels
from benchmarks.lib.processes.kernel_processes import read_lines
from benchmarks.lib.search.source_pool import BASE
from benchmarks.lib.variants import variant_corpus
from benchmarks.lib.variants.corpus_compiling import ShapedCalls, compile_configs, narrowed
from benchmarks.lib.variants.corpus_packing import KernelLines, source_texts, tables_of_kernel
from benchmarks.lib.variants.corpus_preparing import (
    PoolLimits,
    PreparedKernel,
    ShapeFacts,
    best_configs,
    choose_configs,
    choose_shapes,
    prepare_kernel,
    read_pool,
    write_pool,
)
from benchmarks.lib.variants.corpus_recording import record_pool
from benchmarks.lib.variants.corpus_timing import ShapedTimer, serve_sources
from benchmarks.lib.variants.rewrite_cases import first_cases
from forecast_autotune.features.stored_facts import facts_by_unit
from forecast_autotune.records import Config, Outcome
from forecast_autotune.records.table import read_tables, write_tables
from forecast_integrations.triton.null_device import null_device

ROOT = Path(__file__).parents[2]
KERNEL = "splitk_gemv"
CONFIGS = [Config.of({"BLOCK": b, "ROWS": r}, num_warps=4) for b in (16, 32, 64, 128) for r in (1, 2)]


# --- what is chosen ---


def test_the_bases_best_configs_come_first_then_a_digest_decides() -> None:
    best = [CONFIGS[5], Config.of({"BLOCK": 999, "ROWS": 1}), CONFIGS[2]]
    found = choose_configs("k", CONFIGS, best, 5)
    assert found[:2] == (CONFIGS[5], CONFIGS[2])
    assert len(set(found)) == 5
    rest = choose_configs("k", CONFIGS, [], 8)
    assert found[2:] == tuple(c for c in rest if c not in found[:2])[:3]
    assert choose_configs("other", CONFIGS, [], 8) != rest, "nobody's taste, nor the order of the list"


def test_a_source_that_drops_a_parameter_gets_the_best_configs_without_it() -> None:
    narrow = [Config.of({"BLOCK": b}, num_warps=4) for b in (16, 32, 64, 128)]
    assert choose_configs("k", narrow, [CONFIGS[5]], 2)[0] == Config.of({"BLOCK": 64}, num_warps=4)


def test_every_shape_has_a_say_in_what_is_best() -> None:
    a, b, c, d = CONFIGS[:4]
    assert best_configs([[a, b], [c, a], [a, d]], 3) == [a, c, b]
    assert best_configs([[], [b]], 3) == [b]


def shape(name: str, size: float, kind: str = "x", ms: float = 0.1) -> ShapeFacts:
    return ShapeFacts(name, kind, size, ms)


def test_shapes_are_of_one_kind_and_of_all_sizes() -> None:
    given = [shape(f"s{i}", 1e6 * (i + 1)) for i in range(9)]
    given[4] = shape("other", 5e6, "y")
    found = choose_shapes(given, 4)
    assert [s.name for s in found] == ["s0", "s2", "s6", "s8"]
    fast, slow = shape("fast", 1e6, ms=0.001), shape("slow", 1e6, ms=20.0)
    assert choose_shapes([fast, slow, shape("vast", 7e9), *given[:3]], 9) == given[:3]


def test_the_first_shape_is_taken_untimed_and_few_shapes_get_company() -> None:
    first = shape("first", 3e6, ms=math.nan)
    assert first in choose_shapes([first, *(shape(f"s{i}", 1e6 * i) for i in range(1, 9))], 4)
    apart = [shape("a", 1e6, "x"), shape("b", 2e6, "y"), shape("c", 3e6, "y"), shape("d", 4e6, "z")]
    assert [s.name for s in choose_shapes(apart, 5)] == ["a", "b", "c"]


def test_a_cut_pool_is_a_fair_sample() -> None:
    order = first_cases(1_000_000)
    assert {c.hand for c in order[:40]} == {c.hand for c in order}
    assert len({c.family for c in order[:40]}) > 12


@pytest.mark.slow
def test_the_later_authors_sources_come_with_forecasts() -> None:
    table = variant_corpus.TABLES[1]
    found = variant_corpus.variant_sources(None, [table])
    earlier = {one.kernel for one in variant_corpus.variant_sources()}
    assert len(found) > 500
    assert earlier.isdisjoint(one.kernel for one in found)
    for kernel in {one.kernel for one in found}:
        text = (variant_corpus.folder(table) / kernel / "forecasts.json").read_text(encoding="utf-8")
        assert set(json.loads(text)) == {one.path.stem for one in found if one.kernel == kernel}
    assert found[0].record().provenance.at == "2026-11-22"


# --- a kernel on a device that is not there ---


@pytest.fixture(scope="module")
def prepared() -> PreparedKernel:
    (case, *_) = kernels.cases([KERNEL])
    with null_device():
        whole = prepare_kernel(case, {}, PoolLimits(each=1, base=2, mechanical=1, fill=1, shapes=2))
    by_origin = {one.origin: one.name for one in whole.sources}
    return narrowed(whole, list(by_origin.values()))


@pytest.mark.slow
def test_a_pool_is_read_as_it_was_written(prepared: PreparedKernel, tmp_path: Path) -> None:
    write_pool(tmp_path / "pool.gz", [prepared])
    assert read_pool(tmp_path / "pool.gz") == [prepared]
    assert prepared.sources[0].name == BASE
    assert [one.origin for one in prepared.sources] == ["base", "llm", "mechanical"]
    assert [len(one.configs) for one in prepared.sources] == [2, 1, 1]


@pytest.fixture
def lines(
    prepared: PreparedKernel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[dict[str, Any]]:
    """What a process prints of a kernel whose last source is wrong at its second shape."""
    wrong = prepared.sources[-1]
    launched: list[str] = []

    def mismatch(case: kernels.Case, data: kernels.Data, expected: Any) -> str:
        return "far off" if launched[-1] == wrong.variant and case.name == prepared.shapes[1] else ""

    monkeypatch.setattr(kernels, "mismatch", mismatch)
    with null_device():
        shaped = ShapedCalls.of(prepared, "meta")
        ahead = {one.name: compile_configs(shaped, one, range(len(one.configs))) for one in prepared.sources}
        timer = ShapedTimer(shaped, "meta", ahead)
        timer._where = "null"  # as if results could be looked at
        for one in timer._timers:
            first = one.first

            def spy(candidate: Any, timeout_s: float, first: Any = first) -> None:
                launched.append(candidate.variant)
                first(candidate, timeout_s)

            monkeypatch.setattr(one, "first", spy)
        told = {"case": KERNEL, "problems": timer.problems(), "protocol": timer.protocol}
        capsys.readouterr()
        assert serve_sources(KERNEL, timer, prepared.sources)
    return [told, *map(json.loads, capsys.readouterr().out.splitlines())]


def test_a_wrong_source_becomes_a_label(prepared: PreparedKernel, lines: list[dict[str, Any]]) -> None:
    ended = {line["source"]: line for line in lines if "outcome" in line}
    base, right, wrong = (ended[one.name] for one in prepared.sources)
    assert (base["outcome"], right["outcome"]) == ("ok", "ok")
    assert (base["timed"], right["timed"]) == (4, 2)
    assert wrong["outcome"] == "incorrect"
    assert wrong["detail"] == {prepared.shapes[1]: "far off"}
    with null_device():
        first, second = tables_of_kernel(prepared, KernelLines(lines), "", False, 1)
    variant = prepared.sources[-1].variant
    assert all(m.ok for m in first.measurements)
    assert variant not in {m.candidate.variant for m in first.measurements}
    (label,) = [m for m in second.measurements if m.candidate.variant == variant]
    assert label.outcome is Outcome.INCORRECT


def test_packed_tables_are_whole(
    prepared: PreparedKernel, lines: list[dict[str, Any]], tmp_path: Path
) -> None:
    with null_device():
        write_tables(tmp_path / "t.jsonl.gz", tables_of_kernel(prepared, KernelLines(lines), "", False, 1))
    found = read_tables(tmp_path / "t.jsonl.gz")
    assert [t.problem.extra["label"] for t in found] == list(prepared.shapes)
    for table in found:
        told = table.problem.extra["sources"]
        assert set(told) == {one.variant for one in prepared.sources}
        assert all(m.grid is not None for m in table.measurements)
        assert len(facts_by_unit(table.problem)) >= 2  # as surrogates read them
        assert table.problem.kernel.source
        assert not table.problem.ttir
    (texts,) = source_texts(found).values()
    assert set(texts) == {one.variant for one in prepared.sources}
    assert all("def " in text for text in texts.values())


# --- processes ---

CHILD = """
import json, pathlib, sys, time
given = json.loads(sys.argv[sys.argv.index("--given") + 1])
say = lambda **line: print(json.dumps(line), flush=True)
if sys.argv[sys.argv.index("--child") + 1] == "compile":
    left = json.loads(pathlib.Path(given["left"]).read_text())
    for kernel in left:
        say(case=kernel, compiled=1, failed=0, core_s=1.0)
    time.sleep(60 if any("slow" in names for names in left.values()) else 0)
    sys.exit()
say(case="", ready=True)
for text in sys.stdin:
    order = json.loads(text)
    say(case=order["kernel"], problems=[], protocol="", best=order["best"])
    for name in order["sources"]:
        say(case=order["kernel"], begin=name)
        if "crash" in name:
            sys.exit(3)
        say(case=order["kernel"], source=name, ms=[[0.5, 0.5, 0.5, 3]])
        if "slow" in name:
            print('{"case": "a", "source": "cut', end="", flush=True)
            time.sleep(60)
        say(case=order["kernel"], source=name, outcome="ok")
    say(case=order["kernel"], served=1, seconds=0.1)
"""


def recorded(tmp_path: Path, names: list[str], **more: Any) -> tuple[int, list[dict[str, Any]]]:
    (tmp_path / "child.py").write_text(CHILD, encoding="utf-8")
    config = Config.of({"BLOCK": 1})
    sources = [
        {"name": name, "origin": "", "note": "", "configs": [0], "shapes": [0], "record": None}
        for name in names
    ]
    line = {"shapes": ["s"], "kinds": ["k"], "configs": [config.to_json()], "sources": sources}
    pool = [PreparedKernel.from_json({"kernel": kernel, **line}) for kernel in ("a", "b")]
    write_pool(tmp_path / "pool.gz", pool)
    usual = {"gpus": 1, "workers": 1, "seconds": 20.0, "limit": 5.0, "only": "", "null": True}
    a = Namespace(**{**usual, "record": tmp_path / "pool.gz", "out": tmp_path / "lines.jsonl", **more})
    return record_pool(str(tmp_path / "child.py"), a), read_lines(a.out)


def outcomes(lines: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(line["case"], line["source"], line["outcome"]) for line in lines if "outcome" in line]


def test_what_the_end_of_the_time_leaves_is_whole_and_can_be_gone_on_with(tmp_path: Path) -> None:
    begin = time.monotonic()
    status, lines = recorded(tmp_path, ["base", "slow", "last"], seconds=3.0)
    assert status == 0
    assert time.monotonic() - begin < 30.0
    text = (tmp_path / "lines.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in text.splitlines()] == lines, "no line is cut"
    assert outcomes(lines) == [("a", "base", "ok")]
    _, lines = recorded(tmp_path, ["base", "slow", "last"], seconds=3.0)
    (told,) = [line for line in lines if line.get("best", [None]) != [None]]
    assert told["best"] == [0.5], "what is fast is known from before"
    assert outcomes(lines) == [("a", "base", "ok")]
    with pytest.raises(ValueError, match="of another pool"):
        recorded(tmp_path, ["base"])


def test_a_source_that_takes_its_process_down_costs_no_other(tmp_path: Path) -> None:
    _, lines = recorded(tmp_path, ["base", "crash", "last"])
    per_kernel = [("base", "ok"), ("crash", "crash"), ("last", "ok")]
    assert outcomes(lines) == [(kernel, *one) for kernel in ("a", "b") for one in per_kernel]


@pytest.mark.slow
def test_the_whole_of_it_on_a_device_that_is_not_there(tmp_path: Path) -> None:
    pool, out, packed = (str(tmp_path / n) for n in ("pool.jsonl.gz", "lines.jsonl", "table.jsonl.gz"))
    small = ("--each", "2", "--base", "2", "--mechanical", "1", "--fill", "1", "--shapes", "2")
    for words in (
        ("--prepare", pool, "--only", f"{KERNEL},swiglu", *small),
        ("--record", pool, "--out", out, "--null", "--seconds", "240", "--workers", "2"),
        ("--pack", out, "--pool", pool, "--out", packed),
    ):
        command = [sys.executable, "-m", "benchmarks.corpus.record_sources", *words]
        done = subprocess.run(
            command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    tables = read_tables(Path(packed))
    assert {t.problem.extra["label"].partition("/")[0] for t in tables} == {KERNEL, "swiglu"}
    assert all(m.ok for t in tables for m in t.measurements)
