"""torch.compile on a CPU, for real: pruning, rounds, harvest, a warm store, failures, cache keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.printable import utc_now

pytest.importorskip("torch")


pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).with_name("worker.py")
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
    return {**found, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TRITON_CACHE_DIR": str(folder / "triton")} | more


def start(folder: Path, cache: str, *words: str, **more: str) -> subprocess.Popen[str]:
    return run([sys.executable, str(WORKER), *words], environment(folder, cache, **more))


def run(command: list[str], given: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=given, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> Any:
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-5000:]
    found = json.loads(out.splitlines()[-1])
    return {**found, "stderr": errors} if isinstance(found, dict) else found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compile")


@pytest.fixture(scope="module")
def under_way(folder: Path) -> dict[str, subprocess.Popen[str]]:
    """The two longest, side by side: they share nothing."""
    session = start(folder, "first", "session", str(folder / "store"))
    return {"session": session, "listened": start(folder, "listened", "listen", str(folder / "heard"))}


@pytest.fixture(scope="module")
def session(under_way: dict[str, subprocess.Popen[str]]) -> Any:
    return finish(under_way["session"])


@pytest.fixture(scope="module")
def ranks(folder: Path, session: dict[str, Any]) -> list[dict[str, Any]]:
    """Two processes at a time with the store that `session` left, as it was then."""
    words = ("warm", str(folder / "store"), utc_now())
    return [finish(p) for p in [start(folder, f"rank{i}", *words) for i in range(2)]]


@pytest.fixture(scope="module")
def listened(under_way: dict[str, subprocess.Popen[str]]) -> Any:
    return finish(under_way["listened"])


def splits(choices: list[str]) -> list[str]:
    """The choices without the counter in their names; the library's is called `library`."""
    names = (c.partition("split_s__")[2].rpartition("_")[0] for c in choices)
    return sorted(name or "library" for name in names)


def test_each_operation_and_the_end_get_a_line(session: dict[str, Any]) -> None:
    lines = [x for x in session["stderr"].splitlines() if x.startswith("forecast_autotune ")]
    first, *_, last = lines
    operation = "forecast_autotune fatest::product_autotuned(32x256, 256x64)"
    assert first.startswith(f"{operation}: 6 candidates, all forecast, 3 measured, 3 trusted")
    assert last.startswith("forecast_autotune torch.compile: 3 operations, 1 of them known, 18 choices")
    assert "2 operations, 1 of them known, 12 choices considered, 3 compiled" in session["tally"]


def test_everything_is_hooked_once_and_given_back_exactly(session: dict[str, Any]) -> None:
    assert session["hooked"] == sorted(HOOKED.split())
    assert session["hooked_again"] == []
    assert session["left"] == []
    assert len(session["plain"]["rounds"][0]) == ALL


def test_nested_services_end_in_order(session: dict[str, Any]) -> None:
    assert session["nested"]
    assert session["outer_is_back"]


def test_a_warm_store_in_a_fresh_process_needs_no_benchmark(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert (found["known"]["autotunes"], found["known"]["rounds"]) == (0, [])
        assert found["known"]["correct"]
        assert "2 operations, 1 of them known" in found["tally"]


def test_ranks_with_one_store_keep_the_same_choices(ranks: list[dict[str, Any]]) -> None:
    kept = [[splits(r) for r in found["new"]["rounds"]] for found in ranks]
    assert kept == [[["1", "2", "library"]]] * 2


def test_listening_keeps_the_timings_and_changes_nothing(listened: dict[str, Any]) -> None:
    assert (listened["first"]["autotunes"], listened["first"]["choices"]) == (1, [2])
    assert [row[0] for row in listened["stored"]] == ["aten::_mkl_linear", "cpp::CppMicroGemmFP32Vec"]
    assert listened["identity"] == ""


def test_inductors_own_cached_timings_are_not_stored_again(listened: dict[str, Any]) -> None:
    assert (listened["replay"]["autotunes"], listened["replay"]["choices"]) == (0, [2])
    assert listened["stored_after_replay"] == listened["stored"]


def test_what_listening_has_learned_is_used(listened: dict[str, Any]) -> None:
    for name in ("told", "known"):
        assert (listened[name]["autotunes"], listened[name]["choices"]) == (0, [])
        assert listened[name]["correct"]
    assert listened["stored_after_told"] == listened["stored"]


def test_compiled_graphs_are_shared_only_under_the_same_rules(folder: Path) -> None:
    """On, off, on, off with another surrogate in between: nobody gets what somebody else compiled."""
    words = ("caching", str(folder / "unused"))
    found = finish(start(folder, "shared", *words, "1", "off"))
    found += finish(start(folder, "shared", *words, "1", "2", "off"))  # of another process, too
    assert [one["hit"] + one["miss"] for one in found] == [1] * 5
    assert [one["hit"] for one in found] == [0, 0, 1, 0, 1]


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


def step(folder: Path, name: str, **more: str) -> Any:
    """One step in a process, with compiler caches and stores of its own."""
    folder = folder / "artefacts"
    folder.mkdir(exist_ok=True)
    quick = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    command = [sys.executable, str(Path(__file__).with_name("artefacts_worker.py")), name, str(folder)]
    return finish(run(command, environment(folder, name, **quick, **more)))


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
