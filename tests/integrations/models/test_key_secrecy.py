"""A server that repeats the key, in any place of its reply and in any encoding: nothing of it is shown or kept."""

from __future__ import annotations

import base64
import gzip
import json
import logging
import random
import string
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("openai")

from forecast_autotune.commands import main
from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.bins import BINS
from forecast_autotune.records.table import write_tables
from forecast_autotune.store import Store
from forecast_autotune.testing import example_table
from forecast_integrations.models.cache import CachingBackend
from forecast_integrations.models.http.chat import ChatBackend, chat_generator
from forecast_integrations.models.http.client import RequestRejected
from forecast_integrations.models.http.completions import completions_generator
from forecast_integrations.models.http.keys import repeats_key
from tests.integrations.models import faulty_server
from tests.integrations.models.faulty_server import KINDS, PREFIX, Fault, FaultyServer, Handler, client_of

KEY = "sk-Zr5/Qx-7KpW+mD0vLt9~Uy2HbNc4Jg_eAf8"
"""With the characters that URLs, JSON and base64 write otherwise."""


def every(form: str) -> Callable[[str], str]:
    return lambda key: "".join(form.format(ord(c)) for c in key)


ENCODINGS: Mapping[str, Callable[[str], str]] = {
    "plain": lambda key: key,
    "without its end": lambda key: key[:-1],
    "eight bytes": lambda key: key[9:17],
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "base64 of the header": lambda key: base64.b64encode(f"Bearer {key}".encode()).decode(),
    "base64 for URLs": lambda key: base64.urlsafe_b64encode(b"x" + key.encode()).decode(),
    "base64 in lines": lambda key: base64.encodebytes(b"xy" + key.encode() * 3).decode(),
    "hexadecimal": lambda key: key.encode().hex(),
    "hexadecimal, upper case": lambda key: key.encode().hex(" ").upper(),
    "URL": lambda key: quote(key, safe=""),
    "URL, all of it": every("%{:02X}"),
    "escapes of bytes": every("\\x{:02x}"),
    "escapes of Unicode": every("\\u{:04x}"),
    "HTML, hexadecimal": every("&#x{:x};"),
    "JSON": lambda key: json.dumps(json.dumps(key)),
    "split by spaces": " ".join,
    "split by lines": lambda key: "\n".join(key[i : i + 4] for i in range(0, len(key), 4)),
    "split into strings": lambda key: '" + "'.join(key[i : i + 5] for i in range(0, len(key), 5)),
    "upper case": str.upper,
}
PACKED: Mapping[str, Callable[[str], bytes]] = {
    "gzip": lambda key: gzip.compress(key.encode()),
    "UTF-16": lambda key: key.encode("utf-16"),
    "null bytes": lambda key: b"\0".join(key[i : i + 1].encode() for i in range(len(key))),
}
ALL_AT_ONCE = "\n".join(encode(KEY) for encode in ENCODINGS.values())


def leaks(data: bytes, key: str = KEY) -> list[str]:
    """By which encodings `data` holds eight successive bytes of the key, or what they became."""
    found = []
    for name, encode in (ENCODINGS | PACKED).items():
        whole = encode(key)
        text = whole.encode() if isinstance(whole, str) else whole[10:]  # gzip's own first bytes
        length = max(8, -(-8 * len(text) // len(key)))
        # A piece of one repeated digit or separator says nothing.
        pieces = (text[i : i + length] for i in range(len(text) - length + 1))
        if any(piece in data for piece in pieces if len(set(piece)) > 4):
            found.append(name)
    return found


pytestmark = pytest.mark.usefixtures("short_pauses")

JOINED = ALL_AT_ONCE.replace("\n", " ")


def body(data: bytes, status: int = 200, **headers: str) -> Fault:
    return lambda handler, reply: handler.reply(status, data, **headers)


def raw(data: bytes) -> Fault:
    def answer(handler: Handler, reply: Any) -> None:
        handler.wfile.write(data)

    return answer


def said(text: str) -> Any:
    return {"choices": [{"index": 0, "text": text, "message": {"content": text}, "finish_reason": text}]}


def as_json(data: Any, status: int = 200) -> Fault:
    return body(json.dumps(data).encode(), status)


PLACES: dict[str, Callable[[str], Fault]] = {
    "an error's text": lambda text: body(text.encode(), 400),
    "an error to ask again after": lambda text: body(text.encode(), 500, Retry_After="0"),
    "a refusal of the key": lambda text: body(text.encode(), 401),
    "an error's message": lambda text: as_json(
        {"error": {"message": text, "param": text, "code": text}}, 422
    ),
    "an error's field names": lambda text: as_json({text: {text: text}}, 404),
    "a reply that is not JSON": lambda text: body(text.encode()),
    "JSON of another shape": lambda text: as_json({text: text, "choices": text}),
    "keys that are looked up": lambda text: as_json({"choices": {text: [text]}, "answers": {text: text}}),
    "names of labels": lambda text: as_json(
        said(json.dumps({"forecasts": [{"id": 1, "distribution": [{"label": text, "percent": text}]}]}))
    ),
    "tokens": lambda text: as_json(
        {"tokens": [text], "choices": [{"index": text, "logprobs": {text: text}}]}
    ),
    "usage": lambda text: as_json(
        {"usage": {"prompt_tokens": text, "completion_tokens": int(KEY.encode().hex(), 16)}}
    ),
    "a redirect": lambda text: body(b"", 307, Location=f"http://far.example/{text.replace(' ', '')}"),
    "a redirect of no use": lambda text: body(b"", 302, Location=f"http://[{text}"),
    "its headers": lambda text: body(
        b"", 400, Content_Type=text, Retry_After=text, Set_Cookie=text, X_Key=text
    ),
    "the status line": lambda text: raw(f"HTTP/1.1 500 {text}\r\nContent-Length: 0\r\n\r\n".encode()),
    "a status that is none": lambda text: raw(f"HTTP/1.1 {text} no\r\nContent-Length: 0\r\n\r\n".encode()),
    "no HTTP": lambda text: raw(f"{text}\r\n\r\n".encode()),
    "a header that is none": lambda text: raw(f"HTTP/1.1 200 OK\r\n{text}\r\n\r\n".encode()),
    "a chunk's length": lambda text: raw(
        f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{text}\r\n".encode()
    ),
    "a length": lambda text: raw(
        f"HTTP/1.1 200 OK\r\nContent-Length: {int(KEY.encode().hex(), 16)}\r\n\r\n{text}".encode()
    ),
    "a length that is none": lambda text: raw(f"HTTP/1.1 200 OK\r\nContent-Length: {text}\r\n\r\n".encode()),
}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FORECAST_AUTOTUNE_LLM_KEY", KEY)
    return KEY


def texts_of(error: BaseException) -> Iterator[str]:
    """All that an error, and what it was raised from or in the middle of, could be made to say."""
    seen: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or one in seen:
            continue
        seen.append(one)
        yield f"{one} {one!r} {one.args!r} {vars(one)!r} {getattr(one, 'doc', '')}"
        left += [one.__cause__, one.__context__]


def assert_secret(*texts: str) -> None:
    for text in texts:
        assert leaks(text.encode("utf-8", "surrogatepass")) == []


def test_the_search_finds_every_encoding() -> None:
    for name, encode in ENCODINGS.items():
        assert name in leaks(f"before {encode(KEY)} after".encode())
    for name, pack in PACKED.items():
        assert name in leaks(pack(KEY))
    assert leaks(b"nothing of it, but sk- and base64 and http://127.0.0.1:8000/v1 " * 100) == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_error_holds_a_word_of_the_server(
    place: str,
    kind: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("", "openai", "httpx2", "httpcore2"):
        caplog.set_level(logging.DEBUG, name)
    fault = PLACES[place](JOINED)
    with FaultyServer(lambda path, asked: fault) as server:
        client = client_of(server, attempts=2)
        model = CachingBackend(KINDS[kind](server.url, "m", client=client), tmp_path)
        with pytest.raises(LLMError) as caught:
            model.forecast(PREFIX, faulty_server.suffixes(3), BINS.labels, timeout_s=20.0)
        path, asked, headers = server.requests[0]
        assert headers["Authorization"] == f"Bearer {KEY}"
        assert_secret(path, json.dumps(asked))
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 1000
    assert_secret(*texts_of(caught.value), repr(client), repr(vars(client)))
    assert [r for r in caplog.records if r.name != "asyncio"] == [], "what a server sends is logged"
    captured = capsys.readouterr()
    assert_secret(captured.out, captured.err)
    for file in tmp_path.rglob("*"):
        assert_secret(file.read_text(), file.name)


@pytest.mark.parametrize("name", [*ENCODINGS, *PACKED])
def test_no_error_holds_the_key_in_any_encoding(name: str) -> None:
    """Each by itself, in a body and, where that can be, in a header and the status line."""
    encoded = (ENCODINGS | PACKED)[name](KEY)
    data = encoded if isinstance(encoded, bytes) else encoded.encode()
    line = data.replace(b"\n", b" ").replace(b"\0", b" ")
    packed = {"Content_Encoding": "gzip"} if name == "gzip" else {}
    faults = (
        body(data, 400, **packed),
        body(data, 500, **packed),
        body(data, 200, **packed),
        raw(b"HTTP/1.1 502 " + line + b"\r\nX-Echo: " + line + b"\r\nContent-Length: 0\r\n\r\n"),
        raw(line + b"\r\n\r\n"),
    )
    for fault in faults:
        with FaultyServer(lambda path, asked, fault=fault: fault) as server:  # type: ignore[misc]
            model = ChatBackend(server.url, "m", client=client_of(server, attempts=1))
            with pytest.raises(LLMError) as caught:
                model.forecast(PREFIX, faulty_server.suffixes(1), BINS.labels, timeout_s=20.0)
        assert_secret(*texts_of(caught.value))


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_text_that_repeats_the_key_is_refused(name: str) -> None:
    """What a model writes is kept, so the key must not be in it."""
    text = f"def kernel():\n    # {ENCODINGS[name](KEY)}\n    return 1\n"
    with FaultyServer(lambda path, asked: as_json(said(text))) as server:
        client = client_of(server, attempts=2)
        for write in (
            chat_generator(ChatBackend(server.url, "m", client=client), 20.0),
            completions_generator(client, "m", 20.0),
        ):
            with pytest.raises(LLMError, match="repeats the key") as caught:
                write("write", 2)
            assert_secret(*texts_of(caught.value))


def test_an_honest_text_is_not_refused() -> None:
    chance = random.Random(0)
    letters = string.ascii_letters + string.digits + "+/-_ \n\\x00"
    for _ in range(50):
        assert not repeats_key("".join(chance.choices(letters, k=20_000)), KEY)
    source = Path(faulty_server.__file__).read_text(encoding="utf-8")
    assert not repeats_key(source, KEY)
    for placeholder in ("EMPTY", "none", "dummy", ""):
        assert not repeats_key(f"EMPTY none dummy {placeholder}", placeholder)
    with FaultyServer() as server:
        client = client_of(server)
        assert completions_generator(client, "m", 20.0)("write", 1) == ["after write"]


def test_a_server_of_another_host_is_never_sent_the_key_or_the_prompt() -> None:
    with FaultyServer() as other:
        for where in (
            f"{other.url}/x",
            f"//{other.url.removeprefix('http://')}",
            f"http://127.0.0.1:80@{other.url.removeprefix('http://')}",
            other.url.replace("127.0.0.1", "localhost"),
            f"\\\\{other.url.removeprefix('http://')}",
        ):
            for status in (301, 302, 303, 307, 308):
                fault = body(b"", status, Location=where)
                with FaultyServer(lambda path, asked, fault=fault: fault) as server:  # type: ignore[misc]
                    with pytest.raises(RequestRejected, match=f"HTTP {status}.*redirects are not followed"):
                        faulty_server.ask(client_of(server, attempts=2))
                    assert len(server.requests) == 1
        assert other.requests == []


# --- what commands show and keep ---


@pytest.fixture
def listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """GET answers as POST does."""

    def get(handler: Handler) -> None:
        fault = handler.server.choose(handler.path, None)
        assert fault is not None
        fault(handler, None)
        handler.close_connection = True

    monkeypatch.setattr(Handler, "do_GET", get, raising=False)


COMMAND_PLACES = (
    "an error's text",
    "an error to ask again after",
    "a reply that is not JSON",
    "JSON of another shape",
    "names of labels",
    "a header that is none",
    "its headers",
)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("listing")
@pytest.mark.parametrize("place", [*COMMAND_PLACES, "a text", "a list of models"])
def test_commands_neither_show_nor_keep_it(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    write_tables(tmp_path / "table.jsonl", [example_table()])
    Store(tmp_path / "store").import_tables([example_table()])
    if place == "a text":
        fault = as_json(said(f'```python\nSUMMARY = "{JOINED}"\n```'))
    elif place == "a list of models":
        fault = as_json({"data": [{"id": text} for text in JOINED.split(" ")]})
    else:
        fault = PLACES[place](JOINED)
    with FaultyServer(lambda path, asked: fault) as server:
        statuses = []
        for kind in ("chat", "completions"):
            spec = f"{server.url}?model=m&kind={kind}&attempts=1"
            monkeypatch.setenv("FORECAST_AUTOTUNE_LLM", spec)
            monkeypatch.setenv("FORECAST_AUTOTUNE_LLM_TRUST", "always")
            for words in (
                ["doctor", "--network"],
                ["doctor", "--network", "--json"],
                ["advise", "--stored", "--json"],
                ["advise", "--stored"],
                ["replay", "table.jsonl", "--llm", spec],
                ["replay", "table.jsonl", "--llm", spec, "--json"],
                ["train", "calibrate-llm", "table.jsonl", "--llm", spec, "--answers", "answers.jsonl"],
                ["llm", "ask", "--export", "questions.jsonl", "table.jsonl"],
                ["show", "--calibration"],
            ):
                statuses.append(main(words))
        assert server.requests
        assert 1 in statuses
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert "internal error" not in captured.err
    assert_secret(captured.out, captured.err)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 3
    for path in files:
        assert leaks(path.read_bytes()) == [], path
        assert_secret(path.name)
