"""Wrong sources of a kernel, and what is drawn of captured calls."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.zoo.targets import autotuned, wrong_sources
from forecast_autotune.records import Config, Device, Kernel
from forecast_autotune.records.captured_call import CapturedCall
from forecast_autotune.store import Store

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


def test_kernels_with_two_configs_are_drawn_once_each(tmp_path: Path) -> None:
    files = Store(tmp_path).captures
    assert files is not None
    several = tuple(Config.of({"B": n}) for n in (16, 32))
    for number, (name, configs) in enumerate((("a", several), ("a", several), ("b", several[:1]), ("c", ()))):
        kernel = Kernel(name, source_sha256=name * 64, extra={"module": "m"})
        files.put(CapturedCall(f"call{number}", kernel, (), (1,), several[0], Device("cpu"), configs))
    assert [t.place for t in autotuned([tmp_path])] == ["m:a@aaaaaaaaaaaa"]
