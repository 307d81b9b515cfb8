"""A server of pages for this machine alone: what it answers, and what it refuses."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator

import pytest

from forecast_autotune.errors import StoreError
from forecast_autotune.report.local_server import ADDRESS, CannotServePageError, LocalServer, ServedText


def served(render: Callable[[], str], port: int = 0) -> LocalServer:
    """A server of one page."""
    return LocalServer({"/": lambda query: ServedText(render())}, port)


@pytest.fixture
def server() -> Iterator[LocalServer]:
    with served(lambda: "<p>page</p>") as result:
        yield result


def asked(
    server: LocalServer, path: str = "/", method: str = "GET", host: str | None = None
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(ADDRESS, server.port, timeout=30)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def test_the_page_and_nothing_else_is_served(server: LocalServer) -> None:
    status, text, headers = asked(server)
    assert (status, text) == (200, "<p>page</p>")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert (headers["Cache-Control"], headers["X-Frame-Options"]) == ("no-store", "DENY")
    assert asked(server, method="HEAD")[1] == ""
    for path in ("/../etc/passwd", "/favicon.ico", "/page"):
        assert asked(server, path)[0] == 404
    for method in ("POST", "PUT", "DELETE"):
        assert asked(server, method=method)[0] == 501


@pytest.mark.parametrize(
    "host", ["attacker.example", "127.0.0.1", "", "localhost:1", "127.0.0.1.nip.io:{port}"]
)
def test_another_name_for_this_machine_is_refused(server: LocalServer, host: str) -> None:
    assert asked(server, host=host.format(port=server.port))[0] == 403
    assert asked(server, host=f"localhost:{server.port}")[0] == 200


def test_only_this_machine_is_listened_to(server: LocalServer) -> None:
    assert server.url == f"http://127.0.0.1:{server.port}/"
    assert server._http.server_address[0] == "127.0.0.1"
    with pytest.raises(CannotServePageError, match=f"port {server.port} of 127.0.0.1"):
        served(lambda: "", server.port)


def test_a_store_that_cannot_be_read_is_an_answer() -> None:
    def fail() -> str:
        raise StoreError("its folder is a file")

    with served(fail) as server:
        assert asked(server)[:2] == (500, "its folder is a file\n")


def test_pages_are_rendered_one_at_a_time() -> None:
    inside, most = [0], [0]

    def render() -> str:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.01)
        inside[0] -= 1
        return "x"

    with served(render) as server:
        threads = [threading.Thread(target=asked, args=(server,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1]
