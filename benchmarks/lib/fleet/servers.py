"""Servers for remote stores that are put to the test: a real Redis, and some that misbehave."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[str]:
    """A Redis server for one test or run; yields its address. Raises `FileNotFoundError` without the program."""
    program = shutil.which("redis-server")
    if program is None:
        raise FileNotFoundError("redis-server is not installed")
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = subprocess.Popen(
        [*command, "--dir", str(folder), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for_port(port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens at port {port}")


def never(connection: socket.socket) -> None:
    """Accepts, and never answers."""
    while connection.recv(4096):
        pass


def hang_up(connection: socket.socket) -> None:
    """Closes in the middle of an answer."""
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n*1000\r\n$500\r\nabc")


def nonsense(connection: socket.socket) -> None:
    """Answers with bytes of no protocol."""
    connection.recv(4096)
    connection.sendall(bytes(range(256)) * 64)


def endless(connection: socket.socket) -> None:
    """Begins an answer that has no end."""
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
    while True:
        connection.sendall(b"$99999999999\r\n" + bytes(1 << 20))


def redirect(connection: socket.socket) -> None:
    """Sends whoever asks to itself, for ever."""
    host = f"127.0.0.1:{connection.getsockname()[1]}"
    while connection.recv(65536):
        connection.sendall(
            f"HTTP/1.1 302 Found\r\nLocation: http://{host}/again\r\nContent-Length: 0\r\n\r\n".encode()
        )


def full(connection: socket.socket) -> None:
    """Has no memory left for anything."""
    while request := connection.recv(65536):
        connection.sendall(
            b"-OOM command not allowed when used memory > 'maxmemory'.\r\n" * request.count(b"*")
        )


MISBEHAVIOUR: dict[str, Callable[[socket.socket], None]] = {
    "never answers": never,
    "hangs up": hang_up,
    "nonsense": nonsense,
    "endless": endless,
    "redirects": redirect,
    "full": full,
}


def spoil_bytes(data: bytes, chance: random.Random) -> bytes:
    """The data with one bit turned over."""
    spoiled = bytearray(data)
    spoiled[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(spoiled)


def cut_short(data: bytes, chance: random.Random) -> bytes:
    """A part of the data; the rest is never sent."""
    return data[: chance.randrange(len(data))]


def proxy(
    target: int, spoil: Callable[[bytes, random.Random], bytes], seed: int
) -> Callable[[socket.socket], None]:
    """Passes all on to another port, and spoils one of the first answers."""
    chance = random.Random(seed)

    def behave(connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", target)) as server:
            spoiled_at, answers = chance.randrange(12), 0
            connection.settimeout(30.0)
            while request := connection.recv(1 << 20):
                server.sendall(request)
                server.settimeout(0.05)
                answer = b""
                with contextlib.suppress(TimeoutError):
                    while part := server.recv(1 << 20):
                        answer += part
                        server.settimeout(0.005)
                if answer and answers == spoiled_at:
                    answer = spoil(answer, chance)
                answers += bool(answer)
                connection.sendall(answer)

    return behave


@contextlib.contextmanager
def misbehaving_server(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server whose every connection is treated by `behave`; yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def serve_one(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            behave(connection)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                threading.Thread(target=serve_one, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        for open_ in [listener, *connections]:
            with contextlib.suppress(OSError):
                open_.shutdown(socket.SHUT_RDWR)
            open_.close()
