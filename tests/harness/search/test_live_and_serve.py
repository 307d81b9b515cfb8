"""The live view in a terminal and in a pipe, and the local server with what it refuses."""

from __future__ import annotations

import http.client
import io
import json
import socket
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console

from forecast_autotune.errors import RecordError
from forecast_autotune.report.local_server import CannotServePageError
from forecast_harness.search.events import Event
from forecast_harness.search.log import encode
from forecast_harness.search.report.live import LiveDisplay
from forecast_harness.search.report.server import LogFollower, ReportServer, serve
from forecast_harness.search.state import SearchState, apply_event, replay_events
from tests.harness.search.example_log import ExampleSearch


@pytest.fixture(autouse=True)
def drawn_at_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forecast_harness.search.report.live._REDRAW_INTERVAL_S", 0.0)


def watched(example: ExampleSearch, *, terminal: bool, quiet: bool = False) -> str:
    """All that a terminal or pipe got while the search of an example went on."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=110, color_system=None)
    state = SearchState()
    with LiveDisplay(console, quiet=quiet) as live:
        for event in example.events():
            live(apply_event(state, event))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# --- the view ---


def test_a_pipe_gets_a_line_per_batch_and_per_better_node() -> None:
    state = replay_events(ExampleSearch().events())
    text = watched(ExampleSearch(), terminal=False)
    assert "\x1b" not in text
    found = text.splitlines()
    records = [
        p for a, p in zip([0.0, *(p.best for p in state.history)], state.history, strict=False) if p.best < a
    ]
    assert sum("the best so far" in line for line in found) == len(records)
    assert sum(", batch " in line for line in found) == max(state.batches)


def test_a_terminal_shows_where_the_search_stands_in_one_line() -> None:
    state = replay_events(ExampleSearch().events())
    text = watched(ExampleSearch(), terminal=True)
    spent = (f"{len(state.history)} of 200", f"{state.spent.tokens:,} of 2,000,000")
    for part in ("finished: measurements 200 of 200 spent", "the best so far", ", batch ", *spent):
        assert part in text


def test_quiet_is_quiet() -> None:
    assert watched(ExampleSearch(), terminal=False, quiet=True) == ""
    assert watched(ExampleSearch(), terminal=True, quiet=True) == ""


def test_names_are_no_markup_and_no_control_sequences() -> None:
    example = ExampleSearch(batches=1, name="[red]x[/red]\x1b]0;owned\x07")
    text = watched(example, terminal=True)
    assert "[red]x[/red]" in text
    assert "owned" in text
    assert "\x1b]0" not in text


def test_failures_say_why_in_the_line() -> None:
    text = watched(ExampleSearch(batches=1, failing=1.0, stopped=False), terminal=True)
    assert any(word in text for word in ("compile error error:", "incorrect wrong:", "timeout no answer"))


# --- the server ---


def put(folder: Path, events: list[Event]) -> None:
    (folder / "log.jsonl").write_bytes(b"".join(map(encode, events)))


def ask(
    server: ReportServer, path: str, *, host: str | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        headers = {} if host is None else {"Host": host}
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    put(tmp_path, list(ExampleSearch(batches=3).events()))
    with serve(tmp_path) as found:
        yield found


def test_a_finished_folder_is_served(server: ReportServer) -> None:
    status, headers, text = ask(server, "/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "<h1>Search of swiglu</h1>" in text
    assert "connect-src 'self'" in unescape(text)


@pytest.mark.parametrize(
    "path",
    [
        "/log.jsonl",
        "/..",
        "/../../etc/passwd",
        "/nodes/",
        "/state.json/",
        "/%2e%2e/log.jsonl",
        "/x?y=/",
    ],
)
def test_there_is_nothing_else(server: ReportServer, path: str) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1.evil.example", ""]
)
def test_a_foreign_name_for_this_address_is_refused(server: ReportServer, host: str) -> None:
    """DNS rebinding: a page of evil.example whose name points here must not read the search."""
    for path in ("/", "/state.json"):
        status, _, text = ask(server, path, host=host)
        assert status == 403
        assert "swiglu" not in text


def test_its_own_names_are_accepted(server: ReportServer) -> None:
    assert ask(server, "/", host=f"localhost:{server.port}")[0] == 200
    assert ask(server, "/", host=f"127.0.0.1:{server.port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(server: ReportServer, method: str) -> None:
    assert ask(server, "/", method=method)[0] == 501


def test_only_this_machine_can_connect(server: ReportServer) -> None:
    assert server._http.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.port}/"


def test_news_come_once(tmp_path: Path) -> None:
    events = list(ExampleSearch(batches=4).events())
    put(tmp_path, events[:12])
    with ReportServer(tmp_path) as server:
        first = json.loads(ask(server, "/state.json")[2])
        assert "content" in first
        again = json.loads(ask(server, f"/state.json?revision={first['revision']}")[2])
        assert again == {"revision": first["revision"]}
        put(tmp_path, events)
        server._next_render_at = 0.0
        later = json.loads(ask(server, f"/state.json?revision={first['revision']}")[2])
        assert int(later["revision"]) > int(first["revision"])
        assert len(later["data"]["nodes"]) == len(replay_events(events).nodes)


@pytest.mark.parametrize("revision", ["-1", "abc", "%00", "9" * 400, "'><script>"])
def test_a_nonsensical_revision_gets_the_whole(server: ReportServer, revision: str) -> None:
    status, _, text = ask(server, f"/state.json?revision={revision}")
    assert status == 200
    assert "content" in json.loads(text)


def test_drawing_does_not_take_the_search_its_core(tmp_path: Path) -> None:
    """After drawing, a server rests ten times as long, however fast it is asked and the log grows."""
    events = list(ExampleSearch(batches=4).events())
    put(tmp_path, events[:12])
    with ReportServer(tmp_path) as server:
        first = server.changes_since("")
        server._next_render_at = float("inf")
        put(tmp_path, events)
        assert server.changes_since(first["revision"]) == {"revision": first["revision"]}
        assert server.changes_since("") is first


def test_a_folder_without_a_log_waits_for_one(tmp_path: Path) -> None:
    with ReportServer(tmp_path) as server:
        assert "nothing yet" in ask(server, "/")[2]
        assert json.loads(ask(server, "/state.json")[2]) == {"revision": ""}
        put(tmp_path, list(ExampleSearch(batches=1).events()))
        assert "Search of swiglu" in ask(server, "/")[2]


def test_a_damaged_log_is_told(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("nonsense\n")
    with ReportServer(tmp_path) as server:
        status, _, text = ask(server, "/")
        assert status == 500
        assert "not an event" in text
        assert ask(server, "/nothing")[0] == 404


def test_a_port_in_use_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CannotServePageError, match="name another one, or 0"):
            serve(tmp_path, taken.getsockname()[1])


def test_a_reader_follows_and_waits_for_whole_lines(tmp_path: Path) -> None:
    events = list(ExampleSearch(batches=3).events())
    raw = b"".join(map(encode, events))
    log = tmp_path / "log.jsonl"
    reader = LogFollower(log)
    assert reader.refresh().started is None
    for end in (100, len(raw) // 3, len(raw) - 1, len(raw)):
        log.write_bytes(raw[:end])
        state = reader.refresh()
        assert len(state.history) == len(fold_whole(raw[:end]).history)
    assert state.stopped is not None
    log.write_bytes(
        b"".join(map(encode, ExampleSearch(batches=1, seed=3).events()))
    )  # another search in its place
    assert len(reader.refresh().history) == len(
        replay_events(ExampleSearch(batches=1, seed=3).events()).history
    )
    with log.open("ab") as file:
        file.write(b'{"type":"nothing"}\n')
    with pytest.raises(RecordError):
        reader.refresh()


def fold_whole(raw: bytes) -> SearchState:
    from forecast_harness.search.log import parse_log

    return replay_events(parse_log(raw, Path("log.jsonl"))[0])
