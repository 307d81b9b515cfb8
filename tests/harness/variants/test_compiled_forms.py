"""What a kernel is compiled anew for, and that calls are launched with configs that were compiled for such calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from forecast_autotune.records import Argument, Config
from forecast_harness.trials.variants.compilation.compiled_forms import CompiledForms, call_form, largest_tile

SMALL, LARGE, HUGE = (Config.of({"BLOCK": block}) for block in (64, 128, 1024))


def form(n: int, *, aligned: bool = True, dtype: str = "float32", constant: bool = False) -> Hashable:
    tensor = Argument("x", "tensor", dtype, (n,), (1,), aligned)
    return call_form([tensor, Argument("n", "constexpr" if constant else "scalar", value=n)], {"n": n})


def test_calls_of_one_form_differ_by_sizes_alone() -> None:
    assert form(48) == form(64)
    assert form(47) == form(63)
    kinds = [form(48), form(47), form(1), form(1 << 40), form(48, aligned=False), form(48, dtype="float16")]
    assert len(set(kinds)) == len(kinds)
    assert form(48, constant=True) != form(64, constant=True), "what is compiled in"
    assert call_form([], {"s": 0.5}) == call_form([], {"s": 0.7})
    assert call_form([], {"s": True}) != call_form([], {"s": False})


def test_a_config_gives_way_to_one_that_was_compiled_for_such_a_call() -> None:
    known = CompiledForms()
    known.note(SMALL, "even")
    known.note(LARGE, "odd")
    listed = [SMALL, LARGE, HUGE]
    assert known.instead_of(LARGE, listed, lambda c: "odd") == LARGE, "it was itself"
    assert known.instead_of(LARGE, listed, lambda c: "even") == SMALL
    assert known.instead_of(HUGE, listed, lambda c: "odd") == LARGE
    assert known.instead_of(SMALL, listed, lambda c: "odd") == SMALL, (
        "sizes go beyond its own tile, not a larger one"
    )
    assert known.instead_of(HUGE, listed, lambda c: "new") == HUGE
    assert known.instead_of(HUGE, [HUGE], lambda c: "odd") == HUGE, "those that cannot run are not among them"
    assert known.instead_of(HUGE, listed, lambda c: None) == HUGE, "its launch says that it has no grid"


def test_launches_are_spread_over_what_was_compiled() -> None:
    known, count = CompiledForms(), Counter[Config]()
    for config in (SMALL, LARGE):
        known.note(config, "odd")
    for _ in range(10):
        chosen = known.instead_of(HUGE, [SMALL, LARGE, HUGE], lambda c: "odd")
        known.note(chosen, "odd")
        count[chosen] += 1
    assert count == {SMALL: 5, LARGE: 5}


def test_the_largest_tile_is_a_number_of_the_config() -> None:
    assert largest_tile(Config.of({"BLOCK": 64, "EVEN": True, "ROWS": 2})) == 64
    assert largest_tile(Config.of({})) == 0
