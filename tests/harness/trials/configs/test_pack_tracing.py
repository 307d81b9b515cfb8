"""Forecasts of Triton solutions of packs, from the IR of what they would launch at the real sizes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from forecast_autotune.records import Outcome
from forecast_harness.records import Node, NodeResult, SearchTarget
from forecast_harness.search.events import NodeForecastRequest
from forecast_harness.search.forecasters import UNTESTED_DIFFERENCE_SD, TritonForecaster, open_forecaster
from forecast_harness.targets.search_target import open_target
from forecast_harness.trials.configs.pack_tracing import PackTracer
from forecast_harness.trials.configs.source_configs import configs_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")

H200 = {"name": "NVIDIA H200", "backend": "cuda", "arch": "90"}


def opened(name: str) -> tuple[SearchTarget, Node]:
    target, (seed,) = open_target(name, device="cuda")
    return replace(target, payload={**target.payload, "device": H200}), seed


TARGET, SEED = opened("softmax")
LOAD = '    value = tl.load(x + row * stride + columns, mask=mask, other=float("-inf"))\n'
SLOW = SEED.source.replace(
    LOAD, LOAD + "    for k in range(64):\n        value = tl.exp(value - k) + value\n"
)
TUNABLE = (
    SLOW.replace("range(64)", "range(TIMES)")
    .replace("BLOCK: tl.constexpr", "BLOCK: tl.constexpr, TIMES: tl.constexpr")
    .replace("triton.next_power_of_2(x.shape[1]))", "triton.next_power_of_2(x.shape[1]), N)")
    .replace("@triton.jit", 'N = 64\nCONFIGS = [{"N": n} for n in (32, 1, 48, 16, 96)]\n\n\n@triton.jit', 1)
)


def node(name: str, source: str) -> Node:
    return replace(SEED, id=name, source=source, parents=(SEED.id,))


@pytest.fixture(scope="module")
def tracer() -> Iterator[PackTracer]:
    with contextlib.closing(PackTracer(TARGET)) as result:
        yield result


@pytest.mark.slow
def test_what_a_solution_launches_is_forecast(tracer: PackTracer) -> None:
    base, slow = tracer.best_forecast(SEED), tracer.best_forecast(node("slow", SLOW))
    # 8192 x 4096 float32, read and written once: 56 us at an H200's peak.
    assert 0.02 < 2 ** base[0] < 0.5
    assert slow[0] > base[0] + 0.3
    assert 0 <= base[1] < 0.5


def test_outputs_that_are_given_are_arguments_too() -> None:
    target, seed = opened("swiglu")
    with contextlib.closing(PackTracer(target)) as built:
        result = built.best_forecast(seed)
    assert result is not None


def test_the_best_config_speaks_for_a_source(tracer: PackTracer) -> None:
    result, slow = tracer.best_forecast(node("tunable", TUNABLE)), tracer.best_forecast(node("slow", SLOW))
    assert result[0] < slow[0] - 0.2


def test_configs_to_time_are_the_promising_ones_and_one_more(tracer: PackTracer) -> None:
    configs = configs_of(TUNABLE)
    assert tracer.best_configs(TUNABLE, configs, 2) == ({"N": 1}, {"N": 16})
    chosen = tracer.best_configs(TUNABLE, configs, 3)
    assert chosen[:2] == ({"N": 1}, {"N": 16})
    assert len(chosen) == 3
    assert tracer.best_configs(TUNABLE, configs, 9) == configs


def test_a_config_that_ends_its_cell_leaves_the_others_their_traces(tracer: PackTracer) -> None:
    source = TUNABLE.replace(
        "\n\n@triton.jit", "\nif N == 48:\n    import os\n\n    os._exit(0)\n\n@triton.jit", 1
    )
    assert source != TUNABLE
    result, whole = (
        tracer.best_forecast(node("exits", source)),
        tracer.best_forecast(node("tunable", TUNABLE)),
    )
    assert result == whole, "48 is not the best"


@pytest.mark.parametrize(
    "source",
    [
        "def run(x):\n    return x\n",
        SEED.source.replace("tl.max(value, 0)", "tl.nothing(value)"),
        "import os\nos._exit(0)\n",
        "not python (",
    ],
)
def test_what_cannot_be_traced_has_no_forecast(tracer: PackTracer, source: str) -> None:
    assert tracer.best_forecast(node(f"bad-{hash(source)}", source)) is None


def test_packs_on_a_device_are_forecast_from_their_ir() -> None:
    built = open_forecaster("auto", TARGET)
    assert isinstance(built, TritonForecaster)
    seed = (SEED, NodeResult(Outcome.OK, SEED.id, 0.0), 0.0)
    slow, torch = node("slow", SLOW), replace(node("torch", "def run(x):\n    return x\n"), language="torch")
    try:
        result = built.forecast(NodeForecastRequest(1, SEED, (slow, torch), (seed,), {}, TARGET)).beliefs
    finally:
        built.close()
    assert (result["slow"].abstains, result["slow"].sd) == (False, UNTESTED_DIFFERENCE_SD)
    assert result["slow"].mean > 0.15
    assert result["torch"].abstains
