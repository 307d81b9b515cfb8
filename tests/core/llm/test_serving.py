"""From FORECAST_AUTOTUNE_LLM to decisions and commands, against a real server that can fail."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.commands import main
from forecast_autotune.llm.calibration import FILE, calibration_path, write
from forecast_autotune.records.table import write_tables
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.factory import calibration_paths, open_backend, surrogate_for
from forecast_autotune.testing import query_of
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.splits import kernel_of
from tests.core.captured_output import Capture
from tests.core.llm.words import TABLE, calibrated, thinned
from tests.core.tuning.loop import Bench, decide
from tests.integrations.models.faults import stall
from tests.integrations.models.faulty_server import FaultyServer


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer() as running:
        yield running


def spec(server: FaultyServer) -> str:
    return f"{server.url}?model=m&kind=completions&attempts=1"


def settings(server: FaultyServer, cache: Path, **more: Any) -> Settings:
    return Settings(llm=spec(server), cache_dir=cache, workers=1).with_(**more)


def vouched(server: FaultyServer, cache: Path) -> None:
    """A calibration in the cache directory that believes in the invented model, whatever it says.

    Loading the client takes a busy machine longer than an answer is worth, so it is loaded before the question.
    """
    importlib.import_module("forecast_integrations.models.http.request")
    name = open_backend(spec(server), cache).name
    write(
        calibration_path(name, cache),
        replace(calibrated(saved=1.0), scope=replace(calibrated().scope, mass=0.0)),
    )


def test_without_a_model_it_is_what_ships() -> None:
    assert surrogate_for(Settings()) is default_surrogate(None)


@pytest.mark.parametrize("text", ["nonsense", "transformers:", "http://h:1/v1", "ftp://x?model=m"])
def test_a_model_that_is_named_wrongly_costs_a_warning(text: str, tmp_path: Path) -> None:
    """And every decision says why the model was not asked."""
    with pytest.warns(UserWarning, match="FORECAST_AUTOTUNE_LLM"):
        result = surrogate_for(Settings(llm=text, cache_dir=tmp_path / text.replace("/", "_")))
    decision = decide(Store(None), Bench(TABLE), table=TABLE, surrogate=result)
    assert not decision.llm.asked
    assert "language model not asked: " in decision.reason


def test_a_damaged_calibration_costs_a_warning(server: FaultyServer, tmp_path: Path) -> None:
    path = calibration_path(open_backend(spec(server), tmp_path).name, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.warns(UserWarning, match="calibrate-llm"):
        result = surrogate_for(settings(server, tmp_path))
    assert result.version == default_surrogate(None).version
    part = result.forecast(query_of(TABLE)).consultation
    assert "calibrate-llm" in part.why


def test_a_calibration_beside_the_adapter_comes_first(tmp_path: Path) -> None:
    adapter, weights = tmp_path / "adapter", tmp_path / "model"
    adapter.mkdir()
    weights.mkdir()
    result = calibration_paths(f"transformers:{weights}?adapter={adapter}", "name", tmp_path)
    assert result == [adapter / FILE, weights / FILE, calibration_path("name", tmp_path)]
    assert calibration_paths("transformers:hub/name", "name", tmp_path) == [
        calibration_path("name", tmp_path)
    ]


def test_a_decision_asks_the_server_and_keeps_what_it_said(server: FaultyServer, tmp_path: Path) -> None:
    vouched(server, tmp_path)
    store = Store(None)
    decision = decide(store, Bench(TABLE), table=TABLE, surrogate=surrogate_for(settings(server, tmp_path)))
    assert server.requests
    assert "at weight" in decision.reason
    notes = [m.extra["forecast"] for m in store.measurements(TABLE.problem)]
    assert any("llm" in note for note in notes if isinstance(note, dict))


def test_a_server_that_stalls_does_not_change_the_decision(tmp_path: Path) -> None:
    with FaultyServer(lambda path, body: stall) as server:
        vouched(server, tmp_path)
        plain = decide(Store(None), Bench(TABLE), table=TABLE, surrogate=default_surrogate(None))
        with warnings.catch_warnings(record=True) as answer:
            warnings.simplefilter("always")
            result = decide(
                Store(None),
                Bench(TABLE),
                table=TABLE,
                surrogate=surrogate_for(settings(server, tmp_path, llm_timeout_s=0.2)),
            )
    assert server.requests
    assert (result.chosen, result.measured) == (plain.chosen, plain.measured)
    assert len([w for w in answer if "language model" in str(w.message)]) <= 1


def test_surrogates_load_no_torch() -> None:
    rooms = "surrogates.language_model"
    modules = ("surrogates.factory", f"{rooms}.ensemble", f"{rooms}.questions", "llm.gate", "llm.calibration")
    program = "import sys\n" + "\n".join(f"import forecast_autotune.{m}" for m in modules)
    program += "\nprint(sorted({'torch', 'triton', 'transformers', 'jinja2'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_an_evaluation_has_the_model_beside_the_others(
    server: FaultyServer, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path))
    tables, every = str(tmp_path / "tables.jsonl"), load(shipped_tables())
    kernels = ("softmax", "transpose", "layer_norm", "swiglu")  # of four families
    few = [next(t for t in every if kernel_of(t.problem) == name) for name in kernels]
    write_tables(Path(tables), [thinned(table, slice(20)) for table in few])
    assert main([
        "eval", tables, "--methods", "analytic", "--llm", spec(server), "--seeds", "1", "--json",
        "--leave-out", "family", "--subject", "learned+llm",
    ]) == 0  # fmt: skip
    result = json.loads(capsys.readouterr().out)
    assert list(result["methods"]) == ["analytic", "llm", "learned+llm"]
    assert result["methods"]["learned+llm"]["figures"]["static.top1"]["value"] >= 0.0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train", "calibrate-llm"], "--llm"),
        (["train", "calibrate-llm", "--llm", "x", "--answers", "answers.txt"], ".jsonl"),
        (["eval", "--subject", "llm"], "--subject"),
    ],
)
def test_mistakes_are_refused_before_anything_is_asked(
    arguments: list[str], complaint: str, capsys: Capture
) -> None:
    status = main(arguments)
    assert status == 2
    assert complaint in capsys.readouterr().err
