"""torch.compile on a CPU, for real: pruning, rounds, hooks, a warm store, and what is left for others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
HOOKED = """AlgorithmSelectorCache.__call__ AlgorithmSelectorCache.benchmark AsyncCompile.triton AsyncCompile.wait
AlgorithmSelectorCache.benchmark_choice AlgorithmSelectorCache.benchmark_choices
AlgorithmSelectorCache.do_autotuning AsyncAutotuner.get_results
CachingAutotuner.benchmark_all_configs CachingAutotuner.coordinate_descent_tuning
Benchmarker.benchmark_cpu CompilePackage.source_id_from_fn FxGraphHashDetails.__init__
InductorBenchmarker.benchmark_gpu InductorChoices._finalize_template_configs
InductorChoices.get_template_configs TritonScheduling.benchmark_codegened_module
TritonTemplate.maybe_append_choice UserDefinedTritonKernel.__init__
preprocessing[2]
torch._inductor.async_compile._worker_compile_triton
torch._inductor.select_algorithm._log_autotune_exceptions torch._inductor.select_algorithm.as_completed"""
ALL = 6
"""Choices of the worker's custom operation."""


def environment(folder: Path, cache: str, **more: str) -> dict[str, str]:
    found = {k: v for k, v in os.environ.items() if not k.startswith(("FORECAST_AUTOTUNE", "TORCH"))}
    found |= {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(folder / cache), "OMP_NUM_THREADS": "1"}
    # Workers would import torch once more to compile a handful of small files.
    found |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    found |= {"TORCHINDUCTOR_VEC_ISA_OK": "1"}
    return {**found, "TRITON_CACHE_DIR": str(folder / "triton")} | more


def answer_of(worker: str, given: dict[str, str], *words: object) -> Any:
    """The output of a program of this folder, with its errors."""
    command = [sys.executable, str(Path(__file__).with_name(worker)), *map(str, words)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


def step(folder: Path, name: str, **more: str) -> Any:
    """One step in a process, with compiler caches and stores of its own."""
    return answer_of("artefacts_worker.py", environment(folder, name, **more), name, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compile")


@pytest.fixture(scope="module")
def session(folder: Path) -> Any:
    return step(folder, "session")


def test_each_operation_and_the_end_get_a_line(session: dict[str, Any]) -> None:
    lines = [x for x in session["stderr"].splitlines() if x.startswith("forecast_autotune ")]
    first, *_, last = lines
    operation = "forecast_autotune fatest::product_autotuned(32x256, 256x64)"
    assert first.startswith(f"{operation}: 6 candidates, all forecast, 3 measured, 3 trusted")
    assert last.startswith("forecast_autotune torch.compile: 4 operations, 1 of them known, 24 choices")
    assert "2 operations, 1 of them known, 12 choices considered, 3 compiled" in session["tally"]


def test_everything_is_hooked_once_and_given_back_exactly(session: dict[str, Any]) -> None:
    assert session["hooked"] == sorted(HOOKED.split())
    assert session["hooked_again"] == []
    assert session["left"] == []
    assert len(session["plain"]["rounds"][0]) == ALL


def test_nested_services_end_in_order(session: dict[str, Any]) -> None:
    assert session["nested"]
    assert session["outer_is_back"]


def test_rows_that_were_stored_later_do_not_count(session: dict[str, Any]) -> None:
    assert [session[name]["autotunes"] for name in ("sure", "again", "before")] == [1, 0, 1]


SCRIPT = """
import sys
assert "torch" not in sys.modules
import torch
assert "torch._inductor.select_algorithm" not in sys.modules, "the entry point must not load Inductor"
torch.set_num_threads(1)
layer, x = torch.nn.Linear(128, 256).eval(), torch.randn(64, 128)
torch._inductor.config.freezing = True
with torch.no_grad():
    options = {"max_autotune_gemm_backends": "CPP,ATEN"}
    compiled = torch.compile(layer, backend="forecast_autotune", options=options)
    print("close", torch.allclose(compiled(x), layer(x), atol=1e-3))
print("listed", "forecast_autotune" in torch._dynamo.list_backends())
"""


@pytest.fixture(scope="module")
def installed(folder: Path) -> Path:
    """Entry points as an installer writes them: an editable installation may be older than pyproject."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = folder / "site" / "forecast_autotune_entries-1.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: forecast-autotune-entries\nVersion: 1\n")
    lines = []
    for group in ("torch.backends", "torch_dynamo_backends"):
        lines += [f"[{group}]", *(f"{k} = {v}" for k, v in project["entry-points"][group].items())]
    (found / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return found.parent


@pytest.mark.slow
def test_one_variable_serves_a_program_that_knows_nothing_of_us(folder: Path, installed: Path) -> None:
    script = folder / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    more = {"PYTHONPATH": f"{ROOT}:{installed}", "FORECAST_AUTOTUNE_CACHE_DIR": str(folder / "by_variable")}
    on = environment(folder, "variable", FORECAST_AUTOTUNE="1", **more)
    done = subprocess.run([sys.executable, script], env=on, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["close True", "listed True"], done.stderr[-3000:]
    assert "forecast_autotune packed_linear" in done.stderr
    assert list((folder / "by_variable").rglob("log-*.jsonl"))
    words = [sys.executable, "-m", "forecast_autotune", "run", "--json", str(script)]
    again = environment(folder, "run", **more)
    served = subprocess.run(words, env=again, capture_output=True, text=True, check=False)
    counts = json.loads(served.stdout.splitlines()[-1])
    assert (counts["decisions"], counts["stored"]) == (1, 1), served.stderr[-3000:]
    assert "close True" in served.stderr


# --- what is compiled with us runs without us ---


@pytest.fixture(scope="module")
def made(folder: Path) -> Any:
    return step(folder, "make")


@pytest.fixture(scope="module")
def reused(folder: Path, made: Any) -> Any:
    return step(folder, "reuse")


def test_a_graph_is_tuned_once_and_then_found(made: dict[str, Any]) -> None:
    assert made["first"] == {"hit": 0, "miss": 1, "graphs": 1, "right": True, "rounds": 1}
    assert made["again"] == {"hit": 1, "miss": 0, "graphs": 1, "right": True, "rounds": 0}


def test_a_package_chosen_by_us_runs_where_we_are_unknown(folder: Path, made: dict[str, Any]) -> None:
    (chosen,) = made["packaged"]
    assert "s=4" in chosen
    assert step(folder, "load", TORCH_DEVICE_BACKEND_AUTOLOAD="0") == {
        "right": True,
        "ours": [],
        "stderr": "",
    }


def test_saved_caches_serve_the_same_rules_alone(made: dict[str, Any], reused: dict[str, Any]) -> None:
    """Another process with an empty store: what was compiled with us is nothing to those without."""
    assert {"inductor", "aot_autograd"} <= set(made["kinds"])
    assert (reused["plain"]["hit"], reused["plain"]["miss"]) == (0, 1)
    assert (reused["known"]["square"]["hit"], reused["known"]["square"]["miss"]) == (1, 0)
    assert reused["known"]["product"] == {"hit": 1, "miss": 0, "graphs": 1, "right": True, "rounds": 0}


def test_other_options_compile_anew_from_the_store(reused: dict[str, Any]) -> None:
    assert reused["mode"] == {"hit": 0, "miss": 1, "graphs": 1, "right": True, "rounds": 0}


def test_a_dynamic_graph_is_compiled_once_for_all_sizes(reused: dict[str, Any]) -> None:
    assert reused["dynamic"]["right"]
    assert (reused["dynamic"]["miss"], reused["dynamic"]["graphs"]) == (1, 1)
