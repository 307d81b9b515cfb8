"""Answers of cells: whatever they hold, they are read or called forged; nothing else comes of them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forecast_harness.sandbox import wire
from forecast_harness.sandbox.api import CandidateFault, CellAnswer, Fault, TensorBytes, WireError
from forecast_harness.sandbox.wire import map_shared
from forecast_harness.targets.packs import Language, load_pack
from forecast_harness.targets.packs.schema import PackFormat
from forecast_harness.verify import launch_cell as inside
from forecast_harness.verify.launcher import Launcher, WindowedLauncher
from forecast_harness.verify.problem import DrawSpec, LaunchCase, problem_of

ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    3.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    10**400,
    -(10**400),
    1 << 63,
    "",
    "x" * 100_000,
    "\ud800",
    "\x1b[31m\0",
    [],
    [[]],
    {},
    {"t": None},
    [1] * 10_000,
    {"shape": [1 << 60], "dtype": "float32", "stride": [1], "alias": False},
    {"problem": 5},
    {"dtype": "float32", "shape": [2, 2], "stride": [-1, 1], "alias": False},
    {"dtype": "Tensor", "shape": [2], "stride": [1], "alias": False},
    {"dtype": "float64", "shape": [1 << 20] * 2, "stride": [1, 1], "alias": 0},
    json.loads("[" * 200 + "]" * 200),
]
NAMES = ["seconds", "outputs", "shape", "alias", "digests", "harness", "problem", "__class__", "x" * 5000]


def mutated(value: Any, rng: random.Random) -> Any:
    """The value with one to three places in it changed, dropped, repeated or added to."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        stack = [value]
        while stack:
            one = stack.pop()
            keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
            places += [(one, key) for key in keys]
            stack += [one[key] for key in keys]
        if not places or rng.random() < 0.03:
            return copy.deepcopy(rng.choice(ODD))
        where, key = rng.choice(places)
        kind = rng.randrange(4)
        if kind == 0:
            del where[key]
        elif kind == 1 and isinstance(where, dict):
            where[rng.choice(NAMES)] = copy.deepcopy(rng.choice(ODD))
        elif kind == 1:
            where.insert(key, copy.deepcopy(where[key]))
        else:
            where[key] = copy.deepcopy(rng.choice(ODD))
    return value


class Cell:
    """A cell in this process, whose answers to launches are changed on their way."""

    def __init__(self, rng: random.Random | None) -> None:
        self._rng, self._state = rng, {}  # type: ignore[var-annotated]

    def ask(
        self,
        entry: str,
        payload: Mapping[str, Any],
        arrays: Mapping[str, TensorBytes],
        *,
        descriptor: int | None = None,
    ) -> CellAnswer:
        question = entry.partition(":")[2]
        if question == "prepare":
            prepared = inside.prepare({**payload, "file": ""}, arrays, self._state)
            self._state["entry"] = lambda x: torch.softmax(x, -1)
            return prepared
        if descriptor is not None:
            data = map_shared(descriptor, payload["bytes"])
            self._state["shared"] = torch.frombuffer(data, dtype=torch.uint8)
            return CellAnswer({})
        answer: CellAnswer = getattr(inside, question)(payload, arrays, self._state)
        if self._rng is None:
            return answer
        value, given = mutated(answer.value, self._rng), dict(answer.arrays)
        if given and self._rng.random() < 0.3:
            name = self._rng.choice(list(given))
            kind, size = self._rng.choice([("uint8", 1), ("float32", 4)]), self._rng.randrange(9)
            odd = TensorBytes(kind[0], (size,), bytes(size * kind[1]))
            given[self._rng.choice([name, "out7", "out-1", "out", ""])] = odd
        return CellAnswer(value, given, 1e-3)

    def ask_in_window(self, entry: str, payload: Mapping[str, Any]) -> CellAnswer:
        answer = self.ask(entry, payload, {})
        return CellAnswer(answer.value, answer.arrays, 1e-3)

    def share(self, descriptor: int, size: int) -> None:
        self._copies = map_shared(descriptor, size)

    def copy_out(self, places: Sequence[tuple[int, int, int]]) -> int:
        missing = 0
        with Path("/proc/self/mem").open("rb", buffering=0) as memory:
            for address, size, offset in places:
                try:
                    memory.seek(address)
                    data = memory.read(size)
                except (OSError, OverflowError, ValueError):
                    data = b""
                missing += len(data) != size
                self._copies[offset : offset + len(data)] = data
        return missing

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...


def launcher_of(cell: Cell, windowed: bool) -> Launcher:
    rng = random.Random(0)
    result = (
        WindowedLauncher(cell, PackFormat.OWN, rng)
        if windowed
        else Launcher(cell, PackFormat.OWN, rng, "cpu")
    )
    result.prepare("solution.py", "run", Language.TORCH)
    return result


@pytest.fixture
def case(tmp_path: Path) -> LaunchCase:
    how = DrawSpec("normal", "contiguous", torch.Generator().manual_seed(0))
    return problem_of(load_pack("softmax"), tmp_path).case({"M": 4, "N": 8}, how)


@pytest.mark.parametrize("windowed", [False, True], ids=["asked", "in a window"])
def test_answers_that_are_not_changed_are_read(case: LaunchCase, windowed: bool) -> None:
    result = launcher_of(Cell(None), windowed)
    for ask in (result.launch, result.timed):
        reply = ask(case)
        result.read(reply)
        assert not reply.reasons
        assert not result.changed_since(reply)
        assert case.check(reply.tensors)[0] is None


@pytest.mark.parametrize("windowed", [False, True], ids=["asked", "in a window"])
def test_changed_answers_are_read_or_forged(case: LaunchCase, windowed: bool) -> None:
    """1,500 of each: a reply with or without reasons, or a forgery; no other exception, whatever was changed."""
    rng = random.Random(1)
    results: list[CandidateFault] = []
    refused = 0
    cell = Cell(rng)
    result = launcher_of(cell, windowed)
    for _ in range(1500):
        try:
            reply = result.launch(case)
            refused += bool(reply.reasons) or case.check(reply.tensors)[0] is not None
            result.changed_since(reply)
        except CandidateFault as fault:
            results.append(fault)
    assert {fault.fault for fault in results} == {Fault.FORGED}
    assert all(len(fault.detail) < 1000 for fault in results)
    assert len(results) > 1000
    assert refused > 0


@pytest.mark.parametrize("windowed", [False, True], ids=["asked", "in a window"])
def test_a_second_answer_of_less_than_the_first_is_forged(case: LaunchCase, windowed: bool) -> None:
    class Shortened(Cell):
        def ask(
            self,
            entry: str,
            payload: Mapping[str, Any],
            arrays: Mapping[str, TensorBytes],
            *,
            descriptor: int | None = None,
        ) -> CellAnswer:
            answer = super().ask(entry, payload, arrays, descriptor=descriptor)
            if "again" in (payload.get("act"), entry.partition(":")[2]):
                return CellAnswer({**answer.value, "outputs": [{}], "places": []}, {}, answer.seconds)
            return answer

    result = launcher_of(Shortened(None), windowed)
    reply = result.launch(case)
    with pytest.raises(CandidateFault) as caught:
        result.changed_since(reply)
    assert caught.value.fault is Fault.FORGED


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"value": ' + "9" * 400 + "}",
        '{"value": 1e999}',
        '{"value": ' + "9" * 5000 + "}",
        "\xff",
    ],
)
def test_frames_with_numbers_that_nothing_holds_are_none(text: str) -> None:
    ours, theirs = wire.channel_pair()
    with ours, theirs:
        data = text.encode("latin-1")
        theirs.sendall(b"FAT1" + len(data).to_bytes(4, "big") + data)
        with pytest.raises(WireError):
            wire.receive(ours, 1 << 20)
