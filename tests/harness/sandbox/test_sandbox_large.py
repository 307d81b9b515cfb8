"""Arrays of many megabytes between a judge and its cells: whole, the receiver's own, and safe to ask for."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from forecast_harness.sandbox import wire
from forecast_harness.sandbox.api import (
    JobResult,
    JobStatus,
    ResourceLimits,
    SandboxJob,
    SandboxLane,
    TensorBytes,
)
from forecast_harness.sandbox.containment import linux
from tests.harness.lanes import SMALL, lane

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

MIB = 1 << 20
WIDE = replace(SMALL, answer_bytes=64 * MIB)


@pytest.fixture(scope="module")
def opened() -> Iterator[SandboxLane]:
    with lane(warm=("tests.harness.transfers",)) as result:
        yield result


def asked(lane: SandboxLane, name: str, limits: ResourceLimits = WIDE, **payload: Any) -> JobResult:
    result = lane.run(SandboxJob(f"tests.harness.transfers:{name}", payload), limits)
    assert result.status is JobStatus.OK, result
    return result


# --- the channel ---


@pytest.mark.parametrize(
    "sizes",
    [
        (4 * MIB - 1, 4 * MIB, 4 * MIB + 1),
        (0, 9 * MIB, 5, 5 * MIB + 3, 1),
        *((n,) for n in (0, 1, MIB - 1, MIB, 5 * MIB + 3)),
    ],
    ids=str,
)
def test_several_arrays_cross_in_one_frame(sizes: tuple[int, ...]) -> None:
    ours, theirs = wire.channel_pair()
    sent = {f"a{n}": TensorBytes("uint8", (size,), os.urandom(size)) for n, size in enumerate(sizes)}
    with ours, theirs:
        writer = threading.Thread(target=wire.send, args=(ours, "said", sent))
        writer.start()
        value, got = wire.receive(theirs, sum(sizes))
        writer.join()
    assert (value, got) == ("said", sent)
    assert all(type(array.data) is bytearray for array in got.values())


def test_an_array_shows_nothing_of_the_memory_it_was_received_into() -> None:
    """Freed memory full of something is what the next array may be received into; an end hands out none."""
    dirty = bytearray(b"\xaa") * (5 * MIB)
    del dirty
    ours, theirs = wire.channel_pair()
    with ours, theirs:
        zeros = TensorBytes("uint8", (5 * MIB,), bytes(5 * MIB))
        writer = threading.Thread(target=wire.send, args=(ours, None, {"a": zeros}))
        writer.start()
        got = wire.receive(theirs, 5 * MIB)[1]
        writer.join()
        assert not any(got["a"].data)
        frame = wire.encode(None, {"a": zeros})
        ours.sendall(frame + b"short")
        ours.close()
        with pytest.raises(EOFError):
            wire.receive(theirs, 5 * MIB)


def test_a_length_that_is_only_claimed_costs_nothing() -> None:
    ours, theirs = wire.channel_pair()
    text = json.dumps({"value": 1, "arrays": [["a", "uint8", [1 << 30]]]}).encode()
    held: list[int] = []
    with ours, theirs:
        ours.sendall(b"FAT1" + struct.pack(">I", len(text)) + text + b"x")
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            wire.receive(theirs, 1 << 30, lambda: held.append(linux.memory_and_threads(os.getpid())[0]))
    assert held[-1] - held[0] < 64 * MIB


# --- judge and cell ---


def test_arrays_are_the_own_of_whoever_received_them(opened: SandboxLane) -> None:
    assert asked(opened, "rounds").value == [True] * 4
    assert asked(opened, "writable").value is True


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("sent", "how", "fault"),
    [
        (0, "killed", "killed"),
        (3 * MIB, "killed", "killed"),
        (3 * MIB, "left", "exit_unfinished"),
        (3 * MIB, "waits", "timeout"),
        (3 * MIB, "closed", "timeout"),
        (5 * MIB, "killed", "forged"),
        (6 * MIB, "waits", "forged"),
    ],
)
def test_a_cell_that_stops_within_an_array_or_forges_one(
    opened: SandboxLane, sent: int, how: str, fault: str
) -> None:
    result = asked(opened, "cheated", replace(WIDE, wall_s=2), bytes=sent, how=how)
    assert (result.value["fault"], result.value["then"]) == (fault, [True] * 4), result


@pytest.mark.parametrize(
    "arrays",
    [
        [["a", "uint8", [65 * MIB]]],
        [["a", "uint8", [40 * MIB]], ["b", "uint8", [40 * MIB]]],
        [["a", "uint8", [-5 * MIB]]],
        [["a", "uint8", [5 * MIB], 0]],
        [["a", "uint8", [1 << 40, 1 << 40]]],
        [["a", "float64", [5 * MIB, 2]]],
    ],
    ids=range(6),
)
def test_claims_that_cannot_be_are_forged(opened: SandboxLane, arrays: list[Any]) -> None:
    result = asked(opened, "cheated", arrays=arrays, bytes=5 * MIB, how="waits")
    assert (result.value["fault"], result.value["then"]) == ("forged", [True] * 4), result


def test_a_question_takes_its_own_size_of_a_cells_memory(opened: SandboxLane) -> None:
    """Not more, as memory that is enlarged while it fills does; and no less."""
    fitting, beyond = asked(opened, "fits", sizes=[225 * MIB, 300 * MIB]).value
    assert fitting == str(225 * MIB)
    assert beyond in ("exit", "memory")


def test_no_descriptor_is_left_of_many_cells(opened: SandboxLane) -> None:
    counts = asked(opened, "descriptors", replace(WIDE, trusted_s=120), cells=40).value
    assert len(counts) == 40
    assert max(counts) == counts[0]


def test_no_cell_sees_what_another_was_sent(opened: SandboxLane) -> None:
    there, beside, after = asked(opened, "strangers").value
    assert there > 1000
    assert (beside, after) == (0, 0)
