"""A real HTTP server with an invented model behind it, which stalls, truncates, lies and fails on demand.

The model's answer to a candidate follows from the candidate's text alone (`truth`), in every form of asking,
so that a test can tell a right row from a wrong one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.llm.backend import Usage
from forecast_autotune.llm.bins import BINS, AnswerLabel
from forecast_integrations.models.http import client
from forecast_integrations.models.http.backend import HTTPBackend
from forecast_integrations.models.http.chat import ChatBackend
from forecast_integrations.models.http.client import ServerClient
from forecast_integrations.models.http.completions import CompletionsBackend
from forecast_integrations.models.http.limits import Deadline, UsageLedger

PREFIX = "You forecast how long a kernel runs.\n" + BINS.table() + "\n\n"
_NUMBERED = re.compile(r"^(\d+)\. (.+)$", re.MULTILINE)


def suffixes(count: int, first: int = 0) -> list[str]:
    """Texts of candidates."""
    return [
        f"BLOCK={16 << (i % 5)} num_warps={1 << (i % 4)} try={i}\nBin:" for i in range(first, first + count)
    ]


def truth(suffix: str, labels: Sequence[AnswerLabel] = BINS.labels) -> npt.NDArray[np.float64]:
    """What the invented model thinks of a candidate: [labels], sums to 1."""
    line = suffix.strip().split("\n")[0]
    chance = np.random.default_rng(int(hashlib.sha256(line.encode()).hexdigest()[:8], 16))
    weights = chance.dirichlet(np.full(len(labels), 0.5)) + 0.01
    return np.asarray(weights / weights.sum())


def tokenized(text: str) -> list[int]:
    """One token per character, but a single one for a capital letter with a space before it."""
    return [1000 + ord(m[1]) if len(m) == 2 else ord(m) for m in re.findall(r" [A-Z]|.", text, re.DOTALL)]


def text_of(tokens: Sequence[int]) -> str:
    """The text of `tokenized`."""
    return "".join(f" {chr(t - 1000)}" if 1000 <= t < 1100 else chr(t) for t in tokens)


# --- honest answers ---

MASS = 0.8
"""What the model gives to all labels together."""


def honest(path: str, body: Any) -> Any:
    """The reply of a server that does everything right."""
    if path == "/tokenize":
        return {"tokens": tokenized(body["prompt"])}
    if path == "/v1/completions":
        return _completions(body)
    return _chat(body) if path == "/v1/chat/completions" else {"asked": body}


def _completions(body: Any) -> Any:
    prompts, choices = body["prompt"], list[Any]()
    if "logprobs" not in body:
        return {"choices": [{"index": 0, "text": f"after {prompts[-20:]}"}], "usage": _usage(body, 5)}
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]
    for index, prompt in enumerate(prompts):
        line = (prompt if isinstance(prompt, str) else text_of(prompt)).split("\n")[-2]
        names = [f" {label.token}" for label in BINS.labels]
        if "logprob_token_ids" in body:
            names = [f"token_id:{token}" for token in body["logprob_token_ids"]]
        top = {name: math.log(MASS * p) for name, p in zip(names, truth(line), strict=True)}
        top["token_id:9"] = math.log(1 - MASS)
        choices.append({"index": index, "text": "x", "logprobs": {"top_logprobs": [top]}})
    return {"choices": choices, "usage": _usage(body, len(choices))}


def _chat(body: Any) -> Any:
    message = body["messages"][-1]["content"]
    form = body.get("response_format", {}).get("type")
    if form is None:
        return _said(f"a text about {message[:20]}", body)
    candidates = _NUMBERED.findall(message[message.index("Do this for every numbered candidate") :])
    forecasts = [
        {
            "id": int(number),
            "distribution": [
                {"label": label.token, "percent": 100 * float(p)}
                for label, p in zip(BINS.labels, truth(line), strict=True)
            ],
        }
        for number, line in candidates
    ]
    return _said(json.dumps({"forecasts": forecasts}), body)


def _said(text: str, body: Any) -> Any:
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": _usage(body, 50)}


def _usage(body: Any, output: int) -> dict[str, int]:
    return {"prompt_tokens": len(json.dumps(body)) // 4, "completion_tokens": output}


# --- the server ---

Fault = Callable[["Handler", Any], None]
"""Answers a request in place of the honest way; gets the honest reply."""
Chooser = Callable[[str, Any], Fault | None]
"""What to do with a request (path, body); None: be honest."""


class FaultyServer(ThreadingHTTPServer):
    """Serves on a free port of this machine until the `with` block ends."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, choose: Chooser | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        # An earlier server may have had this port, and failed.
        client._FAILURES.pop(self.url.removesuffix("/v1"), None)
        self.choose: Chooser = choose or (lambda path, body: None)
        self.requests: list[tuple[str, Any, Message]] = []
        """Path, body and headers of every request."""
        self.over = threading.Event()
        self.key = ""
        """The key that it wants, if any, where a test answers GET."""

    @property
    def url(self) -> str:
        """Where the API starts."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def count(self, path: str) -> int:
        """Requests to a path so far."""
        return sum(1 for found, _, _ in self.requests if found == path)

    def __enter__(self) -> FaultyServer:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone away is what most tests are about."""


def client_of(server: FaultyServer, **options: Any) -> ServerClient:
    """A client with a ledger of its own, which never leaves the server alone."""
    mine: dict[str, Any] = {"failures": 10**9, "ledger": UsageLedger()}
    return ServerClient(server.url, **mine | options)


KINDS: dict[str, Callable[..., HTTPBackend]] = {
    "completions": CompletionsBackend,
    "chat": ChatBackend,
}


def opened(kind: str, server: FaultyServer, attempts: int = 2, **options: Any) -> HTTPBackend:
    """A backend with a breaker and a ledger of its own."""
    return KINDS[kind](server.url, "m", client=client_of(server, attempts=attempts), **options)


def ask(it: ServerClient, seconds: float = 5.0, expected: Usage = Usage(), body: Any = None) -> Any:  # noqa: B008
    """One request; the honest server echoes it."""
    found, _ = it.ask(
        f"{it.base}/echo", body or {"a": 1}, dict, deadline=Deadline(seconds), expected=expected
    )
    return found


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size))
        path = self.path.partition("?")[0]
        self.server.requests.append((self.path, body, self.headers))
        fault = self.server.choose(path, body)
        reply = honest(path, body)
        with contextlib.suppress(OSError):
            if fault is None:
                self.reply(200, json.dumps(reply).encode())
            else:
                fault(self, reply)
        self.close_connection = True

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        """A whole reply."""
        self.wfile.write(self.head(status, len(body), **headers) + body)

    def head(self, status: int, length: int | None, **headers: str) -> bytes:
        """Status line and headers; names with `_` for `-`."""
        lines = [f"HTTP/1.1 {status} Whatever", "Content-Type: application/json"]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")

    def pause(self, seconds: float = 30.0) -> None:
        """Wait, but not beyond the end of the test."""
        self.server.over.wait(seconds)

    def drip(self, data: bytes, every_s: float) -> None:
        """One byte at a time."""
        for byte in data:
            self.wfile.write(bytes([byte]))
            self.wfile.flush()
            if self.server.over.wait(every_s):
                return

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""
