"""Ways in which a server may repeat a key, and a search for any piece of one in what we wrote."""

from __future__ import annotations

import base64
import codecs
import gzip
import json
from collections.abc import Callable, Mapping
from urllib.parse import quote

KEY = "sk-Zr5/Qx-7KpW+mD0vLt9~Uy2HbNc4Jg_eAf8"
"""With the characters that URLs, JSON and base64 write otherwise."""


def every(form: str) -> Callable[[str], str]:
    return lambda key: "".join(form.format(ord(c)) for c in key)


ENCODINGS: Mapping[str, Callable[[str], str]] = {
    "plain": lambda key: key,
    "without its end": lambda key: key[:-1],
    "eight bytes": lambda key: key[9:17],
    "reversed": lambda key: key[::-1],
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "base64 of the header": lambda key: base64.b64encode(f"Bearer {key}".encode()).decode(),
    "base64 for URLs": lambda key: base64.urlsafe_b64encode(b"x" + key.encode()).decode(),
    "base64 in lines": lambda key: base64.encodebytes(b"xy" + key.encode() * 3).decode(),
    "base64, reversed": lambda key: base64.b64encode(key[::-1].encode()).decode(),
    "base32": lambda key: base64.b32encode(key.encode()).decode(),
    "hexadecimal": lambda key: key.encode().hex(),
    "hexadecimal, upper case": lambda key: key.encode().hex(" ").upper(),
    "URL": lambda key: quote(key, safe=""),
    "URL, all of it": every("%{:02X}"),
    "escapes of bytes": every("\\x{:02x}"),
    "escapes of Unicode": every("\\u{:04x}"),
    "HTML": every("&#{};"),
    "HTML, hexadecimal": every("&#x{:x};"),
    "octal": every("\\{:o}"),
    "decimal": lambda key: str(list(key.encode())),
    "bits": every("{:08b} "),
    "JSON": lambda key: json.dumps(json.dumps(key)),
    "split by spaces": " ".join,
    "split by lines": lambda key: "\n".join(key[i : i + 4] for i in range(0, len(key), 4)),
    "split into strings": lambda key: '" + "'.join(key[i : i + 5] for i in range(0, len(key), 5)),
    "upper case": str.upper,
    "rot13": lambda key: codecs.encode(key, "rot13"),
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
        if any(piece in data for piece in pieces if len(set(piece)) > 4 or name == "bits"):
            found.append(name)
    return found
