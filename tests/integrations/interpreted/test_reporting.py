"""What tuning tells others: the lines of TRITON_PRINT_AUTOTUNING and `knobs.autotuning.listener`."""

from __future__ import annotations

import re
from typing import Any

import pytest
from triton import knobs
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from tests.integrations.interpreted.kernels import double
from tests.integrations.interpreted.support import VERSION, Decorator, Wrapper, block_of, blocks, launched

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


@pytest.mark.usefixtures("printing")
def test_each_timed_config_is_printed(exhaustive: Decorator, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each config, in Triton's words; `Autotuning failed with ...` gives an exception's own."""
    failure = OutOfResources(300_000, 200_000, "shared memory")
    run = launched(exhaustive, blocks(16, 32), {16: failure})
    printed = capsys.readouterr().out.splitlines()
    lines = sorted(line for line in printed if line.startswith("Autotuning kernel"))
    assert lines == [f"Autotuning kernel double with config {config}" for config in run.tuner.configs]
    assert f"Autotuning failed with {failure}" in printed


@pytest.mark.usefixtures("printing")
def test_the_end_of_tuning_is_printed_where_that_is_asked_for_and_no_hit(
    autotune: Decorator, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Function, key, seconds and config, in Triton's four lines; of hits and single configs nothing."""
    run = launched(autotune, blocks(16, 32))
    (config,) = re.findall(REPORT, capsys.readouterr().out, re.MULTILINE)
    assert config == str(run.tuner.best_config)
    run.launch()
    launched(autotune, blocks(16))
    monkeypatch.setattr(knobs.autotuning, "print", False)
    launched(autotune, blocks(16, 32))
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
    kernel = Returned()
    launched(exhaustive, blocks(16, 32), {16: 2.0, 32: 1.0}, kernel=kernel)
    (call,) = heard
    assert set(call) == {"fn", "key", "best_config", "configs_timings", "duration", "cache_hit"}
    assert call["fn"] is kernel.fn
    assert call["key"] == (40, "torch.float32", "torch.float32", "torch.int32")
    assert block_of(call["best_config"]) == 32
    timings = {block_of(c): list(t) for c, t in call["configs_timings"].items()}
    assert timings == {16: [2.0] * 3, 32: [1.0] * 3}
    assert isinstance(call["duration"], float)
    assert call["cache_hit"] is False


def test_listener_hears_tuning_and_no_hits(autotune: Decorator, heard: list[dict[str, Any]]) -> None:
    """However few configs were timed, a miss is heard once; hits, single configs and single survivors are none."""
    run = launched(autotune, blocks(16, 32, 64), kernel=Returned())
    assert [call["best_config"] for call in heard] == [run.tuner.best_config]
    heard.clear()
    run.launch()
    launched(autotune, blocks(16), kernel=Returned())
    rules = {"early_config_prune": lambda configs, nargs, **kwargs: configs[:1]}
    launched(autotune, blocks(16, 32), kernel=Returned(), prune_configs_by=rules)
    assert heard == []
