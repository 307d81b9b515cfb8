"""A kernel and all it reaches as one text: helpers, constants and imports of other modules."""

from __future__ import annotations

import ast
import importlib
from types import ModuleType
from typing import Any

import pytest

from benchmarks.kernels import Case, every
from forecast_autotune.errors import VariantError
from forecast_autotune.variants.contract import contract
from forecast_integrations.describe import kernel_record
from forecast_integrations.source import source_of
from forecast_integrations.variants import import_text
from forecast_integrations.whole_source import whole_source

HELPERS = '''
import triton
import triton.language as tl

FACTOR: tl.constexpr = tl.constexpr(3)


@triton.jit
def twice(x):
    """Uses a constant of its own module."""
    return x * FACTOR


def plain(x):
    return x
'''

KERNEL = """
import math

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

import {helpers}
from {helpers} import twice as doubled

FACTOR = tl.constexpr(2.5)
DTYPE: tl.constexpr = tl.float16
LARGE: tl.constexpr = float("inf")
LISTED = [1, 2]


@triton.jit
def twice(x):
    return x + FACTOR


@triton.jit(noinline=True)
def apart(x):
    return twice(x)


@triton.jit(do_not_specialize=["n"])
def kernel(x_ptr: torch.Tensor, n: "i32", BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    FREE = at  # a local name, as a global one is called elsewhere
    x = tl.load(x_ptr + at, mask=at < n, other=LARGE).to(DTYPE)
    x = doubled(x) + apart(x) + {helpers}.twice(x) + libdevice.rsqrt(x.to(tl.float32))
    tl.store(x_ptr + FREE, x, mask=at < triton.cdiv(n, 1))


@triton.jit
def uses_list(x_ptr):
    tl.store(x_ptr, LISTED[0])


@triton.jit
def uses_function(x_ptr):
    tl.store(x_ptr, {helpers}.plain(1))


@triton.jit
def uses_module(x_ptr):
    tl.store(x_ptr, torch)


@triton.jit
def uses_nothing(x_ptr):
    tl.store(x_ptr, nowhere)


def closed(width):
    @triton.jit
    def inner(x_ptr):
        tl.store(x_ptr, width)

    return inner
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("modules")
    name = "whole_source_helpers"
    (folder / f"{name}.py").write_text(HELPERS)
    (folder / "whole_source_kernel.py").write_text(KERNEL.replace("{helpers}", name))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return importlib.import_module("whole_source_kernel")


def test_everything_that_is_reached_by_name_is_carried_along(written: ModuleType) -> None:
    text = whole_source(written.kernel)
    found = contract(text, "kernel")
    assert (found.parameters, found.meta) == (("x_ptr", "n"), ("BLOCK",))
    names = import_text(text)
    assert names["FACTOR"].value != names["FACTOR_2"].value
    assert {names["FACTOR"].value, names["FACTOR_2"].value} == {3, 2.5}
    assert names["LARGE"].value == float("inf")
    assert "DTYPE = tl.constexpr(tl.float16)" in text
    assert "from triton.language.extra import libdevice" in text or "libdevice as libdevice" in text
    assert "torch" not in text
    assert names["apart"].noinline
    assert list(names["kernel"].do_not_specialize) == ["n"]


def test_helpers_of_one_name_stay_apart(written: ModuleType) -> None:
    names = import_text(whole_source(written.kernel))
    constants = {name: names[name].value for name in ("FACTOR", "FACTOR_2")}
    bodies = {name: source_of(names[name]) for name in ("twice", "twice_2")}
    for body in bodies.values():
        used = next(n.id for n in ast.walk(ast.parse(body)) if isinstance(n, ast.Name) and n.id in constants)
        assert constants[used] == (2.5 if "+" in body else 3)
    called = {n.func.id for n in ast.walk(ast.parse(source_of(names["apart"]))) if isinstance(n, ast.Call)}  # type: ignore[attr-defined]
    assert [name for name, body in bodies.items() if "+" in body] == list(called)


def test_a_closure_carries_what_it_holds(written: ModuleType) -> None:
    text = whole_source(written.closed(96))
    assert "width = tl.constexpr(96)" in text
    contract(text, "inner")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("uses_list", "LISTED, a list, which is neither constant nor kernel"),
        ("uses_function", "plain, a function, which is neither constant nor kernel"),
        ("uses_module", "the module torch"),
        ("uses_nothing", "nothing defines nowhere"),
    ],
)
def test_what_no_text_can_hold_is_refused(written: ModuleType, name: str, reason: str) -> None:
    with pytest.raises(VariantError, match=f"no variants of {name} can be made: .*{reason}"):
        whole_source(getattr(written, name))


def test_a_kernel_without_text_is_refused() -> None:
    class Jit:
        __name__ = "lost"
        src = ""

    with pytest.raises(VariantError, match="Python does not find the text of lost"):
        whole_source(Jit())


FIRST = list({(c.family, c.hand): c for c in reversed(every())}.values())


def body(fn: Any) -> str:
    (definition,) = ast.parse(source_of(fn)).body
    return ast.dump(definition)


@pytest.mark.parametrize("case", FIRST, ids=lambda c: c.name)
def test_benchmark_kernels_stand_alone(case: Case) -> None:
    name = kernel_record(case.kernel).name
    text = whole_source(case.kernel)
    contract(text, name)
    assert body(import_text(text)[name]) == body(case.kernel)
