"""Keys of servers: which one a server is sent, and texts without it.

A server knows the key that it was sent, and may repeat it in an error or in a text. It must not get onto the screen or
the disk by that.
"""

from __future__ import annotations

import ipaddress
import os
import re
from urllib.parse import SplitResult, urlsplit

from forecast_autotune.llm.backend import LLMError
from forecast_autotune.printable import printable_line

LEAST_KEY = 8
"""Characters of a key that is looked for in texts; shorter ones are placeholders."""
_MOST_SHOWN = 300
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


def repeats_key(text: str, url: str) -> bool:
    """Whether a text holds the key that a server is sent."""
    key = api_key_for(urlsplit(url))
    return len(key) >= LEAST_KEY and key in text


def shown_text(text: object, url: str) -> str:
    """A server's words as one line that may be shown: bounded, and without the key that it was sent."""
    key = api_key_for(urlsplit(url))
    words = str(text)
    return printable_line(words.replace(key, "[the key]") if len(key) >= LEAST_KEY else words, _MOST_SHOWN)
