"""What can happen to files of records: to their bytes, to the values in them, and to what stands in their place."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import os
import random
import re
import shutil
import socket
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HUGE = ["9" * 400, "-" + "9" * 400, "1" + "0" * 5000, "1e999", "-1e999", "NaN", "Infinity", "-Infinity"]
ODD_NUMBERS = [
    *HUGE,
    "-1",
    "0",
    "-0.0",
    "1e308",
    "5e-324",
    "1.5",
    "9223372036854775808",
    "1e-400",
    "340282366920938463463374607431768211456",
]
ODD_TEXTS = [
    *("\\ud800", "\\udc00\\ud800", "\\u0000", "\\u001b[2J", "", " ", "..", "../../x", "/dev/zero", "\\u202e"),
    "x" * 70_000,
]
ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 2**63, 1e308, "", "x", "\ud800", [], {}, [[]], [None], {"": None}),
    *([1, 2, 3], ["x"] * 100, {"config": {}}, "NaN", "1e999", list(range(1000)), "\x00", "y" * 5000),
]
_LARGEST_DAMAGED = 30_000_000
"""A file that was made larger than this is not damaged once more."""
_NUMBER = re.compile(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?")
_TEXT = re.compile(rb'"[^"\\]*"')

ByteDamage = Callable[[bytes, random.Random], bytes]
FileDamage = Callable[[Path, random.Random], None]


# --- bytes ---


def truncate(data: bytes, chance: random.Random) -> bytes:
    """Keep the begin."""
    return data[: chance.randrange(len(data) + 1)]


def flip_bits(data: bytes, chance: random.Random) -> bytes:
    """Flip one to eight bits."""
    raw = bytearray(data or b"\0")
    for _ in range(chance.randint(1, 8)):
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    return bytes(raw)


def splice(data: bytes, chance: random.Random) -> bytes:
    """Put a part of the file somewhere else into it."""
    a, b = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    at = chance.randrange(len(data) + 1)
    return data[:at] + data[a:b] + data[at:]


def cut_out(data: bytes, chance: random.Random) -> bytes:
    """Leave a part out."""
    a, b = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:a] + data[b:]


def insert_bytes(data: bytes, chance: random.Random) -> bytes:
    """Put arbitrary bytes, or a run of one, in between."""
    count = chance.choice([1, 16, 512])
    junk = chance.choice([chance.randbytes(count), b"\0" * count, b"\n" * count, b"\xff" * count, b'"', b"["])
    at = chance.randrange(len(data) + 1)
    return data[:at] + junk + data[at:]


def odd_number(data: bytes, chance: random.Random) -> bytes:
    """Another number in the place of one."""
    return _replaced(data, _NUMBER, chance.choice(ODD_NUMBERS).encode(), chance)


def odd_text(data: bytes, chance: random.Random) -> bytes:
    """Another text in the place of one."""
    return _replaced(data, _TEXT, b'"' + chance.choice(ODD_TEXTS).encode() + b'"', chance)


def _replaced(data: bytes, what: re.Pattern[bytes], by: bytes, chance: random.Random) -> bytes:
    count = sum(1 for _ in what.finditer(data))  # a list of them would take a gigabyte
    if not count:
        return data + by
    one = next(itertools.islice(what.finditer(data), chance.choice(range(count)), None))
    return data[: one.start()] + by + data[one.end() :]


def long_line(data: bytes, chance: random.Random) -> bytes:
    """A line of up to some megabytes somewhere."""
    size = chance.choice([100_000, 1_000_000, 20_000_000]) if chance.random() < 0.2 else 50_000
    body = chance.choice(
        [b"x" * size, b'{"a":"' + b"y" * size + b'"}', b"[0" + b",0" * (size // 2) + b"]", b"\0" * size]
    )
    lines = data.split(b"\n")
    lines.insert(chance.randrange(len(lines)), body)
    return b"\n".join(lines)


def shuffle_lines(data: bytes, chance: random.Random) -> bytes:
    """The same lines in another order, some of them twice."""
    lines = [line for line in data.split(b"\n") if line]
    chance.shuffle(lines)
    return b"\n".join(lines + lines[: chance.randrange(len(lines) + 1)]) + b"\n"


def nest(data: bytes, chance: random.Random) -> bytes:
    """Deeply nested lists or objects in the place of a value, closed or not."""
    depth = chance.choice([50, 70, 500, 5_000, 100_000])
    opening, closing = chance.choice([(b"[", b"]"), (b'{"a":', b"}")])
    body = opening * depth + b"0" + (closing * depth if chance.random() < 0.7 else b"")
    return _replaced(data, _NUMBER, body, chance)


def odd_value(data: bytes, chance: random.Random) -> bytes:
    """In one JSON object, of one line or of all: another value, one field less, or a field twice."""
    lines = data.split(b"\n")
    whole = lines.count(b"") == len(lines) - 1 or chance.random() < 0.1
    at = next((i for i, line in enumerate(lines) if line), 0) if whole else chance.randrange(len(lines))
    try:
        value = json.loads(lines[at] if not whole or len(lines) < 3 else data)
    except (ValueError, RecursionError):
        return odd_number(data, chance)
    holder, key = _place(value, chance)
    if holder is None:
        return data
    act = chance.random()
    if act < 0.7:
        holder[key] = chance.choice(ODD_VALUES)
    elif act < 0.85:
        del holder[key]
    made = json.dumps(value).encode()
    if act >= 0.85 and isinstance(holder, dict):
        twice = f"{json.dumps(key)}: {json.dumps(chance.choice(ODD_VALUES))}, ".encode()
        made = made.replace(b"{", b"{" + twice, 1)
    if whole and len(lines) >= 3:
        return made
    lines[at] = made
    return b"\n".join(lines)


def _place(value: Any, chance: random.Random) -> tuple[Any, Any]:
    """A random place in a JSON value: what holds it, and its key there."""
    places = []
    level = [value]
    while level:
        one = level.pop()
        if isinstance(one, dict | list):
            for key in one if isinstance(one, dict) else range(len(one)):
                places.append((one, key))
                level.append(one[key])
    return chance.choice(places) if places else (None, None)


BYTE_DAMAGES: Sequence[ByteDamage] = [
    *(
        truncate,
        flip_bits,
        flip_bits,
        splice,
        cut_out,
        insert_bytes,
        odd_number,
        odd_number,
        odd_text,
        odd_text,
    ),
    *(long_line, shuffle_lines, nest, odd_value, odd_value, odd_value, odd_value, odd_value),
]


def damage_bytes(path: Path, chance: random.Random) -> str:
    """Damage the bytes of a file, those that it unpacks to if it is compressed and luck will have it."""
    change = chance.choice(BYTE_DAMAGES)
    if path.stat().st_size > _LARGEST_DAMAGED:
        return "nothing more"
    data = path.read_bytes()
    unpacked = _unpacked(data) if path.suffix == ".gz" and chance.random() < 0.7 else None
    if unpacked is None:
        path.write_bytes(change(data, chance))
    else:
        path.write_bytes(gzip.compress(change(unpacked, chance), 1, mtime=0))
    return change.__name__


def _unpacked(data: bytes) -> bytes | None:
    """What compressed bytes hold, if they are sound and no bomb."""
    with (
        contextlib.suppress(OSError, EOFError, zlib.error),
        gzip.GzipFile(fileobj=io.BytesIO(data)) as stream,
    ):
        unpacked = stream.read(_LARGEST_DAMAGED)
        return unpacked if len(unpacked) < _LARGEST_DAMAGED else None
    return None


# --- kinds of files ---


def as_folder(path: Path, chance: random.Random) -> None:
    """A folder, with a file in it or not."""
    path.mkdir()
    if chance.random() < 0.5:
        (path / "x.json").write_text("{}", encoding="utf-8")


def as_pipe(path: Path, chance: random.Random) -> None:
    """A named pipe that nobody writes to."""
    os.mkfifo(path)


def as_link(path: Path, chance: random.Random) -> None:
    """A link to a device, to itself, to nothing, to a folder or to a large file of nothing."""
    target = chance.choice(
        ["/dev/zero", "/dev/urandom", "/dev/full", "/dev/null", path.name, "nowhere", "..", "/proc/self/maps"]
    )
    path.symlink_to(target)


def as_sparse_file(path: Path, chance: random.Random) -> None:
    """A file of many gigabytes that takes no room."""
    with path.open("wb") as stream:
        stream.truncate(1 << 40)


def as_socket(path: Path, chance: random.Random) -> None:
    """A socket."""
    with socket.socket(socket.AF_UNIX) as listening, contextlib.suppress(OSError):  # long names have none
        listening.bind(str(path))


def as_empty_file(path: Path, chance: random.Random) -> None:
    """A file without a byte."""
    path.write_bytes(b"")


def as_bomb(path: Path, chance: random.Random) -> None:
    """A few kilobytes that unpack to hundreds of megabytes."""
    row = chance.choice([b"\0" * 64, b'{"type":"x"}\n', b'{"type":"measurement","problem":"p"}\n', b"["])
    path.write_bytes(_bomb(row))


_BOMBS: dict[bytes, bytes] = {}


def _bomb(row: bytes) -> bytes:
    if row not in _BOMBS:
        chunk = row * (16_000_000 // len(row))
        _BOMBS[row] = gzip.compress(chunk, 9, mtime=0) * 25  # members follow each other
    return _BOMBS[row]


def as_other_file(path: Path, chance: random.Random) -> None:
    """Somebody else's file: a picture, a program, text in another encoding."""
    path.write_bytes(
        chance.choice(
            [b"\x89PNG\r\n\x1a\n" + bytes(range(256)), b"\x7fELF" + bytes(200), '{"a": 1}\n'.encode("utf-16")]
        )
    )


FILE_DAMAGES: Sequence[FileDamage] = [
    *(as_folder, as_pipe, as_link, as_link, as_link, as_sparse_file, as_socket, as_empty_file, as_other_file),
]


def replace_file(path: Path, chance: random.Random) -> str:
    """Put something else in the place of a file or a folder, or take its permissions."""
    if chance.random() < 0.1:
        path.chmod(0)
        return "permissions"
    kinds = [*FILE_DAMAGES, as_bomb, as_bomb] if path.suffix == ".gz" else FILE_DAMAGES
    change = chance.choice([k for k in kinds if not (k is as_folder and path.is_dir())])
    remove(path)
    change(path, chance)
    return change.__name__


def remove(path: Path) -> None:
    """Remove whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def swap_files(a: Path, b: Path) -> str:
    """Two files under each other's names."""
    if max(a.stat().st_size, b.stat().st_size) > _LARGEST_DAMAGED:
        return "nothing more"
    kept = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(kept)
    return "swap_files"
