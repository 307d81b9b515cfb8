"""Launches within windows, with a cell that is a fake: what is written when, what is read, what is refused."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forecast_harness.sandbox.api import CandidateFault, CellAnswer, Fault, TensorBytes
from forecast_harness.sandbox.wire import map_shared
from forecast_harness.targets.packs import Language, load_pack
from forecast_harness.targets.packs.schema import PackFormat
from forecast_harness.verify.cost_control import ComputeDevice
from forecast_harness.verify.launcher import WindowedLauncher, open_launcher
from forecast_harness.verify.problem import DrawSpec, LaunchCase, problem_of


class FakeCell:
    """Computes a softmax in this process, and notes what it is told while it is not within a window."""

    def __init__(self, **lies: Any) -> None:
        self.lies = lies
        self.frozen = False
        self.log: list[str] = []
        self.seen: list[bytes] = []
        """The block at each question outside of windows."""
        self.forms: dict[str, Any] = {}
        self.block: mmap.mmap | None = None
        self.copied: mmap.mmap | None = None

    def ask(
        self,
        entry: str,
        payload: Mapping[str, Any],
        arrays: Mapping[str, TensorBytes],
        *,
        descriptor: int | None = None,
    ) -> CellAnswer:
        assert not self.frozen, "a stopped cell answers nothing"
        question = entry.partition(":")[2]
        self.log.append(question)
        if question == "share":
            assert descriptor is not None
            self.block = map_shared(descriptor, payload["bytes"])
            return CellAnswer({})
        assert self.block is not None
        self.seen.append(bytes(self.block[:4096]))
        if question == "arm":
            self.forms[payload["form"]] = payload
        return CellAnswer({"harness": {"patched": [], "flags": {}, "threads": []}})

    def ask_in_window(self, entry: str, payload: Mapping[str, Any]) -> CellAnswer:
        assert self.frozen, "only a stopped cell has a window"
        assert self.block is not None
        self.log.append("window")
        payload = {**self.forms.get(payload.get("form", ""), {}), **payload}
        (slot,) = payload["slots"]
        block = torch.frombuffer(self.block, dtype=torch.uint8)
        flat = block[slot["offset"] : slot["offset"] + 4 * slot["shape"][0] * slot["shape"][1]]
        self.result = flat.view(torch.float32).reshape(slot["shape"]).softmax(-1)
        form = {"dtype": "float32", "shape": slot["shape"], "stride": list(self.result.stride())}
        value = {
            "seconds": 1e-4,
            "whole": 1e-4,
            "protocol": "host",
            "operations": {},
            "kernels": 0,
            "compiled": 0,
        }
        value |= {"outputs": [{**form, "alias": False, **self.lies.get("form", {})}]}
        value |= {"places": [self.result.data_ptr()], **self.lies.get("value", {})}
        return CellAnswer(value, {}, 2e-4)

    def share(self, descriptor: int, size: int) -> None:
        self.copied = map_shared(os.dup(descriptor), size)

    def copy_out(self, places: Sequence[tuple[int, int, int]]) -> int:
        assert self.frozen, "only what is stopped holds still"
        assert self.copied is not None
        for address, size, offset in places:
            if address != self.result.data_ptr():
                return 1
            self.copied[offset : offset + size] = ctypes.string_at(address, size)
        return 0

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False


def some_case(tmp_path: Path, rows: int = 4) -> LaunchCase:
    generator = torch.Generator().manual_seed(rows)
    how = DrawSpec("normal", "contiguous", generator, ComputeDevice("cpu"))
    return problem_of(load_pack("softmax"), tmp_path).case({"M": rows, "N": 32}, how)


def launcher(cell: FakeCell) -> WindowedLauncher:
    result = WindowedLauncher(cell, PackFormat.OWN, random.Random(0))
    assert result.prepare("solution.py", "run", Language.TORCH) == []
    return result


def test_a_launch_is_read_out_of_the_stopped_cell(tmp_path: Path) -> None:
    cell, case = FakeCell(), some_case(tmp_path)
    result = launcher(cell)
    reply = result.timed(case)
    assert (reply.reasons, reply.outputs) == ([], None)
    assert reply.wall_seconds == 2e-4
    result.read(reply)
    torch.testing.assert_close(reply.tensors[0], case.tensors["x"].softmax(-1))
    assert cell.frozen


def test_inputs_are_written_after_the_last_question_outside_a_window(tmp_path: Path) -> None:
    cell = FakeCell()
    result = launcher(cell)
    for rows in (3, 4, 4, 4, 5):
        case = some_case(tmp_path, rows)
        result.timed(case)
        own = case.tensors["x"].numpy().tobytes()
        assert cell.block is not None
        assert own in bytes(cell.block[:4096])
    contents = [some_case(tmp_path, rows).tensors["x"].numpy().tobytes() for rows in (3, 4, 5)]
    # Each was shown first in a window: what was asked outside before that had not seen it.
    first = {rows: n for n, rows in enumerate((3, 4, 5))}
    assert cell.log.count("window") == 5
    assert not any(contents[first[5]] in seen for seen in cell.seen)


def test_what_is_met_again_is_told_before_the_window(tmp_path: Path) -> None:
    cell, case = FakeCell(), some_case(tmp_path)
    result = launcher(cell)
    for _ in range(3):
        result.timed(case)
    assert [q for q in cell.log if q != "report"] == ["share", "prepare", "window", "arm", "window", "window"]


@pytest.mark.parametrize(
    "lies",
    [
        {"form": {"stride": [1 << 40, 1]}},
        {"form": {"shape": [1 << 30, 32]}},
        {"form": {"dtype": "system"}},
        {"form": {"shape": [-4, 32]}},
        {"value": {"places": []}},
        {"value": {"places": [0]}},
        {"value": {"places": [-1]}},
        {"value": {"places": [1 << 70]}},
        {"value": {"outputs": [], "places": [1, 2]}},
        {"value": {"outputs": {}}},
        {"value": {"seconds": "no"}},
    ],
    ids=str,
)
def test_a_forged_description_is_refused(tmp_path: Path, lies: dict[str, Any]) -> None:
    result = launcher(FakeCell(**lies))
    with pytest.raises(CandidateFault) as caught:
        result.read(result.timed(some_case(tmp_path)))
    assert caught.value.fault is Fault.FORGED


def test_an_earlier_launch_is_gone(tmp_path: Path) -> None:
    result = launcher(FakeCell())
    first = result.timed(some_case(tmp_path))
    result.timed(some_case(tmp_path))
    with pytest.raises(ValueError, match="launch 1 cannot be read after launch 2"):
        result.read(first)


def test_more_memory_is_shared_when_a_block_needs_it(tmp_path: Path) -> None:
    cell = FakeCell()
    result = launcher(cell)
    result.timed(some_case(tmp_path, 200_000))
    assert cell.log.count("share") == 2
    assert cell.frozen


def test_only_hosts_have_windows() -> None:
    from forecast_harness.verify.cost_control import PhaseTimer

    kinds = [
        open_launcher(FakeCell(), PackFormat.OWN, random.Random(0), device, PhaseTimer()).windowed
        for device in ("cpu", "cuda")
    ]
    assert kinds == [True, False]
