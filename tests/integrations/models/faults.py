"""What a server may do wrong: faults by kind, lies about an honest reply, and a mixture of them all."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from email.utils import formatdate
from typing import Any

from tests.integrations.models.faulty_server import Chooser, Fault, Handler


def stall(handler: Handler, reply: Any) -> None:
    handler.pause()


def stall_after_headers(handler: Handler, reply: Any) -> None:
    handler.wfile.write(handler.head(200, 500))
    handler.wfile.flush()
    handler.pause()


def stall_in_body(handler: Handler, reply: Any) -> None:
    data = json.dumps(reply).encode()
    handler.wfile.write(handler.head(200, len(data)) + data[: len(data) // 2])
    handler.wfile.flush()
    handler.pause()


def drip(handler: Handler, reply: Any) -> None:
    data = json.dumps(reply).encode()
    handler.drip(handler.head(200, len(data)) + data, 0.05)


def drip_body(handler: Handler, reply: Any) -> None:
    data = json.dumps(reply).encode()
    handler.wfile.write(handler.head(200, len(data)))
    handler.drip(data, 0.05)


def continue_for_ever(handler: Handler, reply: Any) -> None:
    """Informational replies, after each of which a client waits for the real one."""
    while not handler.server.over.wait(0.02):
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def truncate(handler: Handler, reply: Any) -> None:
    data = json.dumps(reply).encode()
    handler.wfile.write(handler.head(200, len(data)) + data[: len(data) // 2])


def length_too_long(handler: Handler, reply: Any) -> None:
    data = json.dumps(reply).encode()
    handler.wfile.write(handler.head(200, len(data) + 7) + data)


def length_too_short(handler: Handler, reply: Any) -> None:
    data = json.dumps(reply).encode()
    handler.wfile.write(handler.head(200, len(data) - 7) + data)


def length_absurd(handler: Handler, reply: Any) -> None:
    handler.wfile.write(handler.head(200, None, Content_Length="10e9") + json.dumps(reply).encode()[:-1])


def bad_chunks(handler: Handler, reply: Any) -> None:
    handler.wfile.write(handler.head(200, None, Transfer_Encoding="chunked") + b"zz\r\nwhat\r\n0\r\n\r\n")


def reset(handler: Handler, reply: Any) -> None:
    handler.reset()


def reset_in_body(handler: Handler, reply: Any) -> None:
    handler.wfile.write(handler.head(200, 5000) + b'{"choices": [')
    handler.wfile.flush()
    time.sleep(0.01)
    handler.reset()


def hang_up(handler: Handler, reply: Any) -> None:
    handler.connection.close()


def no_http(handler: Handler, reply: Any) -> None:
    handler.wfile.write(b"220 mail.example ESMTP ready\r\n\x00\xff\r\n")


def many_headers(handler: Handler, reply: Any) -> None:
    more = {f"X_{i}": "y" * 100 for i in range(300)}
    handler.wfile.write(handler.head(200, 2, **more) + b"{}")


def huge_declared(handler: Handler, reply: Any) -> None:
    handler.wfile.write(handler.head(200, 1 << 40) + b"[" * 1000)


def huge_body(handler: Handler, reply: Any) -> None:
    handler.wfile.write(handler.head(200, None, Transfer_Encoding="chunked"))
    for _ in range(400):
        handler.wfile.write(b"10000\r\n" + b"[" * 65536 + b"\r\n")


def _status(status: int, said: str = "overloaded", **headers: str) -> Fault:
    def answer(handler: Handler, reply: Any) -> None:
        # A careless server repeats what it was sent.
        sent = handler.headers.get("Authorization", "")
        handler.reply(status, json.dumps({"error": {"message": f"{said} {sent}"}}).encode(), **headers)

    answer.name = "_".join([f"http_{status}", *(f"{k}_{v[:10]}" for k, v in headers.items())])  # type: ignore[attr-defined]
    return answer


def redirect_loop(handler: Handler, reply: Any) -> None:
    handler.reply(307, b"", Location=handler.path)


def redirect_elsewhere(handler: Handler, reply: Any) -> None:
    handler.reply(307, b"", Location=handler.server.elsewhere + handler.path)


def redirect_oddly(handler: Handler, reply: Any) -> None:
    handler.reply(302, b"", Location="http://[::1/\x7f")


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


STALLS: tuple[Fault, ...] = (
    stall,
    stall_after_headers,
    stall_in_body,
    drip,
    drip_body,
    continue_for_ever,
)
BROKEN: tuple[Fault, ...] = (
    truncate,
    length_too_long,
    length_too_short,
    length_absurd,
    bad_chunks,
    reset,
    reset_in_body,
    hang_up,
    no_http,
    many_headers,
    huge_declared,
    huge_body,
)
STATUSES: tuple[Fault, ...] = (
    _status(429),
    _status(429, Retry_After="0"),
    _status(429, Retry_After="0.05"),
    _status(429, Retry_After="3600"),
    _status(429, Retry_After=formatdate(usegmt=True)),
    _status(503, Retry_After="soon"),
    *(_status(status) for status in (400, 401, 403, 404, 408, 409, 418, 422, 500, 501, 502, 503, 504, 529)),
)
REDIRECTS: tuple[Fault, ...] = (redirect_loop, redirect_elsewhere, redirect_oddly)
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
                "[]",
                "null",
                "42",
                '"text"',
                "{}",
                '{"choices": null}',
                '{"choices": [null]}',
                '{"choices": [{"index": [], "logprobs": {}}]}',
                '{"choices": [{"logprobs": {"top_logprobs": [{}]}, "message": {"content": 7}}]}',
                '{"choices": [{"message": {"content": "I cannot say."}, "finish_reason": "length"}]}',
                '{"answers": {"0": {"probabilities": []}}, "tokens": "abc"}',
                '{"answers": [], "tokens": [], "choices": {}}',
            )
        )
    ),
)
WRONG: tuple[Any, ...] = (math.nan, math.inf, -1, -0.5, 1e308, 7, "x", "", None, [], {}, True)
"""What a lie puts in the place of a value; none of them is a probability, a log-probability or a number."""


def lie(chance: random.Random) -> Fault:
    """The honest reply with some of its values, or some of its rows, replaced, lost or repeated."""

    def answer(handler: Handler, reply: Any) -> None:
        content = _content(reply)
        inner = reply if content is None else json.loads(content)
        for _ in range(chance.choice((1, 1, 2, 5, 20))):
            _spoil(inner, chance)
        if content is not None:
            reply["choices"][0]["message"]["content"] = json.dumps(inner)
        handler.reply(200, json.dumps(reply).encode())

    answer.name = "lie"  # type: ignore[attr-defined]
    return answer


def _content(reply: Any) -> str | None:
    try:
        content = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError):
        return None
    return content if content.startswith("{") else None


def _spoil(value: Any, chance: random.Random) -> None:
    """Change one place somewhere inside a JSON value."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = chance.choice(keys)
        inner = value[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.9:
            value = inner
            continue
        act = chance.random()
        if isinstance(value, list) and act < 0.3:
            value.append(json.loads(json.dumps(chance.choice(value))))
        elif act < 0.45:
            del value[key]
        else:
            log_probability = isinstance(inner, float) and inner < 0
            value[key] = chance.choice([w for w in WRONG if not (log_probability and _negative(w))])
        return


def _negative(value: Any) -> bool:
    return isinstance(value, int | float) and value < 0


def mixture(seed: int, share: float = 0.75) -> Chooser:
    """Any fault with probability `share`, the same sequence for the same seed."""
    chance, mutex = random.Random(seed), threading.Lock()
    groups: tuple[tuple[Fault, ...], ...] = (STALLS, BROKEN, STATUSES, REDIRECTS, BODIES, ())

    def choose(path: str, body: Any) -> Fault | None:
        with mutex:
            # A forecast needs many answers from there.
            if chance.random() >= (share / 4 if path == "/tokenize" else share):
                return None
            # A wrong token number is one among many right ones: no client can tell.
            lies = 0 if path == "/tokenize" else 8
            group = chance.choices(groups, (1, 3, 3, 1, 4, lies))[0]
            return chance.choice(group) if group else lie(random.Random(chance.random()))

    return choose
