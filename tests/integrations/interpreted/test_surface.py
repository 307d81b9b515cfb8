"""What a drop-in shows before it is called: signature, class, attributes, refusals at decoration."""

from __future__ import annotations

import copy
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.runtime.autotuner import Autotuner

from forecast_autotune import patch_triton, unpatch_triton
from tests.integrations.interpreted.kernels import double, double_even
from tests.integrations.interpreted.support import VERSION, Decorator, Vector, blocks, grid, launch_timed

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


def test_undecorated_use_makes_an_autotuner(autotune: Decorator) -> None:
    """`autotune(configs=..., key=...)(kernel)` is unsloth's way; torch.compile and others look by `isinstance`."""
    vector = Vector()
    tuner = autotune(configs=blocks(16), key=["n"])(double)
    assert isinstance(tuner, Autotuner)
    tuner[grid](*vector.args)
    assert vector.doubled()


@pytest.mark.parametrize("configs", [[], None])
def test_empty_configs_become_the_default_config(autotune: Decorator, configs: Any) -> None:
    """No configs means one config: nothing but the default launch options."""
    tuner = autotune(configs=configs, key=[])(double)
    assert tuner.configs == [triton.Config({}, num_warps=4, num_stages=3, num_ctas=1)]


def test_default_attributes(autotune: Decorator) -> None:
    """What vLLM, torch, FLA and gemlite read on a tuner that was given configs and a key only; no warning."""
    configs = blocks(16, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuner = autotune(configs=configs, key=["n"])(double)
    assert (tuner.configs, tuner.keys, tuner.cache) == (configs, ["n"], {})
    assert tuner.arg_names == ["x", "out", "tag", "n", "BLOCK"]
    assert tuner.fn is double
    assert (tuner.perf_model, tuner.early_config_prune, tuner.configs_top_k) == (None, None, 1.0)
    assert (tuner.reset_to_zero, tuner.restore_value) == ([], [])
    assert (tuner.user_defined_pre_hook, tuner.user_defined_post_hook) == (False, False)
    assert (tuner.num_warmups, tuner.num_reps) == (None, None)
    assert tuner.use_cuda_graph is False
    assert tuner.cache_results is False
    tuner.pre_hook({}, reset_only=True)
    tuner.post_hook({}, exception=None)


def test_given_attributes(autotune: Decorator) -> None:
    """What was given is readable under the names that torch reads, which refuses kernels with hooks of the user's."""

    def model(**kwargs: Any) -> float:
        return 1.0

    tuner = autotune(
        configs=blocks(16, 32),
        key=["n"],
        prune_configs_by={"perf_model": model, "top_k": 3, "early_config_prune": keep_all},
        reset_to_zero=("out",),
        restore_value=("x",),
    )(double)
    assert (tuner.perf_model, tuner.configs_top_k, tuner.early_config_prune) == (model, 3, keep_all)
    assert (tuner.reset_to_zero, tuner.restore_value) == (["out"], ["x"])
    assert (tuner.user_defined_pre_hook, tuner.user_defined_post_hook) == (False, False)
    hooked = autotune(configs=blocks(16, 32), key=[], pre_hook=pre, post_hook=post)(double)
    assert (hooked.user_defined_pre_hook, hooked.user_defined_post_hook) == (True, True)
    assert (hooked.pre_hook, hooked.post_hook) == (pre, post)


def test_base_fn_is_the_python_function(autotune: Decorator) -> None:
    """`base_fn` is found through heuristics; the tuner itself has no `__name__`."""
    stacked = triton.heuristics({"EVEN": lambda args: False})(double_even)
    tuner = autotune(configs=blocks(16, 32), key=[])(stacked)
    assert tuner.fn is stacked
    assert inspect.isfunction(tuner.base_fn)
    assert tuner.base_fn.__name__ == "double_even"
    assert not hasattr(tuner, "__name__")


@pytest.mark.parametrize("option", [{"warmup": 5}, {"rep": 7}, {"use_cuda_graph": True}])
def test_deprecated_timing_options_warn(autotune: Decorator, option: dict[str, Any]) -> None:
    """`warmup`, `rep` and `use_cuda_graph` still work, with a DeprecationWarning."""
    with pytest.warns(DeprecationWarning, match="warmup, rep, and use_cuda_graph"):
        tuner = autotune(configs=blocks(16, 32), key=[], **option)(double)
    assert tuner.num_warmups == option.get("warmup")
    assert tuner.num_reps == option.get("rep")
    assert tuner.use_cuda_graph == option.get("use_cuda_graph", False)
    assert callable(tuner.do_bench)


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
