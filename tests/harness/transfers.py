"""Trusted entries, and what they ask of cells, for the tests of large arrays on their way."""

from __future__ import annotations

import json
import os
import secrets
import signal
import struct
import time
from pathlib import Path
from typing import Any

from forecast_harness.sandbox.api import CandidateFault, Cell, CellAnswer, JobContext, TensorBytes

_LARGE = 5 << 20
_ME = __name__


def _random(size: int) -> TensorBytes:
    return TensorBytes("uint8", (size,), os.urandom(size))


def echo_in_cell(
    payload: dict[str, Any], arrays: dict[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """All that came, in the reverse order, and everything that came before, as it is now."""
    kept = state.setdefault("kept", {})
    kept.update(arrays)
    return CellAnswer(len(kept), dict(reversed(kept.items())))


def rounds(work: JobContext) -> list[bool]:
    """Large and small arrays, several in one question; the cell keeps them from question to question."""
    sent: dict[str, TensorBytes] = {}
    found = []
    with work.cell() as cell:
        for n, sizes in enumerate([(7, _LARGE + 1), (_LARGE, 0, 3 * _LARGE, 12345), (1,), (9 << 20,)]):
            fresh = {f"{n}.{m}": _random(size) for m, size in enumerate(sizes)}
            sent |= fresh
            got = cell.ask(f"{_ME}:echo_in_cell", {}, fresh).arrays
            found.append(got == sent and list(got) == list(reversed(sent)))
            for array in got.values():  # the judge's own: changing them changes nothing for the cell
                memoryview(array.data)[:] = bytes(len(array.data))
    return found


def writes_in_cell(
    payload: dict[str, Any], arrays: dict[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    memoryview(arrays["a"].data)[:3] = b"cat"
    return CellAnswer(None, arrays)


def writable(work: JobContext) -> bool:
    sent = _random(_LARGE)
    with work.cell() as cell:
        got = cell.ask(f"{_ME}:writes_in_cell", {}, {"a": sent}).arrays["a"]
    return bytes(got.data) == b"cat" + bytes(sent.data)[3:]


def _frame(payload: dict[str, Any], size: int, nonce: str) -> bytes:
    value = {"nonce": nonce, "value": None}
    text = json.dumps({"value": value, "arrays": payload.get("arrays", [["a", "uint8", [size]]])}).encode()
    return b"FAT1" + struct.pack(">I", len(text)) + text


def cheats_in_cell(payload: dict[str, Any], arrays: dict[str, TensorBytes], state: dict[str, Any]) -> None:
    """Speak on the channel itself: the beginning of an array, or more than it, and then what `how` says."""
    with os.fdopen(os.dup(3), "wb") as channel:
        channel.write(_frame(payload, _LARGE, "") + bytes(payload["bytes"]))
    if payload["how"] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if payload["how"] == "left":
        os._exit(0)
    if payload["how"] == "closed":
        os.close(3)
    time.sleep(60)


def cheated(work: JobContext) -> dict[str, Any]:
    """What a cell is found guilty of that cheats with an array, and whether the next one is served."""
    fault, detail = "", ""
    with work.cell() as cell:
        try:
            cell.ask(f"{_ME}:cheats_in_cell", work.payload, {"a": _random(_LARGE)})
        except CandidateFault as error:
            fault, detail = str(error.fault), error.detail
    return {"fault": fault, "detail": detail, "then": rounds(work)}


def fits(work: JobContext) -> list[str]:
    """How questions of these sizes end in a cell of limited memory."""
    found = []
    for size in work.payload["sizes"]:
        with work.cell() as cell:
            try:
                found.append(str(cell.ask(f"{_ME}:size_in_cell", {}, {"a": _zeros(size)}).value))
            except CandidateFault as error:
                found.append(str(error.fault))
    return found


def _zeros(size: int) -> TensorBytes:
    return TensorBytes("uint8", (size,), bytes(size))


def size_in_cell(payload: dict[str, Any], arrays: dict[str, TensorBytes], state: dict[str, Any]) -> int:
    return len(arrays["a"].data)


def descriptors(work: JobContext) -> list[int]:
    """How many files this process has open, after ever more cells; every other one is killed."""
    counts = []
    sent = {"a": _random(_LARGE)}
    for n in range(work.payload["cells"]):
        with work.cell() as cell:
            cell.ask(f"{_ME}:size_in_cell", {}, sent)
            if n % 2:
                _kill(cell)
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    return counts


def _kill(cell: Cell) -> None:
    try:
        cell.ask(f"{_ME}:cheats_in_cell", {"bytes": 100, "how": "killed"})
    except CandidateFault:
        return


def search_in_cell(payload: dict[str, Any], arrays: dict[str, TensorBytes], state: dict[str, Any]) -> int:
    """How often a text stands twice in a row in this process's memory.

    It is told inverted, and looked for once: the question and what is looked for do not count.
    """
    wanted = bytes(255 - b for b in bytes.fromhex(payload["inverted"]))
    found = 0
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for line in Path("/proc/self/maps").read_text().splitlines():
            low, high = (int(n, 16) for n in line.split()[0].split("-"))
            if "rw" in line.split()[1]:
                for at in range(low, high, 1 << 20):
                    memory.seek(at)
                    try:
                        block = memory.read(min(1 << 20, high - at))
                    except OSError:
                        break
                    for part in block.split(wanted)[1:-1]:
                        found += not part
    return found


def strangers(work: JobContext) -> list[int]:
    """How often a secret sent to one cell is found there, in a second beside it and in one after both."""
    secret = secrets.token_bytes(32)
    sent = {"a": TensorBytes("uint8", (_LARGE,), secret * (_LARGE // 32))}
    inverted = {"inverted": bytes(255 - b for b in secret).hex()}
    with work.cell() as one, work.cell() as two:
        one.ask(f"{_ME}:size_in_cell", {}, sent)
        two.ask(f"{_ME}:size_in_cell", {}, {"a": _zeros(_LARGE)})
        found = [int(one.ask(f"{_ME}:search_in_cell", inverted, sent).value)]
        found.append(int(two.ask(f"{_ME}:search_in_cell", inverted).value))
    with work.cell() as three:
        three.ask(f"{_ME}:size_in_cell", {}, {"a": _zeros(_LARGE)})
        found.append(int(three.ask(f"{_ME}:search_in_cell", inverted).value))
    return found
