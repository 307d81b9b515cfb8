"""Exports read by the packages that they are for: Kernel Tuner's own simulation and schema, AutoHeuristic's own log."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import sys
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton

from forecast_autotune.records import (
    Argument,
    Candidate,
    Config,
    Device,
    Kernel,
    Measurement,
    Outcome,
    Problem,
)
from forecast_autotune.records.table import Table
from forecast_autotune.store.exchange.autoheuristic import import_autoheuristic
from forecast_autotune.store.exchange.exports import write_export
from forecast_autotune.store.exchange.exports.tuned_problem import triton_text
from forecast_autotune.store.exchange.kernel_tuner import import_kernel_tuner, is_kernel_tuner_cache
from forecast_autotune.store.exchange.triton_dejavu import import_triton_dejavu
from tests.integrations.null import double

H200 = Device("NVIDIA H200", "cuda", "90", 132, 232448)


def table(problem: Problem, times: dict[Candidate, float]) -> Table:
    return Table(
        problem, [Measurement(problem.id, c, Outcome.OK, t, compile_s=0.5) for c, t in times.items()]
    )


def matmul() -> Table:
    problem = Problem.of(Kernel("matmul"), (), H200, key=["4096"])
    listed = [Candidate(Config.of({"BLOCK": b}, num_warps=w)) for b in (64, 128) for w in (4, 8)]
    return table(problem, {c: 0.5 + 0.1 * i for i, c in enumerate(listed)})


def test_kernel_tuner_simulates_a_run_from_an_exported_cache(tmp_path: Path) -> None:
    pytest.importorskip("kernel_tuner", reason="needs the package kernel_tuner")
    from kernel_tuner import tune_kernel

    (path,) = write_export("kernel-tuner", tmp_path, [matmul()], []).files
    header = json.loads(path.read_text())
    results, about = tune_kernel(
        "matmul",
        "",
        header["problem_size"],
        [],
        header["tune_params"],
        cache=str(path),
        simulation_mode=True,
        strategy="brute_force",
        lang="CUDA",
        quiet=True,
    )
    assert sorted(r["time"] for r in results) == pytest.approx([0.5, 0.6, 0.7, 0.8])
    assert (about["best_config"]["BLOCK"], about["best_config"]["num_warps"]) == (64, 4)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_a_cache_that_kernel_tuner_wrote_comes_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel in C, which Kernel Tuner compiles and runs on this machine."""
    pytest.importorskip("kernel_tuner", reason="needs the package kernel_tuner")
    from kernel_tuner import tune_kernel

    source = """
    float twice(float *out, float *x) {
        for (int i = 0; i < 1024; i += LANES)
            for (int lane = 0; lane < LANES; lane++) out[i + lane] = 2 * x[i + lane];
        return 1.0 + LANES;
    }
    """
    x = np.ones(1024, np.float32)
    path = tmp_path / "cache.json"
    given: dict[str, Any] = {"LANES": [1, 2, 3, 4]}
    monkeypatch.chdir(tmp_path)  # it compiles in the working directory
    options = {"cache": str(path), "lang": "C", "restrictions": ["LANES != 3"], "quiet": True}
    tune_kernel("twice", source, 1024, [np.zeros_like(x), x], given, **options)
    assert is_kernel_tuner_cache(path)
    imported = import_kernel_tuner(path, Device("this machine", "cpu"))
    found = {dict(m.candidate.config.kwargs)["LANES"]: m for m in imported.measurements}
    assert {lanes: m.ms for lanes, m in found.items()} == {1: 2.0, 2: 3.0, 4: 5.0}, (
        "what the function returned"
    )
    assert imported.problem.kernel.name == "twice"


def test_t4_results_keep_the_schema_of_the_package(tmp_path: Path) -> None:
    pytest.importorskip("kernel_tuner", reason="needs the package kernel_tuner")
    import jsonschema

    (path,) = write_export("kernel-tuner-t4", tmp_path, [matmul()], []).files
    schema = files("kernel_tuner") / "schema" / "T4" / "1.0.0" / "results-schema.json"
    jsonschema.validate(json.loads(path.read_text()), json.loads(schema.read_text(encoding="utf-8")))


def test_a_config_is_written_as_triton_writes_it() -> None:
    given = triton.Config({"BLOCK": 64, "GROUP": 8}, num_warps=8, num_stages=2)
    ours = triton_text(Config.of({"BLOCK": 64, "GROUP": 8}, num_warps=8, num_stages=2))
    assert str(given).startswith(ours)


def test_triton_dejavu_restores_an_exported_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec("triton_dejavu")
    if found is None:
        pytest.skip("needs the package triton_dejavu")
    # Its storage alone, 0.7.5: its tuner cannot be imported beside a current Triton, nor without a device.
    package = ModuleType("triton_dejavu")
    package.__path__ = list(found.submodule_search_locations or ())
    package.__dict__["__version__"] = "0.7.5"
    monkeypatch.setitem(sys.modules, "triton_dejavu", package)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setenv("TRITON_DEJAVU_STORAGE", str(tmp_path / "dejavu"))
    (tmp_path / "dejavu").mkdir()
    storage = importlib.import_module("triton_dejavu.dejavu_storage")

    monkeypatch.setattr(
        storage, "_get_weak_fn_hash", lambda fn: fn.__name__
    )  # names a folder; needs an old Triton
    place = (double, "configs", "key", "options")
    assert storage.DejavuStorage().restore_autotuner_cache(*place) == {}
    (theirs,) = (tmp_path / "dejavu").rglob("cache.json")
    problems = [
        Problem.of(Kernel("double", extra={"module": double.__module__}), (), H200, key=[n, "torch.float16"])
        for n in ("1024", "2048")
    ]
    best = [Candidate(Config.of({"BLOCK": b, "EVEN": b > 64}, num_warps=8, num_stages=2)) for b in (64, 128)]
    given = [
        table(p, {c: 0.5, matmul().measurements[0].candidate: 0.9})
        for p, c in zip(problems, best, strict=True)
    ]
    (ours,) = write_export("triton-dejavu", tmp_path, given, []).files
    assert json.loads(ours.read_text())["signature"] == json.loads(theirs.read_text())["signature"]
    theirs.write_text(ours.read_text())
    restored = storage.DejavuStorage()
    cache = restored.restore_autotuner_cache(*place)
    assert {key: str(config) for key, config in cache.items()} == {
        (n, "torch.float16"): str(triton.Config({"BLOCK": b, "EVEN": b > 64}, num_warps=8, num_stages=2))
        for n, b in (("1024", 64), ("2048", 128))
    }
    # What it adds joins ours: a key that is there already is not added under another text.
    timings = {key: [0.3, 0.2, 0.4] for key in (*cache, ("4096", "torch.float16"))}
    more = {**cache, ("4096", "torch.float16"): triton.Config({"BLOCK": 256})}
    restored.add_autotuner_cache(more, *place, 4, timings, 100, 25, 1.0, False, ["n"])
    written = json.loads(theirs.read_text())
    assert list(written["cache"]) == [str((n, "torch.float16")) for n in ("1024", "2048", "4096")]
    assert written["timings"]["('1024', 'torch.float16')"] == [0.5, 0.5, 0.5]
    # And what it has written is read.
    imported = import_triton_dejavu(theirs, H200)
    assert [(t.problem.key[0], t.measurements[0].ms) for t in imported] == [
        ("1024", 0.5),
        ("2048", 0.5),
        ("4096", 0.3),
    ]
    assert str(imported[0].measurements[0].candidate) == str(best[0])


def test_autoheuristic_adds_to_an_exported_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config
    from torch._inductor.autoheuristic.autoheuristic import AutoHeuristic
    from torch._inductor.autoheuristic.autoheuristic_utils import AHContext, context_add_strides
    from torch._inductor.autoheuristic.autoheuristic_utils import context_add_using_tf32 as add_precision

    operands = [
        Argument("in0", "tensor", "fp16", (64, 32), (32, 1)),
        Argument("in1", "tensor", "fp16", (32, 128), (1, 32)),
        Argument("out", "tensor", "fp16", (64, 128), (128, 1)),
    ]
    here = Device("cpu", "cpu", "", 0, 0)
    problem = Problem.of(Kernel("mm", "inductor"), operands, here, key=["precision=highest"])
    blocks = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 16}
    times = {
        Candidate(Config.of(blocks, num_warps=4, num_stages=2), "triton::mm"): 0.5,
        Candidate(Config.of({}), "aten::mm"): 0.25,
        Candidate(Config.of({}), "decompose_k"): 0.75,
    }
    report = write_export("autoheuristic", tmp_path, [table(problem, times)], [])
    (path,) = report.files
    assert path == tmp_path / "cpu" / "mm.txt"
    assert report.measurements == 2, "decompose-k has no name in such a log"

    context = AHContext()
    for name, value in (("m", 64), ("k", 32), ("n", 128)):
        context.add_feature(name, value)
    for name in ("mat1_dtype", "mat2_dtype"):
        context.add_feature(name, torch.float16, is_categorical=True)
    context_add_strides(context, "mat1", (32, 1))
    context_add_strides(context, "mat2", (1, 32))
    context.add_feature("mat1_iscontig", True, is_categorical=True)
    context.add_feature("mat2_iscontig", False, is_categorical=True)
    add_precision(context, torch.float16)
    choice = "type=triton_BLOCK-M=64_BLOCK-K=16_BLOCK-N=32_numstages=2_numwarps=4"
    before = path.read_text().splitlines()
    monkeypatch.setattr("torch._inductor.autoheuristic.autoheuristic.get_gpu_shared_memory", lambda: 0)
    monkeypatch.setattr(config, "autoheuristic_log_path", str(path))
    made: Any = AutoHeuristic(lambda: "", [choice], None, context, "mm")
    made.save_data(choice, 0.5)  # raises where the first line, of the device and the features, is another
    after = path.read_text().splitlines()
    assert after[:-1] == before
    assert after[-1] in before, "the same choice of the same product, in the same columns"
    # And what it has written is read.
    (imported,) = import_autoheuristic(path, here)
    assert [m.ms for m in imported.measurements if m.candidate.variant == "triton::mm"] == [0.5, 0.5]
