"""The hash that says when a kernel's measurements are stale, and when they are not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import triton

from forecast_integrations.triton.problem.source import innermost, source_hash, source_of

SOURCE = """
import triton, triton.language as tl
import helper_module as hm
{above}
SCALE = tl.constexpr({scale})
OTHER = tl.constexpr({other})
n = {n}
column = {n}

@triton.jit
def inner(x):
    return x * {factor}

@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    value = inner(tl.load(x + column, mask=column < n)) * SCALE
    tl.store(x + column, hm.outer(value), mask=column < n)
"""
HELPER = """
import triton

@triton.jit
def outer(x):
    return x + {term}
"""
Build = Callable[..., Any]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Write the module with these values, import it, and return its kernel."""
    made = iter(range(100))

    def load(name: str, text: str) -> Any:
        path = tmp_path / f"{name}_{next(made)}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(__import__("sys").modules, name, module)
        spec.loader.exec_module(module)
        return module

    def build(helper: str = "helper_module", **values: Any) -> Any:
        given = {"above": "", "scale": 2, "other": 3, "n": 4, "factor": 5, "term": 6, **values}
        load(helper, HELPER.format(**given))
        text = SOURCE.replace("helper_module", helper).format(**given)
        return load("kernel_module", text).kernel

    return build


@pytest.mark.parametrize("change", [{"scale": 7}, {"factor": 7}, {"term": 7}])
def test_what_the_kernel_uses_counts(build: Build, change: dict[str, Any]) -> None:
    assert source_hash(build()) != source_hash(build(**change))


@pytest.mark.parametrize("change", [{"above": "# a comment\n\n"}, {"other": 7}, {"n": 7}])
def test_what_it_does_not_use_does_not(build: Build, change: dict[str, Any]) -> None:
    """Its place in the file, other globals, and globals that share a name with its arguments or locals."""
    assert source_hash(build()) == source_hash(build(**change))


def test_a_module_named_like_triton_counts(build: Build) -> None:
    name = "triton_helpers_of_a_library"
    assert source_hash(build(name)) != source_hash(build(name, term=7))


def test_layers_above_do_not_count(build: Build) -> None:
    kernel = build()
    stacked = triton.autotune(configs=[triton.Config({"BLOCK": 16})], key=["n"])(
        triton.heuristics({"BLOCK": lambda args: 16})(kernel)
    )
    assert innermost(stacked) is kernel
    assert source_hash(stacked) == source_hash(kernel)
    assert source_of(stacked).startswith("def kernel(")
