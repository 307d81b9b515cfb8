"""`doctor` on the language model: every part named, no key shown, no server contacted unasked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.commands import main
from forecast_autotune.llm.calibration import FILE, BlendWeight, calibration_path, write
from forecast_autotune.surrogates.factory import open_backend
from forecast_integrations.commands.doctor_model import CALIBRATION_ROW, MODEL_ROW
from forecast_integrations.models.recorded import RecordedAnswers
from tests.core.llm.words import calibrated
from tests.integrations.models.faulty_server import FaultyServer, Handler

SECRET = "sk-abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("FORECAST_AUTOTUNE_LLM", "FORECAST_AUTOTUNE_LLM_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """One that serves the model `m`, to whoever has the key if it wants one."""

    def get(handler: Handler) -> None:
        handler.server.requests.append((handler.path, None, dict(handler.headers)))
        wanted = handler.server.key
        if "/busy/" in handler.path:
            handler.reply(429, b"{}", Retry_After="86400")
        elif wanted and handler.headers.get("Authorization") != f"Bearer {wanted}":
            handler.reply(401, f"who is {handler.headers.get('Authorization')}?".encode())
        else:
            handler.reply(200, json.dumps({"data": [{"id": "m"}]}).encode())
        handler.close_connection = True

    monkeypatch.setattr(Handler, "do_GET", get, raising=False)
    with FaultyServer() as running:
        yield running


class Doctor:
    """The command, with the model that the environment names."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch
        self.printed = ""
        """Everything that the last examination has printed."""

    def configure(self, text: str) -> str:
        self._monkeypatch.setenv("FORECAST_AUTOTUNE_LLM", text)
        return text

    def examine(self, *options: str, human: bool = False) -> dict[str, dict[str, Any]]:
        """Checks by name."""
        main(["doctor", "--json", *options])
        self.printed = self._capsys.readouterr().out
        checks = json.loads(self.printed)["checks"]
        found = {check["name"]: check for check in checks if check["name"].startswith(MODEL_ROW)}
        failed = [name for name, check in found.items() if check["status"] == "fail"]
        assert failed in ([], [MODEL_ROW]), "a model need not be calibrated, but it must be there"
        if human:
            main(["doctor", *options])
            self.printed += self._capsys.readouterr().out
        return found


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    return Doctor(capsys, monkeypatch)


def weights(folder: Path, config: str = "config.json") -> Path:
    folder.mkdir(parents=True)
    (folder / config).write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")
    return folder


def test_without_a_model_there_is_one_line(doctor: Doctor) -> None:
    found = doctor.examine()
    assert [(name, check["status"]) for name, check in found.items()] == [(MODEL_ROW, "ok")]
    assert "FORECAST_AUTOTUNE_LLM names one" in found[MODEL_ROW]["detail"]


def test_a_server_is_contacted_only_when_asked_to(doctor: Doctor, server: FaultyServer) -> None:
    for url in (server.url, "http://models.invalid/v1"):
        doctor.configure(f"{url}?model=m&kind=chat")
        found = doctor.examine()
        assert server.requests == []
        assert (found[MODEL_ROW]["status"], found[CALIBRATION_ROW]["status"]) == ("ok", "warn")
        assert "--network" in found[MODEL_ROW]["detail"]
    assert "calibrate-llm" in found[CALIBRATION_ROW]["remedy"]
    doctor.configure(f"{server.url}?model=m&kind=chat")
    found = doctor.examine("--network")
    assert [path for path, _, _ in server.requests] == ["/v1/models"]
    assert found[MODEL_ROW]["detail"].endswith("it serves this model")


def test_a_server_without_the_model_or_without_a_server(doctor: Doctor, server: FaultyServer) -> None:
    doctor.configure(f"{server.url}?model=other")
    found = doctor.examine("--network")
    assert found[MODEL_ROW]["status"] == "warn"
    assert found[MODEL_ROW]["remedy"].startswith("correct ?model=NAME")
    assert "none of the 1 models that it lists" in found[MODEL_ROW]["detail"]
    doctor.configure("http://127.0.0.1:9/v1?model=m")
    for options in ((), ("--network",)):
        found = doctor.examine(*options)
        assert found[MODEL_ROW]["status"] == "fail"
        assert "refused" in found[MODEL_ROW]["detail"]


def test_recorded_answers_are_read(doctor: Doctor, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    doctor.configure(f"recorded:{path}")
    found = doctor.examine()
    assert (found[MODEL_ROW]["status"], "does not exist" in found[MODEL_ROW]["detail"]) == ("fail", True)
    RecordedAnswers("m", {"author": "a"}).write(path)
    found = doctor.examine()
    assert (found[MODEL_ROW]["status"], found[CALIBRATION_ROW]["status"]) == ("ok", "warn")
    doctor.configure(f"recorded:{path}?weight=0.5")
    found = doctor.examine()
    assert found[CALIBRATION_ROW]["status"] == "ok"


def test_a_server_that_only_refuses_is_no_server_without_a_list(doctor: Doctor, server: FaultyServer) -> None:
    doctor.configure(f"{server.url.removesuffix('/v1')}/busy/v1?model=m")
    row = doctor.examine("--network")[MODEL_ROW]
    assert row["status"] == "warn"
    assert "HTTP 429" in row["detail"]
    assert "wait for 86400 s" in row["detail"]


def test_a_key_is_asked_for_and_never_shown(
    doctor: Doctor, server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor.configure(f"{server.url}?model=m")
    server.key = SECRET
    found = doctor.examine("--network")
    assert (found[MODEL_ROW]["status"], "HTTP 401" in found[MODEL_ROW]["detail"]) == ("warn", True)
    monkeypatch.setenv("FORECAST_AUTOTUNE_LLM_KEY", SECRET)
    found = doctor.examine("--network", human=True)
    assert found[MODEL_ROW]["status"] == "ok"
    assert SECRET not in doctor.printed
    monkeypatch.setenv("FORECAST_AUTOTUNE_LLM_KEY", f"{SECRET} and more")
    found = doctor.examine("--network", human=True)
    assert found[MODEL_ROW]["status"] == "warn"
    assert SECRET not in doctor.printed


@pytest.mark.parametrize(
    "text", [f"https://host/v1?model=m&api_key={SECRET}", f"https://u:{SECRET}@host/v1?model=m"]
)
def test_an_address_with_a_key_in_it_is_shown_nowhere(doctor: Doctor, text: str) -> None:
    doctor.configure(text)
    found = doctor.examine("--network", human=True)
    assert (list(found), found[MODEL_ROW]["status"]) == ([MODEL_ROW], "fail")
    assert SECRET not in doctor.printed
    assert "refused" in doctor.printed


def test_packages_that_are_missing(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    absent = ("vllm", "jinja2", "openai")
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n in absent else real(n, *a))
    for text, missing, remedy in (
        ("vllm:some/model", "jinja2, vllm", "docs.vllm.ai"),
        ("http://127.0.0.1:9/v1?model=m", "jinja2, openai", "forecast-autotune[llm]"),
    ):
        doctor.configure(text)
        found = doctor.examine()
        assert found[MODEL_ROW]["detail"].endswith(f"not installed: {missing}")
        assert remedy in found[MODEL_ROW]["remedy"]


def test_what_a_calibration_says(doctor: Doctor, tmp_path: Path) -> None:
    spec = doctor.configure("http://127.0.0.1:9/v1?model=m")
    path = calibration_path(open_backend(spec, tmp_path / "cache").name, tmp_path / "cache")
    write(path, calibrated(saved=0.2))
    found = doctor.examine()
    assert found[CALIBRATION_ROW]["status"] == "ok"
    assert found[CALIBRATION_ROW]["detail"].startswith(f"{path}: saves 20% of the measurements on ")
    write(path, replace(calibrated(), weight=BlendWeight(0.0, 0.1)))
    found = doctor.examine()
    assert found[CALIBRATION_ROW]["status"] == "warn"
    assert "no skill" in found[CALIBRATION_ROW]["detail"]
    path.write_text("{")
    found = doctor.examine()
    assert found[CALIBRATION_ROW]["status"] == "warn"
    assert "not JSON" in found[CALIBRATION_ROW]["detail"]
    adapter = weights(tmp_path / "adapter", "adapter_config.json")
    write(adapter / FILE, calibrated(saved=0.1))
    doctor.configure(f"transformers:{weights(tmp_path / 'model')}?adapter={adapter}")
    found = doctor.examine()
    assert found[CALIBRATION_ROW]["detail"].startswith(f"{adapter / FILE}: saves 10%")
