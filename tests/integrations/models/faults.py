"""Faults of a server, by kind."""

from __future__ import annotations

import json
from typing import Any

from tests.integrations.models.faulty_server import Chooser, Fault, Handler


def stall(handler: Handler, reply: Any) -> None:
    handler.pause()


def stall_in_body(handler: Handler, reply: Any) -> None:
    data = json.dumps(reply).encode()
    handler.wfile.write(handler.head(200, len(data)) + data[: len(data) // 2])
    handler.wfile.flush()
    handler.pause()


def drip_body(handler: Handler, reply: Any) -> None:
    data = json.dumps(reply).encode()
    handler.wfile.write(handler.head(200, len(data)))
    handler.drip(data, 0.05)


def truncate(handler: Handler, reply: Any) -> None:
    data = json.dumps(reply).encode()
    handler.wfile.write(handler.head(200, len(data)) + data[: len(data) // 2])


def bad_chunks(handler: Handler, reply: Any) -> None:
    handler.wfile.write(handler.head(200, None, Transfer_Encoding="chunked") + b"zz\r\nwhat\r\n0\r\n\r\n")


def reset(handler: Handler, reply: Any) -> None:
    handler.reset()


def no_http(handler: Handler, reply: Any) -> None:
    handler.wfile.write(b"220 mail.example ESMTP ready\r\n\x00\xff\r\n")


def huge_body(handler: Handler, reply: Any) -> None:
    handler.wfile.write(handler.head(200, None, Transfer_Encoding="chunked"))
    for _ in range(400):
        handler.wfile.write(b"10000\r\n" + b"[" * 65536 + b"\r\n")


def _body(name: str, data: bytes) -> Fault:
    def answer(handler: Handler, reply: Any) -> None:
        handler.reply(200, data)

    answer.name = name  # type: ignore[attr-defined]
    return answer


def cut_json(handler: Handler, reply: Any) -> None:
    handler.reply(200, json.dumps(reply).encode()[:-20])


def saying(data: Any, status: int = 200, **headers: str) -> Fault:
    """The same reply to everything."""
    return lambda handler, reply: handler.reply(status, json.dumps(data).encode(), **headers)


OK = saying({"fine": True, "usage": {"prompt_tokens": 10, "completion_tokens": 2}})
ERROR = saying({"error": "no"}, 500)
"""A reply that `faulty_server.ask` takes, and one after which it asks again."""


def script(*faults: Fault | None) -> Chooser:
    """One fault per request, in this order; the last one for good. None: be honest."""
    left = list(faults)
    return lambda path, body: left.pop(0) if len(left) > 1 else left[0]


STALLS: tuple[Fault, ...] = (stall, stall_in_body, drip_body)
BROKEN: tuple[Fault, ...] = (truncate, bad_chunks, reset, no_http, huge_body)
BODIES: tuple[Fault, ...] = (
    cut_json,
    _body("empty", b""),
    _body("not_utf8", b'{"choices": "\xff\xfe\xc3\x28"}'),
    _body("unicode", '{"\u202e\u0000": "\ud83d"}'.encode("utf-8", "surrogatepass")),
    _body("html", b"<html><body>502 Bad Gateway</body></html>"),
    _body("nested", b"[" * 100_000),
    _body("long_number", b'{"choices": ' + b"9" * 10_000 + b"}"),
    *(
        _body(f"shape_{i}", text.encode())
        for i, text in enumerate(
            (
                "{}",
                '{"choices": null}',
                '{"choices": [{"logprobs": {"top_logprobs": [{}]}, "message": {"content": 7}}]}',
            )
        )
    ),
)
