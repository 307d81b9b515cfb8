"""Sound files of every kind that is read from disk: a store of four problems, and files of other tools."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, replace
from pathlib import Path

from forecast_autotune.features.stored_facts import VERSION
from forecast_autotune.features.ttir.facts import TtirFacts, facts_to_json
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.records import Decision, Evidence, Kernel, Measurement, Outcome, Problem, RiskVerdict
from forecast_autotune.records.table import Table, table_lines, write_tables
from forecast_autotune.store import Store
from forecast_autotune.store.exchange.exports import write_export
from forecast_autotune.store.files import host_name
from forecast_autotune.testing import example_table
from forecast_autotune.variants import Variant
from forecast_autotune.variants.records import Check, Origin, Provenance

BASE = "0" * 64
"""Hash of the source that advice and variants belong to."""
DEAD = 2**22 + 1
"""More than any process id of Linux: nobody is launching anything."""


@dataclass(frozen=True)
class SampleFile:
    """A file to import, with what `import` is given besides."""

    path: Path
    options: tuple[str, ...] = ()


def sample_tables() -> list[Table]:
    """Two problems of one kernel, one of another kernel, and one of another device."""
    table = example_table(sizes=(16, 32, 64), warps=(2, 4))
    first = table.problem
    key = {"key": ("8192",)}
    other = replace(first, id="other-size", **key)
    kernel = replace(first, id="other-kernel", kernel=Kernel("softmax", source_sha256="1" * 64))
    device = replace(first, id="other-device", device=replace(first.device, name="other GPU"))
    return [Table(p, _rows(table, p)) for p in (first, other, kernel, device)]


def _rows(table: Table, problem: Problem) -> list[Measurement]:
    forecast = {"surrogate": "formula/1", "log2_ms": -1.25, "sd": 0.5, "p_fail": 0.01}
    rows = []
    for number, m in enumerate(table.measurements):
        failed = number == 5
        extra = {"message": "no such intrinsic"} if failed else {"forecast": forecast, "registers": 128}
        changes = {"median_ms": None, "p20_ms": None, "p80_ms": None} if failed else {}
        outcome = Outcome.COMPILE_ERROR if failed else Outcome.OK
        at = f"2026-01-0{1 + number}T00:00:00+00:00"
        rows.append(replace(m, problem=problem.id, outcome=outcome, at=at, extra=extra, **changes))
    return rows


def write_store(root: Path) -> None:
    """Fill a store: logs of two hosts, decisions with verdicts, facts, advice, variants, a launch that died."""
    store = Store(root)
    for table in sample_tables():
        for measurement in table.measurements:
            store.add(table.problem, measurement)
        verdict = RiskVerdict("formula/1", 0.05, 0.06, beaten=False, share=0.5)
        chosen = table.measurements[0]
        made = Decision(
            *(table.problem.id, chosen.candidate, Evidence.MEASURED, "measured 4 of 6", 0.05, 0.02, 6, 4),
            median_ms=chosen.ms,
            rounds=("the most uncertain", "the rest is slower"),
            surrogate="formula/1",
            shipped_risk=0.05,
            verdicts=(verdict,),
        )
        store.put_decision(table.problem, made)
        unit = ["BLOCK=16", [8], facts_to_json(TtirFacts())]
        store.put_facts(table.problem, {"version": VERSION, "units": [unit]})
        with store.watch(table.problem, table.measurements[1].candidate):
            for note in root.glob("v1/*/*/running-*.json"):
                if f"-{DEAD}.json" not in note.name:
                    stem = note.name.rpartition("-")[0]
                    note.with_name(f"{stem}-{DEAD}.json").write_bytes(note.read_bytes())
    text = "def cost(config, args, device, launch):\n    return 1 + config.BLOCK\n"
    for source in (BASE, "1" * 64):
        store.put_advice(Advice("example", source, text, "somebody", at="2026-01-31T00:00:00+00:00"))
    for number in range(2):
        source = f"def example(x, n):\n    return {number}\n"
        variant = Variant.of("example", BASE, source, Provenance(Origin.HAND, "somebody"))
        store.put_variant(variant, [Check("example-gpu-cuda90", "fp16", passed=True)])
    for log in root.glob("v1/*/softmax-*/log-*.jsonl"):
        log.rename(log.with_name("log-elsewhere.jsonl"))
    assert host_name() != "elsewhere"


def write_imports(folder: Path) -> list[SampleFile]:
    """Files that `import` takes: tables, packed and not, and files of five other tools."""
    folder.mkdir(parents=True)
    tables = sample_tables()
    write_tables(folder / "table.jsonl", tables)
    write_tables(folder / "packed.jsonl.gz", tables)
    (folder / "helion.csv").write_text(_helion_log(), encoding="utf-8")
    about = {"run_id": "r1", "kernel_name": "rms", "hardware": "NVIDIA B200", "input_shapes": "[(1, 64)]"}
    (folder / "helion.meta.jsonl").write_text(json.dumps(about) + "\n", encoding="utf-8")
    cache = json.dumps(_kernel_tuner_cache(), indent=1)
    (folder / "tuner.json").write_text(cache, encoding="utf-8")
    (folder / "tuner.json.gz").write_bytes(gzip.compress(cache.encode(), mtime=0))
    for number in range(3):
        entry = {"kwargs": {"BLOCK": 64 << number}, "num_warps": 4, "num_ctas": 1, "num_stages": 3}
        timings = {"key": [str(number)], "configs_timings": [[entry, [0.2, 0.19, 0.21]]]}
        path = folder / "triton" / f"D{number}" / "example.autotune.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(timings), encoding="utf-8")
    named = ("--device-name", "NVIDIA H200")
    measured = [table for table in tables if any(m.ok for m in table.measurements)]
    (dejavu, *_) = write_export("triton-dejavu", folder / "dejavu", measured, []).files
    (folder / "mm.txt").write_text(_autoheuristic_log(), encoding="utf-8")
    return [
        SampleFile(folder / "table.jsonl"),
        SampleFile(folder / "packed.jsonl.gz"),
        SampleFile(folder / "helion.csv", named),
        SampleFile(folder / "helion.meta.jsonl", named),
        SampleFile(folder / "tuner.json"),
        SampleFile(folder / "tuner.json.gz"),
        SampleFile(folder / "triton", named),
        SampleFile(dejavu, named),
        SampleFile(folder / "mm.txt", named),
    ]


def table_text() -> list[str]:
    """The lines of the sample tables."""
    return list(table_lines(sample_tables()))


def _helion_log() -> str:
    rows = ["run_id,status,perf_ms,compile_time_s,config"]
    for number in range(6):
        status, ms = ("error", "") if number == 5 else ("ok", f"{1.0 + number / 8}")
        rows.append(f'r1,{status},{ms},0.4,"Config(block_sizes=[{16 << number}, 64], num_warps=4)"')
    return "\n".join(rows) + "\n"


def _autoheuristic_log() -> str:
    about = {"shared_memory": 232448, "device_capa": [9, 0], "name": "mm"}
    about |= {"numerical_features": ["m", "k", "n"], "categorical_features": ["mat1_dtype"]}
    tiles = "type=triton_BLOCK-M=64_BLOCK-K=16_BLOCK-N={}_numstages=2_numwarps=4"
    rows = [f"64,32,128,torch.float16,{tiles.format(16 << number)},0.{number + 1}" for number in range(4)]
    failed = "64,32,128,torch.float16,extern_mm,inf"
    return "\n".join([json.dumps(about), "m,k,n,mat1_dtype,choice,feedback", *rows, failed]) + "\n"


def _kernel_tuner_cache() -> dict[str, object]:
    rows = {f"{x},tiled": {"block_size_x": x, "method": "tiled", "time": 0.1 * x} for x in (16, 32, 64)}
    return {
        "device_name": "NVIDIA RTX A4000",
        "kernel_name": "convolution",
        "problem_size": [4096, 2048],
        "tune_params_keys": ["block_size_x", "method"],
        "tune_params": {"block_size_x": [16, 32, 64], "method": ["tiled"]},
        "objective": "time",
        "cache": rows,
    }
