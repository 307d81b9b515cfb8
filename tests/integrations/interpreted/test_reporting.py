"""What tuning tells others: the lines of TRITON_PRINT_AUTOTUNING and `knobs.autotuning.listener`."""

from __future__ import annotations

import re
from typing import Any

import pytest
from triton import knobs
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from tests.integrations.interpreted.kernels import double
from tests.integrations.interpreted.support import (
    VERSION,
    Clock,
    Decorator,
    Vector,
    Wrapper,
    block_of,
    blocks,
    grid,
)

REPORT = (
    r"^Triton autotuning for function double,\n"
    r"with key as \(40, 'torch\.float32', 'torch\.float32', 'torch\.int32'\),\n"
    r"finished after \d+\.\d\ds,\n"
    r"best config selected: (?P<config>.*);$"
)


@pytest.fixture
def printing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`knobs.autotuning.print` on, as vLLM's monitor of run-time tuning does."""
    monkeypatch.setattr(knobs.autotuning, "print", True)


def per_config(text: str) -> list[str]:
    """The lines printed for single configs, sorted."""
    return sorted(line for line in text.splitlines() if line.startswith("Autotuning kernel"))


@pytest.mark.usefixtures("printing")
def test_each_timed_config_is_printed(exhaustive: Decorator, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each config, in Triton's words."""
    vector = Vector()
    tuner = exhaustive(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag))(double)
    tuner[grid](*vector.args)
    lines = per_config(capsys.readouterr().out)
    assert lines == [f"Autotuning kernel double with config {config}" for config in tuner.configs]


@pytest.mark.usefixtures("printing")
def test_the_end_of_tuning_is_printed(autotune: Decorator, capsys: pytest.CaptureFixture[str]) -> None:
    """Function, key, seconds and the config that is then used, in Triton's four lines."""
    vector = Vector()
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag))(double)
    tuner[grid](*vector.args)
    (config,) = re.findall(REPORT, capsys.readouterr().out, re.MULTILINE)
    assert config == str(tuner.best_config)


@pytest.mark.usefixtures("printing")
def test_hits_and_single_configs_print_nothing(
    autotune: Decorator, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was tuned, so nothing is said."""
    vector = Vector()
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag))(double)
    tuner[grid](*vector.args)
    capsys.readouterr()
    tuner[grid](*vector.args)
    autotune(configs=blocks(16), key=["n"])(double)[grid](*vector.args)
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("printing")
def test_a_failing_config_is_printed(exhaustive: Decorator, capsys: pytest.CaptureFixture[str]) -> None:
    """`Autotuning failed with ...` gives the exception's own words."""
    vector = Vector()
    failure = OutOfResources(300_000, 200_000, "shared memory")
    tuner = exhaustive(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag, {16: failure}))(double)
    tuner[grid](*vector.args)
    assert f"Autotuning failed with {failure}" in capsys.readouterr().out.splitlines()


def test_silent_by_default(autotune: Decorator, capsys: pytest.CaptureFixture[str]) -> None:
    """With the knob off, standard output stays the program's own."""
    vector = Vector()
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag))(double)
    tuner[grid](*vector.args)
    assert capsys.readouterr().out == ""


class Returned(Wrapper):
    """A wrapper around a compiled kernel object; its launch runs the interpreted kernel instead.

    Triton's listener needs a JITFunction in the chain, which the interpreter does not make.
    """

    def __init__(self) -> None:
        super().__init__(double)
        self.fn = JITFunction(double.fn)

    def run(self, *args: Any, **kwargs: Any) -> tuple[str, int]:
        double.run(*args, **kwargs)
        return ("launched", kwargs["BLOCK"])


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `knobs.autotuning.listener` was called with."""
    if VERSION < (3, 8):
        pytest.skip("Triton has this listener from 3.8 on")
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(knobs.autotuning, "listener", lambda **kwargs: calls.append(kwargs))
    return calls


def test_listener_hears_a_sweep(exhaustive: Decorator, heard: list[dict[str, Any]]) -> None:
    """One call with the kernel, the key, the winner, every time and the seconds; tritonparse reads it."""
    vector = Vector()
    kernel = Returned()
    clock = Clock(vector.tag, {16: 2.0, 32: 1.0})
    tuner = exhaustive(configs=blocks(16, 32), key=["n"], do_bench=clock)(kernel)
    tuner[grid](*vector.args)
    (call,) = heard
    assert set(call) == {"fn", "key", "best_config", "configs_timings", "duration", "cache_hit"}
    assert call["fn"] is kernel.fn
    assert call["key"] == (40, "torch.float32", "torch.float32", "torch.int32")
    assert block_of(call["best_config"]) == 32
    assert {block_of(c): list(t) for c, t in call["configs_timings"].items()} == {
        16: [2.0] * 3,
        32: [1.0] * 3,
    }
    assert isinstance(call["duration"], float)
    assert call["cache_hit"] is False


def test_listener_hears_tuning_in_default_mode(autotune: Decorator, heard: list[dict[str, Any]]) -> None:
    """However few configs were timed, a miss is heard once, with the config that is then used."""
    vector = Vector()
    tuner = autotune(configs=blocks(16, 32, 64), key=["n"], do_bench=Clock(vector.tag))(Returned())
    tuner[grid](*vector.args)
    assert [call["best_config"] for call in heard] == [tuner.best_config]


def test_listener_hears_no_hits(autotune: Decorator, heard: list[dict[str, Any]]) -> None:
    """In-memory hits, single configs and single survivors are not tuning."""
    vector = Vector()
    tuner = autotune(configs=blocks(16, 32), key=["n"], do_bench=Clock(vector.tag))(Returned())
    tuner[grid](*vector.args)
    heard.clear()
    tuner[grid](*vector.args)
    autotune(configs=blocks(16), key=["n"])(Returned())[grid](*vector.args)
    autotune(
        configs=blocks(16, 32),
        key=["n"],
        prune_configs_by={"early_config_prune": lambda configs, nargs, **kwargs: configs[:1]},
    )(Returned())[grid](*vector.args)
    assert heard == []
