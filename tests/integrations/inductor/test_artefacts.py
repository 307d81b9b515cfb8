"""What is compiled with us runs without us, and caches serve those who compile by the same rules alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.integrations.inductor.test_compile import environment, finish, run

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("artefacts_worker.py")


def step(folder: Path, name: str, **more: str) -> Any:
    """One step in a process and with compiler caches of its own."""
    quick = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    command = [sys.executable, str(WORKER), name, str(folder)]
    return finish(run(command, environment(folder, name, **quick, **more)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artefacts")


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
