"""Files that other tuners' own code wrote (`tuner_files/README.md`), read right, damaged, and read twice."""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import shutil
import sqlite3
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forecast_autotune.commands import main
from forecast_autotune.records import Candidate, Config, Device, Kernel, Measurement, Outcome, Problem
from forecast_autotune.records.table import Table, write_tables
from forecast_autotune.store import Store
from forecast_autotune.store.exports import ExpertLayer, sglang_file_name, vllm_file_name, write_export
from forecast_autotune.store.files import encode
from forecast_autotune.store.formats import choices, format_of, read_file
from forecast_autotune.store.formats.cuda_tile import cuda_tile_table
from forecast_autotune.store.formats.protocol import device_from_name
from forecast_autotune.store.importing import line_of
from forecast_autotune.testing import example_table
from tests.core.captured_output import Capture, shown
from tests.core.store.test_flaggems import TABLE as FLAGGEMS_TABLE

FILES = Path(__file__).parent / "tuner_files"
NAMED = ["--device-name", "NVIDIA H200"]
HELION_TRACE = FILES / "helion" / "q.trace.jsonl"
TRITON = next((FILES / "triton_one_option_more").rglob("*.json"))
QUACK = next((FILES / "quack").rglob("*.json"))
RECORDS = FILES / "tvm_metaschedule" / "database_tuning_record.json"


def imported(*words: str | Path, store: Path) -> int:
    return main(["import", *map(str, words), "--store", str(store), "--json"])


def stored(root: Path) -> list[Measurement]:
    return [m for t in Store(root).tables() for m in t.measurements]


# --- Kernel Tuner ---


def test_a_failed_config_of_kernel_tuner_has_no_time_and_a_word(tmp_path: Path, capsys: Capture) -> None:
    assert imported(FILES / "kernel_tuner" / "failures.json", *NAMED, store=tmp_path / "s") == 0
    assert shown(capsys)["added"] == 5
    (table,) = Store(tmp_path / "s").tables()
    assert sorted(m.ms for m in table.measurements if m.ok) == pytest.approx([0.169, 0.223, 0.26])
    failed = {dict(m.candidate.config.kwargs)["TILE"]: m.outcome for m in table.measurements if not m.ok}
    assert failed == {7: Outcome.COMPILE_ERROR, 64: Outcome.RUNTIME_ERROR}


def test_a_config_that_restrictions_exclude_is_no_candidate_and_said(tmp_path: Path, capsys: Capture) -> None:
    data = json.loads((FILES / "kernel_tuner" / "failures.json").read_text())
    data["cache"]["32,7,0"]["__error__"] = "InvalidConfig"
    (tmp_path / "c.json").write_text(json.dumps(data))
    assert imported(tmp_path / "c.json", *NAMED, store=tmp_path / "s") == 0
    assert "1 configs that restrictions exclude" in capsys.readouterr().err
    assert len(stored(tmp_path / "s")) == 4


def test_callable_problem_sizes_are_problems_of_their_own(tmp_path: Path) -> None:
    ids = []
    for name in ("failures", "interrupted"):
        data = (FILES / "kernel_tuner" / f"{name}.json").read_text()
        (tmp_path / f"{name}.json").write_text(
            re.sub(r'"problem_size": \d+', '"problem_size": "callable"', data)
        )
        ids.append(read_file(tmp_path / f"{name}.json", "A100")[0].problem.id)
    assert ids[0] != ids[1]
    grown = json.loads((tmp_path / "failures.json").read_text())
    grown["cache"]["2048,1,0"] = {**grown["cache"]["32,1,0"], "block_size_x": 2048}
    (tmp_path / "failures.json").write_text(json.dumps(grown))
    assert read_file(tmp_path / "failures.json", "A100")[0].problem.id == ids[0]


# --- exports ---


@pytest.fixture
def five_configs() -> Table:
    """Five configs, the fastest first; one has an option that the others have not."""
    (table,) = read_file(TRITON, Device("NVIDIA H200"))
    assert sorted(m.candidate.config.maxnreg or 0 for m in table.measurements) == [0, 0, 0, 0, 64]
    return table


@pytest.mark.parametrize("form", ["kernel-tuner", "kernel-tuner-t4"])
def test_a_config_with_an_option_more_costs_no_other(form: str, five_configs: Table, tmp_path: Path) -> None:
    report = write_export(form, tmp_path, [five_configs], [])
    data = json.loads(report.files[0].read_text())
    rows = (
        list(data["cache"].values())
        if form == "kernel-tuner"
        else [r["configuration"] for r in data["results"]]
    )
    assert [row["maxnreg"] for row in rows].count(None) == 4
    assert len(rows) == report.measurements == 5
    assert report.left_out == []


def test_rows_that_a_format_has_no_place_for_are_said(five_configs: Table, tmp_path: Path) -> None:
    one = five_configs.measurements[0]
    other = Measurement(one.problem, Candidate(one.candidate.config, "variant"), Outcome.OK, 1.0)
    report = write_export("kernel-tuner", tmp_path, [Table(five_configs.problem, [one, other])], [])
    assert report.left_out == ["scale_kernel: 1 of its rows are of other sources"]


def test_our_own_export_comes_back_as_it_was(five_configs: Table, tmp_path: Path, capsys: Capture) -> None:
    failed = [
        Measurement(five_configs.problem.id, Candidate(Config.of({"BLOCK": n})), outcome)
        for n, outcome in enumerate((Outcome.OUT_OF_RESOURCES, Outcome.TIMEOUT, Outcome.COMPILE_ERROR))
    ]
    given = Table(five_configs.problem, [*five_configs.measurements, *failed])
    store = Store(tmp_path / "s")
    store.import_tables([given])
    (path,) = write_export("kernel-tuner", tmp_path / "out", [given], []).files
    (back,) = read_file(path)
    assert (back.problem.id, back.problem.device) == (given.problem.id, given.problem.device)
    assert [(m.candidate, m.outcome, m.median_ms, m.compile_s or 0) for m in back.measurements] == [
        (m.candidate, m.outcome, m.median_ms, m.compile_s or 0) for m in given.measurements
    ]
    assert imported(path, store=tmp_path / "s") == 0
    assert shown(capsys)["added"] == 0


def test_vllm_replaces_slashes_in_the_name_of_a_device() -> None:
    layer = ExpertLayer(8, 64, "AMD Radeon RX 7900 XT / XTX", "", None, "3.6.0")
    assert vllm_file_name(layer) == "E=8,N=64,device_name=AMD_Radeon_RX_7900_XT_XTX.json"
    assert "XT_/_XTX" in sglang_file_name(layer)


# --- identity ---


def test_rows_of_earlier_releases_are_known_again(tmp_path: Path) -> None:
    """They had the time of the file."""
    (table,) = read_file(TRITON, Device("NVIDIA H200"))
    dated = [Measurement(**{**_fields(m), "at": "2026-01-01T00:00:00+00:00"}) for m in table.measurements]
    store = Store(tmp_path / "s")
    assert store.import_tables([Table(table.problem, dated)]) == 5
    assert Store(tmp_path / "s").import_tables([table]) == 0
    assert Store(None).import_tables([Table(table.problem, dated), table]) == 5


def _fields(m: Measurement) -> dict[str, Any]:
    return {name: getattr(m, name) for name in m.__dataclass_fields__}


INDUCTOR = {
    "system": {"device": {"name": "gfx942:sramecc+:xnack-"}, "hash": "h"},
    "cache": {
        "mm": {
            "[('cuda', 'torch.float16', 64, 64, 64, 1, 0)]": {"highest": {"mm-a": 1.0, "triton_mm-b": 2.0}}
        }
    },
}
METRICS = "kernel_path,kernel_name,triton_config,latency_ms\n" + "".join(
    f'/a/c.py,k,"XBLOCK: {n}, num_warps: 4",0.0{n}\n' for n in (1, 2, 4)
)


def test_a_file_of_inductors_that_grew_adds_what_grew(tmp_path: Path, capsys: Capture) -> None:
    cache, table = tmp_path / "cache", tmp_path / "metric_table_kernel_autotune.csv"
    cache.write_text(json.dumps(INDUCTOR))
    table.write_text(METRICS)
    assert imported(cache, table, *NAMED, store=tmp_path / "s") == 0
    assert shown(capsys)["added"] == 5
    cache.write_text(json.dumps(INDUCTOR).replace('"mm-a": 1.0', '"mm-a": 1.0, "triton_mm-c": 3.0'))
    table.write_text(METRICS + '/a/c.py,k,"XBLOCK: 8, num_warps: 4",0.08\n')
    assert imported(cache, table, *NAMED, store=tmp_path / "s") == 0
    assert shown(capsys)["added"] == 2


# --- Helion ---


def test_a_log_folder_of_helions_is_read_whole(tmp_path: Path, capsys: Capture) -> None:
    assert imported(FILES / "helion", *NAMED, store=tmp_path / "s") == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert (data["added"], data["problems"], data["kinds"]) == (51, 1, {"helion": 2})
    assert "best_config holds choices, no times" in captured.err
    (table,) = Store(tmp_path / "s").tables()
    assert table.problem.kernel.name == "double"
    assert Counter(str(m.outcome) for m in table.measurements) == {
        "ok": 33,
        "runtime_error": 12,
        "timeout": 6,
    }
    assert all(m.at.startswith("2026-11-29T16:27:") for m in table.measurements)
    final = [m for m in table.measurements if m.in_turns]
    assert len(final) == 9
    (chosen,) = (m for m in table.measurements if m.extra.get("chosen"))
    assert chosen in final
    assert dict(chosen.candidate.config.kwargs)["pid_type"] == "persistent_blocked"
    assert chosen.ms == pytest.approx(0.20503506)


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        ("accuracy_error", Outcome.INCORRECT),
        ("source_rejected", Outcome.INCORRECT),
        ("deduplicated", Outcome.OK),
        ("filtered", None),
    ],
)
def test_statuses_of_helions_are_outcomes_or_said(
    tmp_path: Path, status: str, outcome: Outcome | None, capsys: Capture
) -> None:
    lines = (FILES / "helion" / "q.csv").read_text().splitlines(keepends=True)
    lines[2] = lines[2].replace(",ok,", f",{status},")
    (tmp_path / "q.csv").write_text("".join(lines[:5]))
    assert imported(tmp_path / "q.csv", *NAMED, store=tmp_path / "s") == 0
    err = capsys.readouterr().err
    assert ("status filtered" in err) == (outcome is None)
    assert [m.outcome for m in stored(tmp_path / "s")][:-1] == [o for o in [outcome] if o]


# --- devices ---


@pytest.mark.parametrize(
    ("name", "backend", "lanes"),
    [
        ("AMD Instinct MI300X", "hip", 64),
        ("gfx942", "hip", 64),
        ("gfx90a:sramecc+:xnack-", "hip", 64),
        ("gfx1100", "hip", 32),
        ("AMD Radeon PRO W7800", "hip", 32),
        ("MI250X", "hip", 64),
        ("AMD EPYC 9554 64-Core Processor", "cpu", 32),
        ("x86_64", "cpu", 32),
        ("Intel(R) Data Center GPU Max 1550", "xpu", 32),
        ("NVIDIA H200", "cuda", 32),
        ("NVIDIA GeForce RTX 5090", "cuda", 32),
    ],
)
def test_a_device_is_known_by_its_name(name: str, backend: str, lanes: int) -> None:
    device = device_from_name(name)
    assert (device.name, device.backend, device.warp_size) == (name, backend, lanes)


def test_amds_devices_are_hips_in_every_format(tmp_path: Path) -> None:
    assert imported(TRITON, "--device-name", "AMD Instinct MI300X", store=tmp_path / "s") == 0
    (tmp_path / "cache").write_text(json.dumps(INDUCTOR))
    assert imported(tmp_path / "cache", store=tmp_path / "s") == 0
    devices = [t.problem.device for t in Store(tmp_path / "s").tables()]
    assert {(d.backend, d.warp_size) for d in devices} == {("hip", 64)}
    assert len(devices) == 2


# --- FlagGems ---


def test_flaggems_flags_are_booleans_and_a_vendor_is_no_device(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "TunedConfig_amd_triton_3_6.db"
    with sqlite3.connect(path) as opened:
        opened.execute(
            f'CREATE TABLE "{FLAGGEMS_TABLE}" (key_0 INTEGER, key_1 BOOLEAN, "EVEN_K" BOOLEAN, "BLOCK" INTEGER, '
            "p50 FLOAT, p20 FLOAT, p80 FLOAT)"
        )
        opened.execute(f'INSERT INTO "{FLAGGEMS_TABLE}" VALUES (64, 1, 0, 1, 0.5, 0.4, 0.6)')
    assert imported(path, store=tmp_path / "s") == 2
    assert "vendor 'amd', not the device: pass --device-name" in " ".join(capsys.readouterr().err.split())
    (table,) = read_file(path, "AMD Instinct MI300X")
    assert table.problem.key == ("64", "True")
    assert dict(table.measurements[0].candidate.config.kwargs) == {"BLOCK": 1, "EVEN_K": False}
    assert type(dict(table.measurements[0].candidate.config.kwargs)["BLOCK"]) is int


# --- quack, Tokamax, MetaSchedule, cuda-tile ---


def test_quacks_texts_are_configs() -> None:
    (table,) = read_file(QUACK, "NVIDIA H200")
    assert table.problem.key[0].startswith("(True, (64, 64)")
    first, *_, last = table.measurements
    assert dict(first.candidate.config.kwargs) == {"tile_m": 128, "tile_n": 64, "cluster_m": 1}
    assert (first.median_ms, first.p20_ms, first.p80_ms) == (0.015625, 0.0140625, 0.01875)
    assert [m.ok for m in table.measurements] == [True, True, True, False]
    assert last.outcome is Outcome.RUNTIME_ERROR


def test_tokamax_results_are_read() -> None:
    (table,) = read_file(FILES / "tokamax" / "pruned.json")
    assert (table.problem.kernel.name, table.problem.device.name) == (
        "PallasMosaicGpuGatedLinearUnit",
        "NVIDIA H200",
    )
    assert [(a.dtype, a.shape) for a in table.problem.arguments[:2]] == [
        ("bfloat16", (512, 256)),
        ("bfloat16", (256, 2, 512)),
    ]
    slow, fast = table.measurements
    assert (slow.ms, fast.ms) == pytest.approx((0.052274, 0.043312), rel=1e-4)
    assert (slow.repeats, slow.compile_s) == (5, pytest.approx(0.146392, rel=1e-4))
    assert dict(slow.candidate.config.kwargs)["tile_m"] == 256


def test_metaschedules_failures_are_no_times_of_three_centuries() -> None:
    (table,) = read_file(RECORDS, None)
    assert (table.problem.device.backend, table.problem.kernel.name) == ("cpu", "main.C")
    assert [a.shape for a in table.problem.arguments] == [(64, 64)] * 3
    assert Counter(m.outcome for m in table.measurements) == {Outcome.OK: 12, Outcome.RUNTIME_ERROR: 6}
    assert table.measurements[0].ms == pytest.approx(0.16254218979)
    assert all(m.ms < 1000 for m in table.measurements if m.ok)
    kwargs = dict(table.measurements[0].candidate.config.kwargs)
    assert [kwargs[f"SamplePerfectTile4[{n}]"] for n in range(4)] == [1, 32, 2, 1]
    assert read_file(RECORDS, "AMD EPYC 9554")[0].problem.device.name == "AMD EPYC 9554"


def test_results_of_cuda_tile_are_a_table() -> None:
    class TileCompilerTimeoutError(Exception): ...

    timed = SimpleNamespace(config=SimpleNamespace(tile=64), mean_us=12.5, num_samples=5, error_margin_us=0.5)
    failed = (SimpleNamespace(tile=128), TileCompilerTimeoutError, "too long")
    result = SimpleNamespace(best=timed, successes=[timed], failures=[failed])
    table = cuda_tile_table(result, "gemm", Device("NVIDIA B200"), ["4096"])
    assert [(m.outcome, m.median_ms, m.repeats) for m in table.measurements] == [
        (Outcome.OK, 0.0125, 5),
        (Outcome.TIMEOUT, None, 0),
    ]
    assert [dict(m.candidate.config.kwargs) for m in table.measurements] == [{"tile": 64}, {"tile": 128}]
    assert Store(None).import_tables([table]) == 2


# --- choices without times ---

WINNERS = {
    "E=8,N=64,device_name=NVIDIA_H200.json": '{"triton_version": "3.6.0", "16": {"BLOCK_SIZE_M": 16}}',
    "sglang.json": '{"16": {"BLOCK_SIZE_M": 16, "num_warps": 4}}',
    "gemlite.json": '{"GEMV": {}, "GEMM": {"(1, 2)": {"BLOCK_SIZE_M": 16}}}',
    "fla.json": '{"kernel_name": "k", "autotune_entries": {"ab": {"config": {"kwargs": {"BK": 64}}}}}',
    "hash.best_config": '{"XBLOCK": 8, "num_warps": 4, "configs_hash": "ab", "time_taken_ms": 4}',
}


def winners(folder: Path) -> list[Path]:
    for name, text in WINNERS.items():
        (folder / name).write_text(text)
    recorded = [FILES / "tilelang" / "entry" / name for name in ("best_config.json", "latency.json")]
    best = next((FILES / "helion").glob("*.best_config"))
    return [*(folder / name for name in WINNERS), *recorded, FILES / "flashinfer" / "cache.json", best]


def test_choices_without_times_are_named(tmp_path: Path, capsys: Capture) -> None:
    for path in winners(tmp_path):
        assert format_of(path) is choices.FORMAT, path
        assert imported(path, *NAMED, store=tmp_path / "s") == 2
        captured = " ".join(capsys.readouterr().err.split())
        assert "holds choices, no times" in captured
        assert path.name in captured


# --- folders and damage ---


def test_a_folder_of_many_tools_is_read_whole_and_counted_by_kind(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "all"
    shutil.copytree(FILES, folder)
    (folder / "kernel_tuner" / "failures_T4.json").unlink()
    write_tables(folder / "ours.jsonl", [example_table()])
    assert imported(folder, *NAMED, store=tmp_path / "s") == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["kinds"] == {
        "helion": 2,
        "kernel-tuner": 2,
        "quack": 1,
        "tokamax": 1,
        "triton-cache": 1,
        "metaschedule": 1,
        "table": 1,
    }
    assert data["added"] == len(stored(tmp_path / "s")) == 51 + 8 + 4 + 2 + 5 + 18 + 15
    assert "passed over 5 files of no known format" in captured.err


def test_a_torn_cache_is_named_alone_and_among_others(tmp_path: Path, capsys: Capture) -> None:
    torn = tmp_path / "torn" / TRITON.name
    torn.parent.mkdir()
    torn.write_bytes(TRITON.read_bytes()[:400])
    assert imported(torn, *NAMED, store=tmp_path / "s") == 2
    assert "torn/scale_kernel.autotune.json" in capsys.readouterr().err
    assert imported(torn.parent, *NAMED, store=tmp_path / "s") == 2
    assert stored(tmp_path / "s") == []
    shutil.copy(QUACK, torn.parent)
    assert imported(torn.parent, *NAMED, store=tmp_path / "s") == 2
    assert "torn/scale_kernel.autotune.json" in capsys.readouterr().err
    assert len(stored(tmp_path / "s")) == 4


def whole_files(folder: Path) -> list[Path]:
    """One file of each format, small."""
    cache, table, ours = folder / "cache", folder / "metric_table_kernel_autotune.csv", folder / "ours.jsonl"
    cache.write_text(json.dumps(INDUCTOR))
    table.write_text(METRICS)
    write_tables(ours, [example_table()])
    trace, log = folder / "t.trace.jsonl", folder / "l.csv"
    trace.write_text("".join(HELION_TRACE.read_text().splitlines(keepends=True)[:8]))
    log.write_text("".join((FILES / "helion" / "q.csv").read_text().splitlines(keepends=True)[:6]))
    records = folder / "r.json"
    records.write_text("".join(RECORDS.read_text().splitlines(keepends=True)[:2]))
    database = folder / "TunedConfig_NVIDIA_H200_triton_3_6.db"
    with sqlite3.connect(database) as opened:
        opened.execute(
            f'CREATE TABLE "{FLAGGEMS_TABLE}" (key_0 INTEGER, "B" INTEGER, p50 FLOAT, p20 FLOAT, p80 FLOAT)'
        )
        opened.executemany(
            f'INSERT INTO "{FLAGGEMS_TABLE}" VALUES (1, ?, 0.5, 0.4, 0.6)', [(n,) for n in range(99)]
        )
    tuner = FILES / "kernel_tuner" / "failures.json"
    return [
        cache,
        table,
        ours,
        trace,
        log,
        records,
        database,
        tuner,
        TRITON,
        QUACK,
        FILES / "tokamax" / "pruned.json",
    ]


def contents(rows: list[Measurement]) -> set[str]:
    return {f"{m.candidate} {m.outcome} {m.median_ms}" for m in rows}


@pytest.mark.parametrize("count", [220, pytest.param(2_000, marks=pytest.mark.slow)])
def test_damaged_files_of_all_formats(tmp_path: Path, capsys: Capture, count: int) -> None:
    """Torn files give nothing that the whole one has not; no damage is an internal error, and each is named."""
    draw = random.Random(74)
    files = whole_files(tmp_path)
    known = {
        path: contents([m for t in read_file(path, "NVIDIA H200") for m in t.measurements]) for path in files
    }
    for n in range(count):
        path, raw = files[n % len(files)], files[n % len(files)].read_bytes()
        torn = n // len(files) % 2 == 0
        if torn:
            data = raw[: draw.randrange(len(raw))]
        else:
            mutable = bytearray(raw)
            for _ in range(draw.randint(1, 8)):
                mutable[draw.randrange(len(raw))] = draw.randrange(256)
            data = bytes(mutable)
        bad = tmp_path / f"bad{n}" / path.name
        bad.parent.mkdir()
        bad.write_bytes(data)
        store = tmp_path / f"store{n}"
        status = imported(bad, *NAMED, store=store)
        captured = capsys.readouterr()
        assert status in (0, 2), (path, status, captured.err)
        assert "Traceback" not in captured.err
        assert "internal error" not in captured.err
        if status == 2:
            assert bad.name in captured.err.replace("\n", "").replace(" ", ""), (path, captured.err)
        if torn:
            assert contents(stored(store)) <= known[path], path
            if (
                path.suffix == ".json"
                and path not in (RECORDS,)
                and path.name not in ("failures.json", "r.json")
            ):
                assert (status, stored(store)) == (2, []) or data.strip() == raw.strip()
        shutil.rmtree(bad.parent)
        shutil.rmtree(store, ignore_errors=True)


# --- many at once, and large ones ---


def _import_beside(words: list[str], ready: Any) -> None:
    ready.wait()
    raise SystemExit(main(words))


def tuner_cache(path: Path, start: int, stop: int) -> Path:
    rows = {
        f"{n}": {"x": n, "time": 1.0 + n / 7, "times": [1.0 + n / 7], "timestamp": f"2026-01-01 {n}"}
        for n in range(start, stop)
    }
    header = {
        "device_name": "NVIDIA A100",
        "kernel_name": "k",
        "problem_size": [1],
        "tune_params_keys": ["x"],
    }
    path.write_text(json.dumps({**header, "cache": rows}))
    return path


def test_two_imports_at_once_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    files = [tuner_cache(tmp_path / f"{n}.json", n * 9_000, n * 9_000 + 12_000) for n in range(2)]
    spawned = multiprocessing.get_context("spawn")
    ready = spawned.Event()
    words = [["import", str(path), "--store", str(tmp_path / "s")] for path in files]
    running = [spawned.Process(target=_import_beside, args=(each, ready)) for each in words]
    for process in running:
        process.start()
    ready.set()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0, 0]
    taken = [dict(m.candidate.config.kwargs)["x"] for m in stored(tmp_path / "s")]
    assert sorted(taken) == list(range(21_000))


def test_a_file_of_known_contents_is_read_no_more(tmp_path: Path, capsys: Capture, monkeypatch: Any) -> None:
    path = tuner_cache(tmp_path / "a.json", 0, 20_000)
    assert imported(path, store=tmp_path / "s") == 0
    assert shown(capsys)["added"] == 20_000
    copy = shutil.copy(path, tmp_path / "copy.json")
    with monkeypatch.context() as patch:
        patch.setattr("forecast_autotune.store.formats.kernel_tuner._Cache.row", None)  # would fail
        assert imported(copy, store=tmp_path / "s") == 0
    data = shown(capsys)
    assert (data["measurements"], data["added"], data["problems"]) == (20_000, 0, 1)
    assert main(["clear", "--yes", "--store", str(tmp_path / "s"), "--json"]) == 0
    capsys.readouterr()
    assert imported(copy, store=tmp_path / "s") == 0
    assert shown(capsys)["added"] == 20_000


def test_a_line_of_an_import_is_the_records_own() -> None:
    tables = [
        example_table(),
        *read_file(QUACK, "H200"),
        *read_file(FILES / "kernel_tuner" / "failures.json", "H200"),
    ]
    for m in (m for t in tables for m in t.measurements):
        assert line_of(m) == encode(m.to_json())


def test_a_fuller_record_of_a_problem_joins_the_first(tmp_path: Path) -> None:
    problem = Problem.of(Kernel("k"), (), Device("NVIDIA H200"))
    fuller = Problem(
        **{**{n: getattr(problem, n) for n in problem.__dataclass_fields__}, "ttir": {"a": "text"}}
    )
    rows = [Measurement(problem.id, Candidate(Config.of({"B": n})), Outcome.OK, 1.0) for n in range(2)]
    store = Store(tmp_path / "s")
    assert store.import_tables([Table(problem, rows[:1]), Table(fuller, rows[1:])]) == 2
    (table,) = Store(tmp_path / "s").tables()
    assert table.problem.ttir == {"a": "text"}
