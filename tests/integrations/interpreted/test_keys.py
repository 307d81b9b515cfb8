"""When a tuner tunes: the key, cache hits, and third parties that write `configs` and `cache`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.integrations.interpreted.kernels import double, double_shaped
from tests.integrations.interpreted.support import Clock, Decorator, Vector, blocks, grid, launch_timed

F32, F64, I32 = "torch.float32", "torch.float64", "torch.int32"


def test_key_is_values_then_every_tensors_dtype(autotune: Decorator) -> None:
    """The key holds the raw values named by `key`, then the dtype of every tensor argument."""
    vector = Vector()
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag))(double)
    tuner[grid](*vector.args)
    assert list(tuner.cache) == [(40, F32, F32, I32)]


def test_dtypes_alone_make_a_key(autotune: Decorator) -> None:
    """With `key=[]` the dtypes still tell calls apart."""
    vector = Vector()
    tuner = autotune(configs=blocks(16, 32), key=[], do_bench=Clock(vector.tag))(double)
    tuner[grid](*vector.args)
    tuner[grid](vector.x, vector.out.double(), vector.tag, 40)
    assert list(tuner.cache) == [(F32, F32, I32), (F32, F64, I32)]


def test_keyword_calls_put_dtypes_in_call_order(autotune: Decorator) -> None:
    """Keywords work in any order; their dtypes are appended in the order of the call."""
    vector = Vector()
    wide = vector.out.double()
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag))(double)
    tuner[grid](vector.x, wide, vector.tag, 40)
    tuner[grid](n=40, out=wide, tag=vector.tag, x=vector.x)
    assert list(tuner.cache) == [(40, F32, F64, I32), (40, F64, I32, F32)]
    assert torch.equal(wide[:40], 2 * vector.x[:40].double())


def test_keyword_and_positional_calls_share_a_key(autotune: Decorator) -> None:
    """A keyword call with the arguments in the kernel's order is the same key."""
    vector = Vector()
    clock = Clock(vector.tag)
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=clock)(double)
    tuner[grid](*vector.args)
    timed = list(clock.timed)
    tuner[grid](vector.x, out=vector.out, tag=vector.tag, n=40)
    assert (clock.timed, len(tuner.cache)) == (timed, 1)


def test_names_the_caller_does_not_pass_are_left_out(autotune: Decorator) -> None:
    """A key name that only the config supplies is skipped, silently."""
    vector = Vector()
    tuner = autotune(configs=blocks(16, 32), key=["BLOCK", "n"], do_bench=Clock(vector.tag))(double)
    tuner[grid](*vector.args)
    assert list(tuner.cache) == [(40, F32, F32, I32)]


def test_hit_does_not_time_again(autotune: Decorator) -> None:
    """The second call with one key launches the chosen config once, and times nothing."""
    vector = Vector()
    clock = Clock(vector.tag)
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=clock)(double)
    tuner[grid](*vector.args)
    chosen, timed = vector.block, list(clock.timed)
    vector.out.zero_()
    tuner[grid](*vector.args)
    assert vector.doubled()
    assert (vector.block, clock.timed) == (chosen, timed)


def test_values_are_raw(exhaustive: Decorator) -> None:
    """Values are not bucketed: neighbouring sizes are tuned apart, and each may win differently."""
    tuner = exhaustive(configs=blocks(16, 32), key=["n"])(double)
    small, large = Vector(40), Vector(41)
    launch_timed(tuner, small, {16: 1.0, 32: 2.0})
    launch_timed(tuner, large, {16: 2.0, 32: 1.0})
    winners = {key[0]: config.kwargs["BLOCK"] for key, config in tuner.cache.items()}
    assert winners == {40: 16, 41: 32}
    assert (small.block, large.block) == (16, 32)


def test_unhashable_key_value_is_a_type_error(autotune: Decorator) -> None:
    """A list in the key cannot be looked up; Triton says so with TypeError."""
    vector = Vector()
    tuner = autotune(configs=blocks(16, 32), key=["SHAPE"], do_bench=Clock(vector.tag))(double_shaped)
    with pytest.raises(TypeError, match="unhashable"):
        tuner[grid](*vector.args, SHAPE=[40])


@pytest.mark.parametrize(
    "value", [None, True, 1.5, "rows", (4, 8), torch.float16, tl.float32, object()], ids=repr
)
def test_any_hashable_value_can_be_a_key(autotune: Decorator, value: object) -> None:
    """Keys hold dtypes, tuples, None and objects of the user's own, as they are."""
    vector = Vector()
    clock = Clock(vector.tag)
    tuner = autotune(configs=blocks(16, 32), key=["SHAPE"], do_bench=clock)(double_shaped)
    tuner[grid](*vector.args, SHAPE=value)
    timed = list(clock.timed)
    tuner[grid](*vector.args, SHAPE=value)
    assert vector.doubled()
    assert list(tuner.cache) == [(value, F32, F32, I32)]
    assert clock.timed == timed


def test_one_config_needs_no_key_no_pruning_and_no_clock(autotune: Decorator) -> None:
    """A single config is launched as it is: nothing is hashed, pruned, timed or remembered."""
    vector = Vector()
    pruned: list[Any] = []
    clock = Clock(vector.tag)
    tuner = autotune(
        configs=blocks(16),
        key=["SHAPE"],
        do_bench=clock,
        prune_configs_by={"early_config_prune": lambda configs, nargs, **kwargs: pruned.append(configs)},
    )(double_shaped)
    tuner[grid](*vector.args, SHAPE=[40])
    assert vector.doubled()
    assert (clock.timed, pruned, tuner.cache) == ([], [], {})
    assert tuner.best_config == tuner.configs[0]


def test_configs_overwritten_with_one(autotune: Decorator) -> None:
    """`at.configs = [c]; at.cache.clear()` pins a config, before or after tuning."""
    vector = Vector()
    clock = Clock(vector.tag)
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=clock)(double)
    tuner[grid](*vector.args)
    timed = list(clock.timed)
    (pinned,) = blocks(128)
    tuner.configs = [pinned]
    tuner.cache.clear()
    tuner[grid](*vector.args)
    assert (vector.block, tuner.best_config, clock.timed) == (128, pinned, timed)


def test_configs_overwritten_with_several(exhaustive: Decorator) -> None:
    """New configs and an emptied cache mean that the new configs compete."""
    vector = Vector()
    clock = Clock(vector.tag, {64: 0.5, 128: 0.25})
    tuner = exhaustive(configs=blocks(16, 32), key=["n"], do_bench=clock)(double)
    tuner[grid](*vector.args)
    tuner.configs = blocks(64, 128)
    tuner.cache.clear()
    tuner[grid](*vector.args)
    assert vector.block == 128
    assert {64, 128} <= set(clock.timed)


def test_configs_changed_in_place(exhaustive: Decorator) -> None:
    """Configs are mutable: after `cache.clear()` their present values compete."""
    vector = Vector()
    clock = Clock(vector.tag, {16: 1.0, 32: 2.0, 64: 3.0})
    tuner = exhaustive(configs=blocks(16, 32), key=["n"], do_bench=clock)(double)
    tuner[grid](*vector.args)
    tuner.configs[0].kwargs["BLOCK"] = 64
    tuner.cache.clear()
    tuner[grid](*vector.args)
    assert vector.block == 32


def test_cached_decision_outlives_new_configs_until_cleared(autotune: Decorator) -> None:
    """Overwriting `configs` alone changes nothing for a key that is decided already."""
    vector = Vector()
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag))(double)
    tuner[grid](*vector.args)
    chosen = vector.block
    tuner.configs = blocks(64, 128)
    tuner[grid](*vector.args)
    assert vector.block == chosen


def test_entry_written_by_hand_is_used(autotune: Decorator) -> None:
    """FLA inserts winners from its own files into `cache`; they are launched without timing."""
    vector = Vector()
    clock = Clock(vector.tag)
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=clock)(double)
    (foreign,) = blocks(64, num_warps=8)
    tuner.cache[(40, F32, F32, I32)] = foreign
    tuner[grid](*vector.args)
    assert vector.doubled()
    assert (vector.block, tuner.best_config, clock.timed) == (64, foreign, [])


def test_entry_overwritten_by_hand_is_used(autotune: Decorator) -> None:
    """An entry replaced after tuning takes effect at the next call."""
    vector = Vector()
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag))(double)
    tuner[grid](*vector.args)
    (key,) = tuner.cache
    tuner.cache[key] = triton.Config({"BLOCK": 128})
    tuner[grid](*vector.args)
    assert vector.block == 128


def test_best_config_follows_the_call(exhaustive: Decorator) -> None:
    """`best_config` is that of the latest call, also when it was a hit."""
    small, large = Vector(40), Vector(300)
    tuner = exhaustive(configs=blocks(16, 32), key=["n"])(double)
    launch_timed(tuner, small, {16: 1.0, 32: 2.0})
    launch_timed(tuner, large, {16: 2.0, 32: 1.0})
    assert tuner.best_config.kwargs == {"BLOCK": 32}
    tuner[grid](*small.args)
    assert tuner.best_config.kwargs == {"BLOCK": 16}
