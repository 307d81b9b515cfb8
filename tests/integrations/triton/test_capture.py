"""Arguments of captured calls that are no tensors of torch's, and addresses that cannot be kept."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

from forecast_autotune.records.captured_call import CapturedCall
from forecast_autotune.store import Store
from forecast_integrations.triton.capture import CallCapture
from forecast_integrations.triton.null_device import null_device


class Pointer:
    """As much of a tensor as Triton asks for."""

    def __init__(self, of: torch.Tensor, dtype: Any = None) -> None:
        self.held, self.dtype = of, dtype or of.dtype

    def data_ptr(self) -> int:
        return self.held.data_ptr()


class Strided(Pointer):
    """A view with a shape of its own."""

    def __init__(self, of: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        super().__init__(of)
        self.shape, self._stride = shape, stride

    def stride(self) -> tuple[int, ...]:
        return self._stride


@triton.jit
def copy(x, out, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(out + o, tl.load(x + o))


def noted(folder: Path, x: Any) -> tuple[list[CapturedCall], list[bytes], str]:
    """The calls that one launch leaves, the contents of `x`, and the line of the capture."""
    files = Store(folder).captures
    assert files is not None
    capture = CallCapture(files, values=True)
    with null_device():
        capture.note(copy, (x, torch.empty(16)), (1,), {"BLOCK": 16, "num_warps": 4})
    calls = list(files.every())
    kept = [
        (p.parent / "contents" / c.contents["x"].digest).read_bytes() for c, p in calls if "x" in c.contents
    ]
    return [c for c, _ in calls], kept, capture.line()


@pytest.mark.parametrize("kind", ["pointer", "strided", "reinterpreted", "pair"])
def test_whatever_has_an_address_is_a_tensor(tmp_path: Path, kind: str) -> None:
    held = torch.arange(24, dtype=torch.float32)
    x = {
        "pointer": lambda: Pointer(held[8:]),
        "strided": lambda: Strided(held, (4, 3), (6, 2)),
        "reinterpreted": lambda: triton.reinterpret(held.view(torch.int8), tl.float8e5),
        "pair": lambda: Pointer(held, tl.bfloat16),
    }[kind]()
    ((call,), (data,), _) = noted(tmp_path, x)
    at = x.data_ptr() % 64
    assert call.arguments[0].extra.get("address", 0) == (at & -at), "it is judged where in a line it was"
    name, dtype, shape = {
        "pointer": ("x", "float32", (16,)),
        "strided": ("x", "float32", (4, 3)),
        "reinterpreted": ("x", "float8_e5m2", (96,)),
        "pair": ("x", "bfloat16", (48,)),
    }[kind]
    argument = next(a for a in call.arguments if a.name == name)
    assert (argument.kind, argument.dtype, argument.shape) == ("tensor", dtype, shape)
    whole = held.numpy().tobytes()
    assert data == (whole[32:] if kind == "pointer" else whole[:92] if kind == "strided" else whole)


@pytest.mark.parametrize("kind", ["negative", "unknown type", "freed", "number", "many"])
def test_memory_that_cannot_be_told_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    held = torch.arange(24, dtype=torch.float32)
    x: Any = {
        "negative": lambda: Strided(held[23:], (24,), (-1,)),
        "unknown type": lambda: Pointer(held, tl.float8e4b15),
        "freed": lambda: torch.tensor([held.data_ptr(), (1 << 47) + 64]),
        "number": lambda: held.data_ptr() + 16,
        "many": lambda: torch.full((2000,), held.data_ptr()),
    }[kind]()
    calls, _, line = noted(tmp_path, x)
    assert not calls
    assert "none of copy" in line
    assert "x" in line.partition("none of copy")[2]


def test_addresses_keep_the_tensors_that_they_point_into(tmp_path: Path) -> None:
    first, second = torch.randn(3, 5), torch.randn(40)
    held = torch.tensor([second[7:].data_ptr(), 0, first.data_ptr(), second.data_ptr()])
    ((call,), _, _) = noted(tmp_path, held)
    named = {a.name: a for a in call.arguments}
    assert named["x"].extra["addresses"] == [[0, 28], None, [1, 0], [0, 0]]
    assert (named["x.0"].shape, named["x.1"].shape) == ((40,), (3, 5))
    assert "x" not in call.contents
    assert {"x.0", "x.1"} <= call.contents.keys()


def test_a_launch_that_failed_is_taken_back_and_may_come_again(tmp_path: Path) -> None:
    files = Store(tmp_path).captures
    assert files is not None
    capture = CallCapture(files, values=True)
    given = copy, (torch.zeros(16), torch.empty(16)), (1,), {"BLOCK": 16}
    with null_device():
        capture.note(*given)()
        assert (list(files.every()), "captured 0 calls" in capture.line()) == ([], True)
        capture.note(*given)
        capture.note(*given)
    assert (len(list(files.every())), "captured 1 call of" in capture.line()) == (1, True)


def test_large_numbers_are_no_addresses(tmp_path: Path) -> None:
    for number, values in enumerate(([1 << 60, 12, 1 << 33], [1_764_000_000_000, 1_764_000_000_123])):
        ((call,), (data,), _) = noted(tmp_path / str(number), torch.tensor(values))
        assert not call.arguments[0].extra
        assert data == torch.tensor(values).numpy().tobytes()


def test_a_kernel_that_a_program_makes_anew_is_captured_once_and_let_go(tmp_path: Path) -> None:
    files = Store(tmp_path).captures
    assert files is not None
    capture, x, seen = CallCapture(files, values=True), torch.empty(16), []
    with null_device():
        for _ in range(2):
            again = triton.jit(copy.fn)
            capture.note(again, (x, torch.empty(16)), (1,), {"BLOCK": 16, "num_warps": 4})
            seen.append(weakref.ref(again))
            del again
    gc.collect()
    assert (seen[0](), "captured 1 call of 1 kernel" in capture.line()) == (None, True)
