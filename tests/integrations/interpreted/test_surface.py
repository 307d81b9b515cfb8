"""What a drop-in shows before it is called: signature, class, attributes, refusals at decoration."""

from __future__ import annotations

import copy
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import triton

from forecast_autotune import patch_triton, unpatch_triton
from tests.integrations.interpreted.kernels import double
from tests.integrations.interpreted.support import VERSION, Decorator, Vector, blocks, launch_timed

EXTRAS = "tolerance risk budget surrogate store policy space variants bucket mode l2 prefer"


def test_parameters_are_tritons_and_extras_are_keyword_only_and_off() -> None:
    """Names, order and defaults equal `triton.autotune`'s; every further one is keyword-only and None."""
    from forecast_autotune import autotune

    theirs = list(inspect.signature(triton.autotune).parameters.values())
    ours = list(inspect.signature(autotune).parameters.values())
    described = [(p.name, p.default, p.kind) for p in theirs]
    assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == described
    extras = ours[len(theirs) :]
    assert " ".join(p.name for p in extras) == EXTRAS
    assert {(p.kind, p.default) for p in extras} == {(inspect.Parameter.KEYWORD_ONLY, None)}


def keep_all(configs: Any, nargs: Any, **kwargs: Any) -> Any:
    return configs


def pre(kwargs: Any, reset_only: bool = False) -> None: ...


def post(kwargs: Any, exception: Any) -> None: ...


def test_parameters_can_be_given_by_position(autotune: Decorator) -> None:
    """All twelve parameters work positionally, in Triton's order."""

    def bench(call: Any, quantiles: Any) -> list[float]:
        return [1.0, 1.0, 1.0]

    pruning = {"early_config_prune": keep_all}
    tuner = autotune(
        blocks(16, 32), ["n"], pruning, ["out"], ["x"], pre, post, None, None, False, bench, False
    )(double)
    assert (tuner.keys, tuner.reset_to_zero, tuner.restore_value) == (["n"], ["out"], ["x"])
    assert (tuner.early_config_prune, tuner.pre_hook, tuner.post_hook) == (keep_all, pre, post)
    assert tuner.do_bench is bench


@pytest.mark.parametrize("configs", [[], None])
def test_empty_configs_become_the_default_config(autotune: Decorator, configs: Any) -> None:
    """No configs means one config: nothing but the default launch options."""
    tuner = autotune(configs=configs, key=[])(double)
    assert tuner.configs == [triton.Config({}, num_warps=4, num_stages=3, num_ctas=1)]


def test_a_tuner_with_configs_and_a_key_alone_warns_of_nothing(autotune: Decorator) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuner = autotune(configs=blocks(16, 32), key=["n"])(double)
    assert tuner.fn is double
    assert tuner.cache_results is False
    tuner.pre_hook({}, reset_only=True)
    tuner.post_hook({}, exception=None)


@pytest.mark.skipif(VERSION < (3, 9), reason="Triton rejects unknown names from 3.9 on")
@pytest.mark.parametrize("parameter", ["key", "reset_to_zero", "restore_value"])
def test_unknown_names_are_refused(autotune: Decorator, parameter: str) -> None:
    """A name that is no kernel argument is a ValueError at decoration, naming it."""
    given: dict[str, Any] = {"key": ["n"], parameter: ["n", "m"]}
    with pytest.raises(ValueError, match=f"{parameter} contains names that are not kernel arguments: m"):
        autotune(configs=blocks(16, 32), **given)(double)


@pytest.mark.skipif(VERSION < (3, 6), reason="before 3.6 an explicit cache_results=True won")
def test_results_are_not_cached_on_disk_under_the_interpreter(autotune: Decorator) -> None:
    """`cache_results=True` is forced off: interpreted timings mean nothing to a later process."""
    assert autotune(configs=blocks(16, 32), key=["n"], cache_results=True)(double).cache_results is False


def test_a_tuner_is_made_again_from_its_attributes(
    autotune: Decorator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Libraries that change a list of configs make a tuner of the same class with Triton's parameters."""
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path))
    first, vector = autotune(configs=blocks(16, 32), key=["n"])(double), Vector()
    made = type(first)(first.fn, first.arg_names, first.configs, first.keys, None, None)
    launch_timed(made, vector, {16: 2.0})
    assert (vector.block, vector.doubled()) == (32, True)


@pytest.mark.parametrize("patched", [False, True])
def test_a_deep_copy_is_a_tuner_of_its_own(
    autotune: Decorator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, patched: bool
) -> None:
    """What was decided is known to the copy, what is decided later is its own; so with a patched tuner."""
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path))
    first, vector = autotune(configs=blocks(16, 32), key=["n"])(double), Vector()
    if patched:
        patch_triton()
    try:
        launch_timed(first, vector, {16: 2.0})
        made = copy.deepcopy(first)
        launch_timed(made, Vector(80), {16: 2.0})
    finally:
        unpatch_triton()
    assert (len(first.cache), len(made.cache)) == (1, 2)
    assert made.nargs is None
