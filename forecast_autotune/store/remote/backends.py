"""Where a remote store is kept. Nothing else loads the clients of Redis and fsspec, and this only when asked to.

An entry is a problem: `DEVICE/KERNEL/PROBLEM`, by the names that stores on disk have. It is a set of rows, each
under the SHA-256 of its line. Nothing is ever replaced, so writers need no locks.

| address | an entry is | a row is |
|---|---|---|
| `redis://`, `rediss://` | a hash `forecast_autotune:v1:ENTRY` | a field of it |
| any other | a folder `ADDRESS/v1/ENTRY` | a line of a file in it, whose name is the SHA-256 of the file |

`main` is the process that talks to a remote store; `client` starts it. A program's launches must not wait for a
network, nor for the interpreter lock while a client's modules are loaded or its answers read. The address comes by the
environment, where other users' `ps` does not see it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from forecast_autotune.errors import RecordError, StoreError
from forecast_autotune.settings import Settings
from forecast_autotune.store.files import VERSION, KernelName, problem_file
from forecast_autotune.store.rows import KernelRows, Row

VARIABLE = "FORECAST_AUTOTUNE_REMOTE"
"""The environment's variable with the address of the remote store."""

Entry = tuple[str, str, str]
"""Folder of the device class, folder of the kernel, file name of the problem."""

MAX_ENTRY_BYTES = 16 * 1024 * 1024
"""The most bytes read of one problem's rows."""
CONNECT_S, ANSWER_S = 1.0, 2.0
"""Seconds that one step of a conversation may take."""
_REDIS_PREFIX = "forecast_autotune"
_FOLDERS = {"file", "local", "sftp", "ssh", "smb", "hdfs", "arrow_hdfs", "webhdfs", "dbfs", "memory"}
"""The protocols of fsspec where a file needs a folder."""
_SECRET = ("KEY", "SECRET", "TOKEN", "PASSWORD", "AUTH", "CREDENTIAL")


def entry_of(kernel: KernelName, problem_id: str) -> Entry:
    """Where the rows of a problem are."""
    return (*kernel, problem_file(problem_id))


def sound_rows(lines: list[bytes], problem_id: str | None = None) -> KernelRows:
    """The rows in an entry, each checked as a record. Raises `RecordError` for a line that is none.

    With `problem_id`, also for one of another problem.
    """
    kernel_rows = KernelRows()
    for line in lines:
        row = Row.read(line)
        if row is None or problem_id not in (None, row.problem):
            raise RecordError("a row that does not belong there")
        kernel_rows.add(row)
    return kernel_rows


def open_backend(address: str) -> RemoteBackend:
    """The place that an address names; nothing is contacted.

    Raises `SettingsError` for no address, `StoreError` for one of an unknown protocol or without its client, and
    `ImportError` without redis or fsspec.
    """
    address = Settings().with_(remote=address).remote
    if address.startswith(("redis://", "rediss://")):
        return RedisBackend(address)
    return FileSystemBackend(address)


class RedisBackend:
    """Hashes on a Redis server. User and password come from REDIS_USERNAME and REDISCLI_AUTH."""

    def __init__(self, address: str) -> None:
        import redis

        self._client: Any = redis.Redis.from_url(
            address,
            username=os.environ.get("REDIS_USERNAME") or None,
            password=os.environ.get("REDISCLI_AUTH") or None,
            socket_connect_timeout=CONNECT_S,
            socket_timeout=ANSWER_S,
        )

    def entries(self) -> Iterator[Entry]:
        """Keys of ours, by scanning."""
        start = f"{_REDIS_PREFIX}:{VERSION}:"
        for key in self._client.scan_iter(match=f"{start}*", count=1000):
            parts = key.decode("utf-8", "replace").removeprefix(start).split("/")
            if len(parts) == 3:
                yield parts[0], parts[1], parts[2]

    def lines(self, entry: Entry) -> list[bytes]:
        """Values of a hash, in pieces."""
        result, size = [], 0
        for digest, line in self._client.hscan_iter(_key(entry), count=500):
            if hashlib.sha256(line).hexdigest().encode() != digest:
                raise StoreError("a row has other contents than were written")
            size += len(line)
            if size > MAX_ENTRY_BYTES:
                raise StoreError(f"an entry of more than {MAX_ENTRY_BYTES} bytes")
            result.append(line)
        return result

    def add(self, entry: Entry, lines: Mapping[str, bytes]) -> None:
        """Set the fields that are not there."""
        with self._client.pipeline(transaction=False) as pipeline:
            for digest, line in lines.items():
                pipeline.hsetnx(_key(entry), digest, line)
            pipeline.execute()


def _key(entry: Entry) -> str:
    return f"{_REDIS_PREFIX}:{VERSION}:{'/'.join(entry)}"


class FileSystemBackend:
    """Files of lines on a file system of fsspec. Credentials come from the environment of its clients."""

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs

        self._files: Any
        protocol = address.partition("://")[0]
        try:
            self._files, root = url_to_fs(address, use_listings_cache=False, skip_instance_cache=True)
        except ValueError as error:
            raise StoreError(
                f"{protocol}:// is no address of a remote store ({error}): name one of redis://, s3://, gs://, hf://, "
                "file:// or another that fsspec knows"
            ) from error
        except ImportError as error:
            package = (getattr(error.__cause__, "name", None) or protocol).partition(".")[0]
            raise StoreError(
                f"{protocol}:// needs {package}, not installed here: pip install {package}"
            ) from error
        self._root = f"{root.rstrip('/')}/{VERSION}"

    def entries(self) -> Iterator[Entry]:
        """Folders three levels down."""
        with contextlib.suppress(FileNotFoundError):
            results = set()
            for path in self._files.find(self._root):
                parts = path.rstrip("/").split("/")
                if len(parts) >= 4 and (entry := (parts[-4], parts[-3], parts[-2])) not in results:
                    results.add(entry)
                    yield entry

    def lines(self, entry: Entry) -> list[bytes]:
        """The lines of all files of a folder."""
        try:
            infos = self._files.ls(self._folder(entry), detail=True)
        except FileNotFoundError:
            return []
        files = [info for info in infos if str(info["name"]).endswith(".jsonl")]
        if sum(int(info["size"] or 0) for info in files) > MAX_ENTRY_BYTES:
            raise StoreError(f"an entry of more than {MAX_ENTRY_BYTES} bytes")
        lines: list[bytes] = []
        for info in files:
            data = self._files.cat_file(info["name"], start=0, end=int(info["size"] or 0))
            name = str(info["name"]).rsplit("/", 1)[-1]
            if f"{hashlib.sha256(data).hexdigest()}.jsonl" != name:
                raise StoreError(f"{name} has other contents than were written")
            lines += data.splitlines(keepends=True)
        return lines

    def add(self, entry: Entry, lines: Mapping[str, bytes]) -> None:
        """Write one more file, unless it is there."""
        data = b"".join(lines[digest] for digest in sorted(lines))
        folder = self._folder(entry)
        path = f"{folder}/{hashlib.sha256(data).hexdigest()}.jsonl"
        if self._files.exists(path):
            return
        if _FOLDERS & set(_protocols(self._files)):  # elsewhere it could make a bucket
            self._files.makedirs(folder, exist_ok=True)
        if "file" in _protocols(self._files):
            part = f"{path}.{os.getpid()}.part"
            self._files.pipe_file(part, data)
            self._files.mv(part, path)
        else:
            self._files.pipe_file(path, data)

    def _folder(self, entry: Entry) -> str:
        return "/".join((self._root, *entry))


RemoteBackend: TypeAlias = RedisBackend | FileSystemBackend
"""A place for entries. Methods raise the errors of the place's client."""


def _protocols(files: Any) -> tuple[str, ...]:
    protocol = files.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


class RemoteRows:
    """A remote store for commands that merge: slow, in this process, raising all errors.

    With `to_read`, that there is nothing is an error, too: most clients tell a place that cannot be reached, or
    that nobody has written to, by an empty listing.
    """

    def __init__(self, address: str, backend: RemoteBackend, *, to_read: bool = False) -> None:
        self._address, self._backend, self._to_read = address, backend, to_read
        self._entries: dict[KernelName, list[Entry]] | None = None

    @property
    def name(self) -> str:
        """Its address."""
        return self._address

    def kernels(self) -> list[KernelName]:
        """The kernels that have rows, in order. Raises `StoreError`."""
        with self._told():
            self._entries = {}
            for entry in self._backend.entries():
                self._entries.setdefault(entry[:2], []).append(entry)
        if self._to_read and not self._entries:
            raise StoreError(
                f"nothing at {self._address}: name a place that a store was merged into, and that can be reached"
            )
        return sorted(self._entries)

    def rows(self, kernel: KernelName) -> KernelRows:
        """All rows of a kernel whose problem is known. Raises `StoreError`."""
        if self._entries is None:
            self.kernels()
        kernel_rows = KernelRows()
        for entry in (self._entries or {}).get(kernel, ()):
            with self._told():
                for row in sound_rows(self._backend.lines(entry)):
                    kernel_rows.add(row)
        return kernel_rows.with_problems()[0]

    def add(self, kernel: KernelName, rows: KernelRows) -> int:
        """Add what is not there; returns how many rows changed it. Raises `StoreError`."""
        by_problem: dict[str, KernelRows] = {}
        for row in rows:
            by_problem.setdefault(row.problem, KernelRows()).add(row)
        count = 0
        for name, problem_rows in by_problem.items():
            entry = entry_of(kernel, name)
            with self._told():
                fresh = problem_rows.missing_from(sound_rows(self._backend.lines(entry)))
                if fresh:
                    self._backend.add(entry, {row.digest: row.line for row in fresh})
            count += len(fresh)
        self._entries = None
        return count

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except ImportError:
            raise
        except Exception as error:
            raise StoreError(f"{self._address}: {plain_reason(error)}") from None


def remote_rows(address: str, *, to_read: bool = False) -> RemoteRows:
    """The remote store at an address; with `to_read`, there has to be one. Raises as `open_backend` does."""
    return RemoteRows(address, open_backend(address), to_read=to_read)


def plain_reason(error: BaseException) -> str:
    """The error as one short line without the secrets that the environment holds."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    for name, value in os.environ.items():
        if len(value) >= 4 and any(part in name.upper() for part in _SECRET):
            text = text.replace(value, "***")
    return text[:200]


MEMORY_BYTES = 1 << 30
"""Bytes beyond the address space at the client's load."""
MAX_ANSWER_BYTES = 1 << 18
"""The most bytes of rows in an answer, more than a problem of thousands of candidates has; the rest is cut."""
LINGER_S = 20.0
"""Seconds for which the worker continues to write queued rows once its program is gone."""


def main() -> int:
    """Serve one program until it is gone; the exit status."""
    from multiprocessing.connection import Connection

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program's affair
    connection = Connection(int(sys.argv[1]))
    backend: RemoteBackend | None = None
    lingering = False
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return 0
        try:
            if backend is None:
                backend = open_backend(os.environ.get(VARIABLE, ""))
                _bound_memory()
            answer = _answer(backend, request)
        except MemoryError:
            answer = {"error": "MemoryError: it sends more than is read"}
        except Exception as error:
            answer = {"error": plain_reason(error)}
        try:
            connection.send_bytes(json.dumps({**answer, "id": request["id"]}).encode("ascii"))
        except OSError:
            if not lingering:
                signal.alarm(int(LINGER_S))  # nobody listens: go on with what was sent, for a while
            lingering = True


def _answer(backend: RemoteBackend, request: dict[str, Any]) -> dict[str, Any]:
    what = request.get("do")
    if what == "ready":
        return {}
    if what == "get":
        lines = _latest_lines(backend, tuple(request["entry"]), request["problem"])
        return {"lines": [line.decode("ascii") for line in lines]}
    if what == "put":
        for entry, texts in request["rows"]:
            backend.add(tuple(entry), {row.digest: row.line for row in map(_row, texts)})
        return {}
    raise StoreError(f"a request {what!r:.40} that nobody answers")


def _row(line: str) -> Row:
    row = Row.read(line.encode("ascii"))
    if row is None:
        raise StoreError("a line that is no row")
    return row


def _latest_lines(backend: RemoteBackend, entry: Entry, problem_id: str) -> list[bytes]:
    """The latest decision and the newest measurements, as many as fit into an answer."""
    rows: KernelRows = sound_rows(backend.lines(entry), problem_id)
    records = [*rows.decisions.values(), *reversed(rows.of_problem(problem_id))]
    lines, size = [], 0
    for row in records:
        size += len(row.line)
        if size > MAX_ANSWER_BYTES:
            break
        lines.append(row.line)
    return lines


def _bound_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError, IndexError):
        import resource
        from pathlib import Path

        base = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (base + MEMORY_BYTES, base + MEMORY_BYTES))
