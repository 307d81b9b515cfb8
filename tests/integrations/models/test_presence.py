"""A model that is not there is an error at once: wherever one is named on the command line, before any work."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forecast_autotune.commands import main
from forecast_autotune.errors import SettingsError
from forecast_autotune.llm.providers import provider
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.factory import surrogate_for
from forecast_autotune.surrogates.language_model.ensemble import EnsembleSurrogate
from forecast_integrations.models.factory import check


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy stands between us and a server."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def port() -> Iterator[int]:
    """Of somebody who takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def folder(path: Path, config: str) -> Path:
    path.mkdir(parents=True)
    (path / config).write_text("{}")
    return path


def test_what_is_there_passes(tmp_path: Path, port: int) -> None:
    model = folder(tmp_path / "model", "config.json")
    adapter = folder(tmp_path / "adapter", "adapter_config.json")
    check(f"transformers:{model}?adapter={adapter}")
    check("transformers:org/name")
    check(f"http://127.0.0.1:{port}/v1?model=m&kind=chat")
    provider().check(f"http://127.0.0.1:{port}/v1?model=m")


@pytest.mark.parametrize(
    ("text", "value", "remedy"),
    [
        ("transformers:/no/such/folder", "/no/such/folder does not exist", "correct the path"),
        ("transformers:org/name?adapter=~/missing/one", "~/missing/one does not exist", "correct the path"),
        ("recorded:/no/such.jsonl", "/no/such.jsonl does not exist", "llm ask --import"),
        ("recorded:/no/such.json", "/no/such.json is not", r"\.jsonl"),
        ("http://127.0.0.1:9/v1?model=m", "http://127.0.0.1:9/v1 does not", "start the server"),
        ("nonsense", "none of these", "transformers:PATH_OR_ID"),
    ],
)
def test_what_is_not_there_names_the_value_and_the_remedy(text: str, value: str, remedy: str) -> None:
    with pytest.raises(SettingsError, match=remedy) as error:
        check(text)
    assert value in str(error.value)


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"must hold config\.json"):
        check(f"transformers:{tmp_path}")


def test_offline_a_name_must_be_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SettingsError, match="hf download org/name"):
        check("transformers:org/name")
    kept = tmp_path / "models--org--name"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0123")
    with pytest.raises(SettingsError, match="hf download org/name"):
        check("transformers:org/name")  # a download that did not come to an end
    (kept / "snapshots" / "0123").mkdir(parents=True)
    check("transformers:org/name")


def test_a_server_that_does_not_answer_costs_little() -> None:
    begin = time.perf_counter()
    with pytest.raises(SettingsError):
        check("http://192.0.2.1/v1?model=m", connect_s=0.2)  # an address that is nobody's
    assert time.perf_counter() - begin < 20.0
    check("http://192.0.2.1/v1?model=m", contact=False)


@pytest.mark.parametrize(
    "command",
    [
        ["replay", "--llm"],
        ["eval", "--llm"],
        ["train", "calibrate-llm", "--llm"],
        ["search", "swiglu", "--llm"],
        ["search", "swiglu", "--surrogate=llm:recorded:/no/such.jsonl", "--llm"],
    ],
)
def test_commands_refuse_it_before_any_work(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    begin = time.perf_counter()
    assert main([*command, "recorded:/no/such.jsonl"]) != 0
    assert "/no/such.jsonl does not exist" in capsys.readouterr().err
    assert time.perf_counter() - begin < 30.0
    assert list(tmp_path.iterdir()) == []


def test_run_refuses_it_and_does_not_start_the_program(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"open({str(tmp_path / 'started')!r}, 'w')\n")
    monkeypatch.setenv("FORECAST_AUTOTUNE", "1")  # which `run` sets: it is taken back at the end
    monkeypatch.setenv("FORECAST_AUTOTUNE_LLM", "http://127.0.0.1:9/v1?model=m")
    assert main(["run", str(program)]) != 0
    assert "http://127.0.0.1:9/v1 does not" in capsys.readouterr().err
    assert not (tmp_path / "started").exists()


def test_a_decorated_call_warns_once_and_asks_a_server_that_may_still_come_up(tmp_path: Path) -> None:
    settings = Settings(llm="http://127.0.0.1:9/v1?model=m", cache_dir=tmp_path)
    with pytest.warns(UserWarning, match="start the server"):
        made = surrogate_for(settings)
    assert isinstance(made, EnsembleSurrogate)
    assert surrogate_for(settings) is made
