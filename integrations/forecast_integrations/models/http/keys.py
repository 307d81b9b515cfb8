"""Keys of servers: which one a server is sent, and whether a text repeats a part of it.

A server knows the key that it was sent. Its own messages are never shown, but a model's texts are kept (advice,
sources of kernels), and a server that puts the key there, by accident or not, must not get it onto the
disk. Pieces of eight bytes and more are matched, in either direction, whatever stands between their characters:
as they are, in base64 and base32, and as hexadecimal, octal or decimal numbers with or without the marks of
URLs, of escapes and of HTML. A packed or enciphered key is not matched.
"""

from __future__ import annotations

import base64
import codecs
import ipaddress
import os
import re
from collections import defaultdict
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
    if len(key) < WINDOW:
        return False
    plain, known = _normalized(text), _patterns(key)
    # Too few letters and digits are left of a window with others in it: looked for as it is.
    pieces = {key[i : i + WINDOW].casefold() for i in range(len(key) - WINDOW + 1)}
    folded = text.casefold()
    if any(piece in folded or piece[::-1] in folded for piece in pieces):
        return True
    for start in range(len(plain) - WINDOW + 1):
        if (patterns := known.get(plain[start : start + WINDOW])) and any(
            plain.startswith(p, start) for p in patterns
        ):
            return True
    return False


def _normalized(text: str) -> str:
    """Letters and digits alone, in lower case: the characters between them split or escape a key."""
    return _IGNORED.sub("", text.casefold())


@lru_cache(maxsize=4)
def _patterns(key: str) -> dict[str, tuple[str, ...]]:
    """Normalized encodings of every window of the key, by their first eight characters."""
    pieces: defaultdict[str, set[str]] = defaultdict(set)
    plain = _normalized(key)
    texts = {plain[i : i + WINDOW] for i in range(len(plain) - WINDOW + 1)}
    texts |= {codecs.encode(text, "rot13") for text in texts}
    data = key.encode("utf-8", "surrogatepass")
    for piece in (data[i : i + WINDOW] for i in range(len(data) - WINDOW + 1)):
        for one in (piece, piece[::-1]):
            texts.update(map(_normalized, _encodings(one)))
    for text in texts:
        for one_way in (text, text[::-1]):
            if len(one_way) >= WINDOW:
                pieces[one_way[:WINDOW]].add(one_way)
    return {start: tuple(patterns) for start, patterns in pieces.items()}


def _encodings(piece: bytes) -> Iterator[str]:
    for form in (
        "{:02x}",
        "x{:02x}",
        "0x{:02x}",
        "x{:x}",
        "u{:04x}",
        "u00{:02x}",
        "{:08b}",
        "{:03o}",
        "{:o}",
        "{:d}",
    ):
        yield "".join(form.format(byte) for byte in piece)
    yield from (_inner_digits(piece, shift, 6) for shift in range(3))
    yield from (_inner_digits(piece, shift, 5) for shift in range(5))


def _inner_digits(piece: bytes, shift: int, bits: int) -> str:
    """The digits of base64 (6 bits) or base32 (5 bits) that depend on nothing but the piece, `shift` bytes in."""
    whole = bytes(shift) + piece + bytes(-(shift + len(piece)) % 15)
    text = (base64.b64encode(whole) if bits == 6 else base64.b32encode(whole)).decode()
    return text[-(-8 * shift // bits) : 8 * (shift + len(piece)) // bits]
