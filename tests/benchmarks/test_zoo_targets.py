"""Wrong sources of a kernel."""

from __future__ import annotations

import ast
import random

import pytest

pytest.importorskip("torch")

from benchmarks.zoo.targets import wrong_sources

SOURCE = """
@triton.jit
def kernel(x, y, d, n, B: tl.constexpr):
    o = tl.arange(0, B)
    tl.store(x + o, tl.load(y + o), mask=o < n)
    tl.atomic_add(y, 1.0)
    d.store([0, 0], o)
    tl.debug_barrier()
"""


def test_each_store_is_changed_once_in_a_drawn_order() -> None:
    *made, every = wrong_sources(SOURCE, random.Random(1))
    lines = {text for source in made for text in source.splitlines()} - set(
        ast.unparse(ast.parse(SOURCE)).splitlines()
    )
    assert lines == {
        "    tl.store(x + o, (tl.load(y + o) * 2 + 1).to(tl.load(y + o).dtype), mask=o < n)",
        "    tl.atomic_add(y, 1.0 + 3)",
        "    d.store([0, 0], (o * 2 + 1).to(o.dtype))",
    }
    assert len(made) == 3
    assert lines <= set(every.splitlines())
    assert [*made, every] == list(wrong_sources(SOURCE, random.Random(1)))
