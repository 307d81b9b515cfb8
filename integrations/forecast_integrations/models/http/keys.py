"""Keys of servers: which one a server is sent, and whether a text repeats a part of it.

A server knows the key that it was sent. Its own messages are never shown, but a model's texts are kept (advice,
sources of kernels), and a server that echoes a request's headers must not get the key onto the disk. Pieces of eight
bytes and more are matched, whatever stands between their characters: as they are, in base64, and as hexadecimal numbers
with or without the marks of URLs and escapes. A key that is enciphered, or written in another way, is not matched.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from urllib.parse import SplitResult

from forecast_autotune.llm.backend import LLMError

WINDOW = 8
"""Bytes of a key that must not be repeated. Shorter keys are placeholders, and not looked for."""
_IGNORED = re.compile(r"[^0-9a-z]+")
_KEY_PATTERN = re.compile(r"[\x21-\x7e]+")


def is_local_host(host: str) -> bool:
    """Whether a host name means this machine."""
    if host.lower() in ("localhost", "localhost."):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def api_key_for(url: SplitResult) -> str:
    """The key to send to a server: FORECAST_AUTOTUNE_LLM_KEY, else OPENAI_API_KEY; empty without one.

    OPENAI_API_KEY is not meant for any server in particular, so it is not sent to another machine in the
    clear. Read for every request and kept nowhere. Raises `LLMError` for a key that no header can hold.
    """
    name, key = "FORECAST_AUTOTUNE_LLM_KEY", os.environ.get("FORECAST_AUTOTUNE_LLM_KEY", "").strip()
    if not key and (url.scheme == "https" or is_local_host(url.hostname or "")):
        name, key = "OPENAI_API_KEY", os.environ.get("OPENAI_API_KEY", "").strip()
    if key and not _KEY_PATTERN.fullmatch(key):
        raise LLMError(f"the key in {name} has spaces or characters beyond ASCII: set it anew, by itself")
    return key


def repeats_key(text: str, key: str) -> bool:
    """Whether `text` holds eight successive bytes of `key`; see the module. False for shorter keys."""
    plain, coded = _windows(key)
    folded = text.casefold()
    if any(piece in folded for piece in plain):
        return True
    bare = _IGNORED.sub("", folded)
    return any(piece in bare for piece in coded)


@lru_cache(maxsize=4)
def _windows(key: str) -> tuple[frozenset[str], frozenset[str]]:
    """Every window of the key in lower case: as it is, and its encodings without the characters that split them."""
    pieces = [key[i : i + WINDOW] for i in range(len(key) - WINDOW + 1)]
    encodings = {form for piece in pieces for form in _encodings(piece)}
    coded = (_IGNORED.sub("", form.casefold()) for form in encodings)
    # Too few letters and digits are left of a window with others in it: that one is looked for as it is.
    return frozenset(p.casefold() for p in pieces), frozenset(c for c in coded if len(c) >= WINDOW)


def _encodings(piece: str) -> Iterator[str]:
    data = piece.encode("utf-8", "surrogatepass")
    yield piece
    for form in ("{:02x}", "x{:02x}", "u{:04x}"):
        yield "".join(form.format(byte) for byte in data)
    for shift in range(3):  # the digits of base64 that depend on nothing but the piece, so many bytes in
        text = base64.b64encode(bytes(shift) + data + bytes(-(shift + len(data)) % 3)).decode()
        yield text[-(-8 * shift // 6) : 8 * (shift + len(data)) // 6]
