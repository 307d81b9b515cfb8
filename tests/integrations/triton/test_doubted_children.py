"""What fails in a child or on another thread, and works in the process and thread of the call."""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from forecast_autotune import Store, autotune, settle
from forecast_autotune.errors import NoWorkingConfigError
from forecast_autotune.features.traced_texts import TracedTexts
from forecast_autotune.records import Outcome
from forecast_autotune.testing import example_table
from forecast_integrations.triton.compile.pool import CompileResult
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.trace import ChildTracer
from tests.integrations.null import blocks, fresh, kernel_call, launch, tables

HERE = os.getpid(), threading.get_ident()
STATE = threading.local()
SHOWN: contextvars.ContextVar[int] = contextvars.ContextVar("SHOWN", default=0)


def ask_device() -> int:
    """A device that no fork and no other thread has."""
    if (os.getpid(), threading.get_ident()) != HERE:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
    return 9


@triton.jit
def scaled(x, out, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    """out = FACTOR x"""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, FACTOR * tl.load(x + i, mask=i < n), mask=i < n)


@triton.constexpr_function
def capability() -> int:
    """A constant that a kernel's own code asks the device for."""
    from tests.integrations.triton.test_doubted_children import ask_device as ask

    return ask()


@triton.jit
def asking(x, out, n, BLOCK: tl.constexpr):
    """out = 9 x, if the device says so."""
    FACTOR: tl.constexpr = capability()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, FACTOR * tl.load(x + i, mask=i < n), mask=i < n)


class OwnRun(JITFunction):  # type: ignore[misc]
    """A kernel of a library, whose launches ask the device."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return super().run(*args, FACTOR=ask_device(), **kwargs)


class LaunchingRun(JITFunction):  # type: ignore[misc]
    """It knows nothing of compiling alone."""

    def run(self, *args: Any, warmup: bool = False, **kwargs: Any) -> Any:
        return super().run(*args, warmup=False, FACTOR=2, **kwargs)


def of_state(kind: str) -> Any:
    """A kernel under a heuristic that reads the state of the calling thread."""
    read = {
        "device": ask_device,
        "thread-local": lambda: STATE.factor,
        "context": SHOWN.get,
        "autocast": lambda: 3 if torch.is_autocast_enabled("cpu") else 0,
        "grad mode": lambda: 3 if torch.is_grad_enabled() else 0,
    }[kind]

    def rule(_: Any) -> int:
        if not (factor := read()):
            raise LookupError(f"no {kind} here")
        return factor

    return triton.heuristics({"FACTOR": rule})(fresh(scaled))


def hooked() -> Any:
    """A kernel whose every launch calls a hook of the user's before it compiles."""
    kernel = fresh(asking)
    kernel.add_pre_run_hook(lambda *args, **kwargs: ask_device())
    return kernel


class OwnHeuristics(triton.runtime.autotuner.Heuristics):  # type: ignore[misc]
    """Heuristics that a library runs in its own way, and asks the device."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, FACTOR=ask_device(), **kwargs)


KERNELS = {
    **{
        kind: lambda kind=kind: of_state(kind)
        for kind in ("device", "thread-local", "context", "autocast", "grad mode")
    },
    "own run": lambda: OwnRun(scaled.fn),
    "run that launches": lambda: LaunchingRun(scaled.fn),
    "constexpr function": lambda: fresh(asking),
    "hook of launches": hooked,
    "own heuristics": lambda: OwnHeuristics(fresh(scaled), scaled.arg_names, {}),
}


@pytest.mark.sampled(10)
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("mode", ["tune", "exhaustive"])
def test_what_only_the_call_itself_has_fails_no_config(tmp_path: Path, kind: str, mode: str) -> None:
    STATE.factor = 5
    SHOWN.set(7)
    tuner = autotune(configs=blocks(32, 128, 256), key=["n"], store=Store(tmp_path), mode=mode)(
        KERNELS[kind]()
    )
    with torch.autocast("cpu"):
        assert launch(tuner) is not None
    (table,) = tables(tmp_path)
    assert {m.outcome for m in table.measurements} == {"ok"}
    assert tuner.best_config in tuner.configs


def test_failures_that_a_fork_was_believed_are_doubted_once_they_are_stored(
    device: Any, tmp_path: Path
) -> None:
    """An earlier release has filed every config as one that does not compile."""
    launch(
        autotune(configs=blocks(32, 128), key=["n"], store=Store(tmp_path / "new"), mode="exhaustive")(
            fresh(asking)
        )
    )
    (table,) = tables(tmp_path / "new")
    store = Store(tmp_path / "old")
    for m in table.measurements:
        said = {"message": "RuntimeError: Cannot re-initialize CUDA in forked subprocess"}
        store.add(
            table.problem,
            replace(m, outcome=Outcome.COMPILE_ERROR, median_ms=None, p20_ms=None, p80_ms=None, extra=said),
        )
    tuner = autotune(configs=blocks(32, 128), key=["n"], store=store)(fresh(asking))
    launch(tuner)
    assert tuner.decision.measured == 2


def test_heuristics_are_asked_before_the_fork_and_their_code_compiles_in_children(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[CompileResult] = []
    fail = CompileResult.fail
    monkeypatch.setattr(
        CompileResult, "fail", lambda self, *said: (results.append(self), fail(self, *said))[1]
    )
    launch(autotune(configs=blocks(32, 128), key=["n"], store=False, mode="exhaustive")(of_state("device")))
    assert results == []
    call, candidates = kernel_call(triton.autotune(blocks(32, 128), ["n"])(of_state("device")), *arguments())
    texts = ChildTracer(call, TracedTexts(), 2, example_table().problem, {})(candidates)
    assert len(texts) == 2
    assert all("9.0" in text for text in texts.values())


def arguments() -> tuple[Any, ...]:
    x = torch.empty(4096)
    return x, x, 4096


@pytest.mark.parametrize("error", [RuntimeError, ValueError, AssertionError])
def test_the_error_of_a_heuristic_is_what_it_is_under_triton(device: Any, error: type[Exception]) -> None:
    """For one config or for all: Triton's sweep ends there."""

    def rule(named: dict[str, Any]) -> int:
        if named["BLOCK"] == 128:
            raise error("no rule for this block")
        return 2

    for make in (triton.autotune, lambda **given: autotune(**given, store=False, mode="exhaustive")):
        tuner = make(configs=blocks(32, 128), key=["n"])(triton.heuristics({"FACTOR": rule})(fresh(scaled)))
        with pytest.raises(error, match="no rule for this block"):
            launch(tuner)


@triton.jit
def refused(x, out, n, BLOCK: tl.constexpr):
    """Triton forgives the first failure, and not the second."""
    tl.static_assert(BLOCK != 32, "thirty-two is refused")
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i + undefined))  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.filterwarnings("ignore:kernel .* none of")
def test_where_all_configs_fail_the_error_is_tritons(device: Any) -> None:
    found = []
    for make in (triton.autotune, lambda **given: autotune(**given, store=False)):
        tuner = make(configs=blocks(32, 128), key=["n"])(fresh(refused))
        for _ in range(2):
            with pytest.raises(Exception, match="undefined") as raised:
                launch(tuner)
            found.append(type(raised.value))
        assert tuner.cache == {}
    assert set(found) == {found[0]}


@pytest.mark.parametrize(
    "end",
    [lambda: os.kill(os.getpid(), 15), lambda: exec("raise MemoryError"), lambda: os.kill(os.getpid(), 9)],
)
def test_what_died_or_had_no_memory_is_not_tried_here(
    device: Any, monkeypatch: pytest.MonkeyPatch, end: Any
) -> None:
    compiled: list[int] = []
    compile_one = KernelCall.compile

    def compiling(self: KernelCall, candidate: Any) -> Any:
        compiled.append(os.getpid())
        return compile_one(self, candidate) if os.getpid() == HERE[0] else end()

    monkeypatch.setattr(KernelCall, "compile", compiling)
    tuner = autotune(configs=blocks(32, 128), key=["n"], store=False)(fresh(asking))
    with contextlib.suppress(NoWorkingConfigError), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        launch(tuner)
    assert HERE[0] not in compiled


def test_a_kernel_in_the_background_keeps_its_config_where_a_child_cannot_compile_it(
    triton_patch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_MODE", "background")
    tuner = triton.autotune(configs=blocks(32, 128), key=["n"])(of_state("device"))
    x, out = torch.ones(4096), torch.empty(4096)
    for _ in range(3):
        tuner[(1,)](x, out, 4096)
    assert tuner.best_config in tuner.configs
    assert settle() == (), "no later test meets this key"
