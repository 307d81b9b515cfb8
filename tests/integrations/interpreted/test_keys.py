"""When a tuner tunes: the key, cache hits, and third parties that write `configs` and `cache`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.integrations.interpreted.kernels import double_shaped
from tests.integrations.interpreted.support import (
    Decorator,
    Vector,
    blocks,
    grid,
    launch_timed,
    launched,
    tuned,
)

F32, F64, I32 = "torch.float32", "torch.float64", "torch.int32"


@pytest.mark.parametrize(("key", "values"), [(["n"], (40,)), (["BLOCK", "n"], (40,)), ([], ())])
def test_key_is_values_then_every_tensors_dtype(
    autotune: Decorator, key: list[str], values: tuple[int, ...]
) -> None:
    """Raw values named by `key`, without names that the caller does not pass, then every tensor's dtype."""
    assert list(launched(autotune, blocks(16, 32), key=key).tuner.cache) == [(*values, F32, F32, I32)]


def test_keyword_calls_put_dtypes_in_call_order(autotune: Decorator) -> None:
    """Keywords work in any order; their dtypes are appended in the order of the call."""
    run = tuned(autotune, blocks(16, 32))
    x, tag, wide = run.vector.x, run.vector.tag, run.vector.out.double()
    run.tuner[grid](x, wide, tag, 40)
    run.tuner[grid](n=40, out=wide, tag=tag, x=x)
    assert list(run.tuner.cache) == [(40, F32, F64, I32), (40, F64, I32, F32)]
    assert torch.equal(wide[:40], 2 * x[:40].double())


@pytest.mark.parametrize("by_keyword", [False, True])
def test_hit_does_not_time_again(autotune: Decorator, by_keyword: bool) -> None:
    """The second call with one key, also by keyword in the kernel's order, launches the chosen config once."""
    run = launched(autotune, blocks(16, 32))
    vector, timed, chosen = run.vector, list(run.clock.timed), run.vector.block
    vector.out.zero_()
    if by_keyword:
        run.tuner[grid](vector.x, out=vector.out, tag=vector.tag, n=40)
    else:
        run.launch()
    assert vector.doubled()
    assert (vector.block, run.clock.timed, len(run.tuner.cache)) == (chosen, timed, 1)


def test_values_are_raw_and_best_config_follows_the_call(exhaustive: Decorator) -> None:
    """Neighbouring sizes are tuned apart, each may win differently; `best_config` is of the latest call, hit or not."""
    tuner = tuned(exhaustive, blocks(16, 32)).tuner
    small, large = Vector(40), Vector(41)
    launch_timed(tuner, small, {16: 1.0, 32: 2.0})
    launch_timed(tuner, large, {16: 2.0, 32: 1.0})
    assert {key[0]: config.kwargs["BLOCK"] for key, config in tuner.cache.items()} == {40: 16, 41: 32}
    assert (small.block, large.block) == (16, 32)
    assert tuner.best_config.kwargs == {"BLOCK": 32}
    tuner[grid](*small.args)
    assert tuner.best_config.kwargs == {"BLOCK": 16}


def test_unhashable_key_value_is_a_type_error(autotune: Decorator) -> None:
    """A list in the key cannot be looked up; Triton says so with TypeError."""
    with pytest.raises(TypeError, match="unhashable"):
        tuned(autotune, blocks(16, 32), kernel=double_shaped, key=["SHAPE"]).launch(SHAPE=[40])


@pytest.mark.parametrize(
    "value", [None, True, 1.5, "rows", (4, 8), torch.float16, tl.float32, object()], ids=repr
)
def test_any_hashable_value_can_be_a_key(autotune: Decorator, value: object) -> None:
    """Keys hold dtypes, tuples, None and objects of the user's own, as they are."""
    run = tuned(autotune, blocks(16, 32), kernel=double_shaped, key=["SHAPE"])
    run.launch(SHAPE=value)
    timed = list(run.clock.timed)
    run.launch(SHAPE=value)
    assert run.vector.doubled()
    assert (list(run.tuner.cache), run.clock.timed) == ([(value, F32, F32, I32)], timed)


def test_one_config_needs_no_key_no_pruning_and_no_clock(autotune: Decorator) -> None:
    """A single config is launched as it is: nothing is hashed, pruned, timed or remembered."""
    pruned: list[Any] = []
    rules = {"early_config_prune": lambda configs, nargs, **kwargs: pruned.append(configs)}
    run = tuned(autotune, blocks(16), kernel=double_shaped, key=["SHAPE"], prune_configs_by=rules)
    run.launch(SHAPE=[40])
    assert run.vector.doubled()
    assert (run.clock.timed, pruned, run.tuner.cache) == ([], [], {})
    assert run.tuner.best_config == run.tuner.configs[0]


def test_configs_overwritten_with_one(autotune: Decorator) -> None:
    """`at.configs = [c]; at.cache.clear()` pins a config, before or after tuning."""
    run = launched(autotune, blocks(16, 32))
    timed = list(run.clock.timed)
    run.tuner.configs = pinned = blocks(128)
    run.tuner.cache.clear()
    run.launch()
    assert (run.vector.block, run.tuner.best_config, run.clock.timed) == (128, pinned[0], timed)


def test_configs_overwritten_with_several(exhaustive: Decorator) -> None:
    """A key that is decided stays so; with an emptied cache the new configs compete."""
    run = launched(exhaustive, blocks(16, 32), {64: 0.5, 128: 0.25})
    chosen = run.vector.block
    run.tuner.configs = blocks(64, 128)
    run.launch()
    assert run.vector.block == chosen
    run.tuner.cache.clear()
    run.launch()
    assert run.vector.block == 128
    assert {64, 128} <= set(run.clock.timed)


def test_configs_changed_in_place(exhaustive: Decorator) -> None:
    """Configs are mutable: after `cache.clear()` their present values compete."""
    run = launched(exhaustive, blocks(16, 32), {16: 1.0, 32: 2.0, 64: 3.0})
    run.tuner.configs[0].kwargs["BLOCK"] = 64
    run.tuner.cache.clear()
    run.launch()
    assert run.vector.block == 32


def test_entry_written_by_hand_is_used(autotune: Decorator) -> None:
    """FLA inserts winners of its own into `cache`: launched without timing, also in place of a decided one."""
    run = tuned(autotune, blocks(16, 32))
    (foreign,) = blocks(64, num_warps=8)
    run.tuner.cache[(40, F32, F32, I32)] = foreign
    run.launch()
    assert run.vector.doubled()
    assert (run.vector.block, run.tuner.best_config, run.clock.timed) == (64, foreign, [])
    decided = launched(autotune, blocks(16, 32))
    (key,) = decided.tuner.cache
    decided.tuner.cache[key] = triton.Config({"BLOCK": 128})
    decided.launch()
    assert decided.vector.block == 128
