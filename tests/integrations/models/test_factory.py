"""Specifications: what they mean, what they may not hold, and what mistakes are answered with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.errors import SettingsError
from forecast_autotune.llm.backend import Backend, LLMError, Usage
from forecast_autotune.llm.spec import parsed
from forecast_autotune.settings import Settings
from forecast_integrations.models.factory import backend, text_generator
from forecast_integrations.models.http.backend import HTTPBackend
from forecast_integrations.models.http.chat import ChatBackend
from forecast_integrations.models.http.completions import CompletionsBackend
from forecast_integrations.models.http.limits import SpendingLimits, TokenPrices
from tests.integrations.models.faulty_server import FaultyServer

URL = "http://127.0.0.1:1/v1"


def served(text: str, **settings: Any) -> HTTPBackend:
    found = backend(text, settings=Settings(**settings))
    assert isinstance(found, HTTPBackend)
    return found


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"{URL}?model=m", CompletionsBackend),
        (f"{URL}?model=m&kind=completions", CompletionsBackend),
        (f"{URL}?model=m&kind=chat&batch=3&effort=low&max_tokens=9&temperature=0.5", ChatBackend),
    ],
)
def test_kinds_of_servers(text: str, kind: type[HTTPBackend]) -> None:
    assert type(served(text)) is kind
    assert isinstance(backend(text), Backend)


def test_options_arrive() -> None:
    it = served(
        f"{URL}?model=org%2Fname&batch=7&concurrency=3&attempts=2&price_prompt=0.5&price_output=2",
        llm_max_tokens=1000,
        llm_max_money=0.5,
        llm_max_seconds=60.0,
    )
    assert it.model == "org/name"
    assert it.batch == 7
    assert (it.client.concurrency, it.client.attempts) == (3, 2)
    assert it.client.prices == TokenPrices(0.5, 2.0)
    assert it.client.limits == SpendingLimits(1000, 0.5, 60.0)


@pytest.mark.parametrize(
    ("text", "base", "root"),
    [
        ("http://h:8000?model=m", "http://h:8000/v1", "http://h:8000"),
        ("http://h:8000/v1/?model=m", "http://h:8000/v1", "http://h:8000"),
        ("https://h/api/v1?model=m", "https://h/api/v1", "https://h/api"),
        ("http://[::1]:8000/v1?model=m", "http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_addresses(text: str, base: str, root: str) -> None:
    it = served(text).client
    assert (it.base, it.root) == (base, root)


def test_models_are_named_before_they_are_asked() -> None:
    """Nothing is loaded, or even imported, before it is asked."""
    program = (
        "import sys\nfrom forecast_integrations.models.factory import backend\n"
        "for text in sys.argv[1:]: print(backend(text).name)\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'peft', 'openai'} & set(sys.modules)))"
    )
    given = ["transformers:/a/b?adapter=/c&device=cpu&dtype=float32", "vllm:org/name?memory=0.5&length=4096"]
    given.append(f"{URL}?model=m")
    done = subprocess.run([sys.executable, "-c", program, *given], capture_output=True, text=True, check=True)
    names = ["transformers:/a/b+/c", "vllm:org/name", served(given[-1]).name]
    assert done.stdout.splitlines() == [*names, "[]"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "transformers:PATH_OR_ID"),
        ("gpt-5", "transformers:PATH_OR_ID"),
        ("transformers:", "transformers:PATH_OR_ID"),
        ("ftp://h/v1?model=m", "transformers:PATH_OR_ID"),
        ("http://?model=m", "must name its host"),
        ("http://h:99999/v1?model=m", "must be a URL"),
        ("http://[::1/v1?model=m", "must be a URL"),
        (f"{URL}", r"needs \?model=NAME"),
        (f"{URL}?model=", "'model' must not be empty"),
        (f"{URL}?model=m&kind=magic", "completions, chat"),
        (
            f"{URL}?model=m&sample=3",
            "'sample' is not known for kind=completions: known are model, kind, batch",
        ),
        (f"{URL}?model=m&kind=chat&Weird%20One=3", "that is not a word .*effort"),
        (f"{URL}?model=m&effort=low", "'effort' is not known for kind=completions"),
        (f"{URL}?model=m&kind=chat&batch=0", "'batch' must be an integer from 1 to 1024"),
        (f"{URL}?model=m&kind=chat&temperature=nan", "'temperature' must be a number from 0 to 2"),
        (f"{URL}?model=m&model=n", "'model' is given twice"),
        (
            "transformers:p?memory=0.3",
            "'memory' is not known for transformers: known are adapter, device, dtype",
        ),
        ("vllm:p?memory=3", "'memory' must be a number from 0.01 to 1"),
    ],
)
def test_mistakes_are_answered_with_the_rule(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        backend(text)


@pytest.mark.parametrize(
    "text",
    [
        "http://user:swordfish@h/v1?model=m",
        "http://swordfish@h/v1?model=m",
        f"{URL}?model=m&api_key=swordfish",
        f"{URL}?model=m&Key=swordfish",
        f"{URL}?model=m&token=swordfish",
        f"{URL}?model=m&password=swordfish",
        f"{URL}?model=sk-swordfish-abcdefghijklmnop",
        f"{URL}?model=my-own-swordfish",
        "transformers:p?secret=swordfish",
    ],
)
def test_keys_are_refused_and_not_repeated(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_LLM_KEY", "my-own-swordfish")
    with pytest.raises(SettingsError, match="FORECAST_AUTOTUNE_LLM_KEY") as caught:
        backend(text)
    assert "swordfish" not in str(caught.value)


# --- writers ---


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_writers_bring_several_texts(kind: str) -> None:
    with FaultyServer() as server:
        write = text_generator(f"{server.url}?model=m&kind={kind}&max_tokens=77")
        texts = write("Make it faster.", 3)
        bodies = [body for _, body, _ in server.requests]
    assert len(texts) == 3
    assert all("Make it faster." in text for text in texts)
    assert [body["max_tokens"] for body in bodies] == [77] * 3
    assert [body["temperature"] for body in bodies] == [1.0] * 3


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_writers_tell_what_they_cost(kind: str) -> None:
    """Once per call, also for a call without a text."""
    heard: list[Usage] = []
    replies = iter([200, 200, 400])

    def choose(path: str, body: Any) -> Any:
        return None if next(replies) == 200 else lambda handler, _: handler.reply(400, b"{}")

    with FaultyServer(choose) as server:
        write = text_generator(
            f"{server.url}?model=m&kind={kind}&price_output=1000000", on_usage=heard.append
        )
        write("Make it faster.", 2)
        with pytest.raises(LLMError):
            write("Make it faster.", 1)
    assert [u.requests for u in heard] == [2, 0]
    assert heard[0].output_tokens == heard[0].money > 0


def test_a_writer_brings_what_it_gets() -> None:
    replies = iter([400, 200, 400])

    def choose(path: str, body: Any) -> Any:
        status = next(replies, 400)
        return None if status == 200 else lambda handler, _: handler.reply(status, b"{}")

    with FaultyServer(choose) as server:
        write = text_generator(f"{server.url}?model=m&kind=chat")
        assert len(write("x", 3)) == 1
        with pytest.raises(LLMError, match=r"no text was written.*HTTP 400"):
            write("x", 2)


# --- adapters ---


def adapter_of(spec: str) -> str:
    return str(parsed(spec).options["adapter"])


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_where_an_adapter_is_looked_for(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path, then FORECAST_AUTOTUNE_ASSETS; ORG/NAME is left to the hub."""
    spec = f"{kind}:base?adapter=smollm2-135m"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORECAST_AUTOTUNE_ASSETS", str(tmp_path / "mine"))
    assert adapter_of(f"{kind}:base?adapter=me/other") == "me/other"
    assert adapter_of(f"{kind}:base?adapter=/no/such/folder") == "/no/such/folder"
    mine = tmp_path / "mine" / "adapters" / "smollm2-135m"
    mine.mkdir(parents=True)
    (mine / "adapter_config.json").write_text("{}")
    assert adapter_of(spec) == str(mine)
    Path("smollm2-135m").mkdir()
    assert adapter_of(spec) == "smollm2-135m"


def test_an_adapter_that_is_nowhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORECAST_AUTOTUNE_ASSETS", raising=False)
    with pytest.raises(
        SettingsError, match=r"smollm2 is none of these \(.*_ASSETS is not set\).* set FORECAST_"
    ):
        parsed("transformers:base?adapter=smollm2")
    monkeypatch.setenv("FORECAST_AUTOTUNE_ASSETS", str(tmp_path / "mine"))
    with pytest.raises(SettingsError, match="there is no ") as caught:
        parsed("transformers:base?adapter=smollm2")
    assert str(tmp_path / "mine" / "adapters" / "smollm2") in str(caught.value)
