"""Trusted entries for the sandbox's tests."""

from __future__ import annotations

import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from forecast_harness.sandbox.api import CellAnswer, Fault, JobContext, SandboxError, Suspicion, TensorBytes
from forecast_harness.sandbox.cell_process import load, receive_descriptor
from forecast_harness.sandbox.wire import SharedMemory, map_shared

_RUN = "tests.harness.judges:run_in_cell"


def run_file(work: JobContext) -> CellAnswer:
    """In one cell, import the payload's `file` and call its `function`; it judges nothing.

    The value is what the function returned (JSON), `seconds` the judge's clock.
    """
    with work.cell() as cell:
        answer = cell.ask(_RUN, work.payload)
    return CellAnswer({"returned": answer.value, "seconds": answer.seconds})


def run_in_cell(payload: dict[str, Any], arrays: Any, state: dict[str, Any]) -> CellAnswer:
    """Import `file`, call its `function` with `arguments`, return its JSON value."""
    module = state.get(payload["file"])
    if module is None:
        module = state[payload["file"]] = load(payload["file"])
    if (function := payload.get("function")) is None:
        return CellAnswer(None)
    return CellAnswer(getattr(module, function)(*payload.get("arguments", [])))


def compare(work: JobContext) -> dict[str, Any]:
    """Ask the candidate twice for the double of a secret number; only this process knows what is right."""
    verdicts, seconds = [], []
    with work.cell() as cell:
        for _ in range(2):
            x = secrets.randbits(62)
            answer = cell.ask(_RUN, {**work.payload, "arguments": [x]})
            verdicts.append(answer.value == 2 * x)
            seconds.append(answer.seconds)
            time.sleep(0.15)  # for an answer that is not asked for
    return {"correct": all(verdicts), "seconds": seconds}


def at_once(work: JobContext) -> dict[str, Any]:
    """Threads that each open, ask and close cells, while another one waits for a cell that answers late."""

    def in_turns(number: int) -> list[int]:
        found = []
        for _ in range(4):
            with work.cell() as cell:
                found.append(cell.ask(_RUN, {**work.payload, "arguments": [number]}).value)
        return found

    late = {"file": "attacks.py", "function": "returns_late", "arguments": [1.5]}
    with work.cell() as slow, ThreadPoolExecutor(4) as pool:
        waiting = pool.submit(slow.ask, _RUN, late)
        told = list(pool.map(in_turns, (1, 2, 3)))
        return {"told": told, "late": waiting.result().value}


def dies_beside(work: JobContext) -> dict[str, Any]:
    """One thread's cell dies while another thread opens cells: each hears of its own."""
    with work.cell() as dying, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(dying.ask, _RUN, {"file": "attacks.py", "function": "crashes"})
        values = []
        for _ in range(4):
            with work.cell() as cell:
                values.append(cell.ask(_RUN, work.payload).value)
        fault = getattr(waiting.exception(), "fault", Fault.NONE)
    return {"fault": fault, "values": values}


def much_in_cell(
    payload: dict[str, Any], arrays: dict[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    return CellAnswer(None, {"much": TensorBytes("uint8", (payload["bytes"],), bytes(payload["bytes"]))})


def much(work: JobContext) -> None:
    """Honest code whose answer is larger than the limit."""
    with work.cell() as cell:
        cell.ask(f"{__name__}:much_in_cell", {"bytes": work.limits.answer_bytes})
        cell.ask(f"{__name__}:much_in_cell", {"bytes": work.limits.answer_bytes + 1})


def seeds_in_cell(payload: dict[str, Any], arrays: dict[str, TensorBytes], state: dict[str, Any]) -> Any:
    return _draws()


def seeds(work: JobContext) -> dict[str, Any]:
    """Numbers drawn by the judge and by a cell from every generator they have."""
    with work.cell() as cell:
        theirs = cell.ask(f"{__name__}:seeds_in_cell").value
    return {"ours": _draws(), "theirs": theirs}


def _draws() -> dict[str, float]:
    import random

    import numpy
    import torch

    return {"python": random.random(), "numpy": numpy.random.rand(), "torch": torch.rand(()).item()}


def freezes(work: JobContext) -> dict[str, Any]:
    """A candidate leaves a thread and a child that count in files; how far they come, frozen and not."""
    with work.cell() as cell:
        cell.ask(_RUN, work.payload)
        cell.freeze()
        refused = ""
        try:
            cell.ask(_RUN, work.payload)
        except SandboxError as error:
            refused = str(error)
        time.sleep(0.4)
        cell.thaw()
        longest = cell.ask(_RUN, {"file": "attacks.py", "function": "longest_pauses"}).value
    return {"refused": refused, "longest": longest}


def suspects(work: JobContext) -> None:
    raise Suspicion("it looked at us strangely")


def fails(work: JobContext) -> None:
    raise KeyError("trusted code has bugs, too")


def asks_nonsense(work: JobContext) -> None:
    with work.cell() as cell:
        cell.ask(_RUN, {"file": object()})


def dies(work: JobContext) -> None:
    import os

    os._exit(0)


def sleeps(work: JobContext) -> None:
    time.sleep(60)


def returns_nonsense(work: JobContext) -> object:
    return float("nan")


def loaded(work: JobContext) -> list[str]:
    """Whether the candidate's file is a module of this process."""
    import sys

    with work.cell() as cell:
        cell.ask(f"{__name__}:load_in_cell")
    return sorted(name for name in sys.modules if name in ("candidate", "attacks"))


def load_in_cell(payload: dict[str, Any], arrays: dict[str, TensorBytes], state: dict[str, Any]) -> str:
    return load("attacks.py").__name__


def asks_in_windows(work: JobContext) -> dict[str, Any]:
    """A window for an answer that takes 0.2 s, after the candidate has done `first`; how long it took."""
    with work.cell() as cell:
        cell.ask(_RUN, work.payload)
        refused = ""
        try:
            cell.ask_in_window(_RUN, {"file": "attacks.py", "function": "honest"})
        except SandboxError as error:
            refused = str(error)
        cell.freeze()
        begin = time.monotonic()
        time.sleep(0.1)
        end = time.monotonic()
        late = {"file": "attacks.py", "function": "returns_late", "arguments": [0.2]}
        found = [cell.ask_in_window(_RUN, late) for _ in range(2)]
        frozen = cell.frozen
        asked = {"file": "attacks.py", "function": "ran_between", "arguments": [begin, end]}
        ran = cell.ask_in_window(_RUN, asked).value
    return {
        "ran": ran,
        "refused": refused,
        "said": [a.value for a in found],
        "seconds": [a.seconds for a in found],
        "frozen": frozen,
    }


def bound_to_one_processor(work: JobContext) -> Any:
    """What a candidate finds that is bound to one processor."""
    with work.cell(processors=[min(os.sched_getaffinity(0))]) as cell:
        return cell.ask(_RUN, work.payload).value


def write_in_cell(payload: dict[str, Any], arrays: dict[str, TensorBytes], state: dict[str, Any]) -> str:
    """Map what is shared, add one to each byte, and try to change its size."""
    fd = receive_descriptor(state)
    data = map_shared(fd, payload["bytes"])
    for n in range(payload["bytes"]):
        data[n] += 1
    said = []
    for size in (0, 2 * payload["bytes"]):
        try:
            os.ftruncate(fd, size)
            said.append("resized")
        except PermissionError:
            said.append("sealed")
    return " ".join(said)


def shares(work: JobContext) -> dict[str, Any]:
    """Memory that is shared with a cell."""
    memory = SharedMemory(4096)
    memory.data[:] = bytes(range(16)) * 256
    entry = f"{__name__}:write_in_cell"
    with work.cell() as cell:
        said = cell.ask(entry, {"bytes": 4096}, descriptor=memory.fd).value
    memory.forget_descriptor()
    return {"said": said, "data": list(memory.data[:16]), "size": memory.size}
