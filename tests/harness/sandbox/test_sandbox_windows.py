"""A cell runs within the judge's window and at no other time, whatever its candidate has left behind."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from forecast_harness.sandbox import process_stops
from forecast_harness.sandbox.api import (
    ContainmentLevel,
    Fault,
    JobStatus,
    ResourceLimits,
    SandboxLane,
    strongest_level,
)
from forecast_harness.sandbox.cell import CandidateFault, Cell, ServerConnection
from tests.harness.lanes import judge, lane

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


@pytest.fixture(scope="module", params=["strongest", "weakest"])
def each(request: pytest.FixtureRequest) -> Iterator[SandboxLane]:
    with lane(strongest_level() if request.param == "strongest" else ContainmentLevel.PROCESS) as opened:
        yield opened


@pytest.mark.parametrize("first", ["honest", "watches_itself", "forks_a_family"])
def test_a_window_holds_all_that_an_answer_takes(each: SandboxLane, first: str) -> None:
    result = judge(each, "asks_in_windows", first)
    assert result.status is JobStatus.OK, result.detail
    assert "freeze()" in result.value["refused"], "a cell that runs anyway has no window"
    assert result.value["said"] == ["late", "late"]
    assert min(result.value["seconds"]) >= 0.2, "not even what it slept through is left out"
    assert result.value["frozen"]


def test_who_wakes_while_all_are_stopped_is_found(each: SandboxLane) -> None:
    result = judge(each, "asks_in_windows", "wakes_itself")
    if result.status is JobStatus.OK:  # it tried in vain: a stop takes away what would have woken it
        assert result.value["ran"] is False
    else:
        assert result.fault in (Fault.RAN_WHILE_STOPPED, Fault.PROCESSES), result.detail


def test_a_candidate_does_not_choose_its_processors() -> None:
    if strongest_level() < ContainmentLevel.SYSCALLS:
        pytest.skip("no filter for system calls works here")
    with lane(strongest_level()) as opened:
        result = judge(opened, "bound_to_one_processor", "chooses_processors")
    assert result.value == [1, 1], result.detail


def test_shared_memory_keeps_its_size(each: SandboxLane) -> None:
    result = judge(each, "shares")
    assert result.value["said"] == "sealed sealed", result.detail
    assert result.value["data"] == list(range(1, 17))
    assert result.value["size"] == 4096


def test_a_cell_that_ends_before_it_is_resumed_says_how() -> None:
    """Played by this test, its server and its first process: the moment between two messages is a short one."""
    judge, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, _inside = socket.socketpair()
    orders, first_process = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sent = [channel.fileno(), orders.fileno()]
    socket.send_fds(server, [json.dumps({"event": "cell", "cell": 1}).encode()], sent)
    cell = Cell(ServerConnection(judge), ResourceLimits())
    for none_left in (b"0", b"0"):  # stopped; all of them
        first_process.send(none_left)
    cell.freeze()

    def end() -> None:
        assert first_process.recv(64) == process_stops.STOP
        assert first_process.recv(64) == process_stops.CHECK
        first_process.shutdown(socket.SHUT_RD)
        first_process.send(b"0")  # none has moved
        server.send(json.dumps({"event": "end", "cell": 1, "why": "memory"}).encode())

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(CandidateFault, match="the memory limit was exceeded"):
        cell.thaw()
    ending.join()
    cell.close()
