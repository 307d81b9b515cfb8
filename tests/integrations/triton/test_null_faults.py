"""Faults of candidates, compilers and processes on the null device: a decision survives, and hooks hear of them."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources, PTXASError

from forecast_autotune import autotune
from forecast_autotune.records import Outcome
from forecast_autotune.store import Store
from forecast_integrations.triton.compile.pool import ForkPool, ThreadPool
from forecast_integrations.triton.device_access import LOCK
from forecast_integrations.triton.null_device import null_device
from forecast_integrations.triton.problem.call import KernelCall
from tests.integrations.null import (
    blocks,
    by_launch_options,
    child,
    configs,
    counts,
    double,
    fresh,
    launch,
    tables,
    total,
)

pytestmark = pytest.mark.usefixtures("shared_cache")


def tuned(kernel: Any, listed: Any, root: Path, **options: Any) -> Any:
    """A tuner over a kernel of which nothing is compiled, with a store on disk."""
    return autotune(configs=listed, key=["n"], store=Store(root), **options)(fresh(kernel))


def outcomes(root: Path, name: str) -> dict[Any, Outcome]:
    """Outcome by the value of one parameter, of the only problem in a store."""
    (table,) = tables(root)
    return {c.config.parameters()[name]: m.outcome for c, m in table.by_candidate().items()}


@pytest.mark.slow
@pytest.mark.usefixtures("clean_environment")
def test_a_config_that_does_not_fit_is_recorded_and_passed_over(tmp_path: Path) -> None:
    """A sum over 4 warps needs 16 bytes of shared memory; this device has 12."""
    with null_device(by_launch_options, shared_memory_bytes=12):
        tuner = tuned(total, configs((1, 2, 4, 8), (3,)), tmp_path / "store", mode="exhaustive")
        launch(tuner, 128)
    found = outcomes(tmp_path / "store", "num_warps")
    assert found == {1: "ok", 2: "ok", 4: "out_of_resources", 8: "out_of_resources"}
    (table,) = tables(tmp_path / "store")
    failures = [m for m in table.measurements if not m.ok]
    assert all("shared memory" in m.extra["message"] for m in failures)
    assert tuner.best_config.num_warps == 2
    timing = {config.num_warps: times for config, times in tuner.configs_timings.items()}
    assert timing[4] == timing[8] == [float("inf")] * 3


@pytest.mark.usefixtures("clean_environment")
def test_nothing_fits(tmp_path: Path) -> None:
    with null_device(by_launch_options, shared_memory_bytes=4):
        tuner = tuned(total, configs((2, 4, 8), (3,)), tmp_path / "store")
        for _ in range(2):
            said = r"kernel total: none of 3 .*3 out_of_resources.*null H200"
            with pytest.warns(UserWarning, match=said), pytest.raises(OutOfResources, match="Required: 8"):
                launch(tuner, 128)
        assert tuner.cache == {}
        assert tuner.nargs is None


@pytest.mark.usefixtures("compiler")
def test_configs_that_do_not_compile_are_survived(tmp_path: Path) -> None:
    """A `static_assert` and a block that is no power of two; Triton's own sweep dies of the second."""
    tuner = tuned(double, blocks(32, 48, 64, 128), tmp_path / "store", mode="exhaustive")
    launch(tuner)
    found = outcomes(tmp_path / "store", "BLOCK")
    assert found == {32: "ok", 48: "compile_error", 64: "compile_error", 128: "ok"}
    (table,) = tables(tmp_path / "store")
    said = {m.candidate.config.parameters()["BLOCK"]: m.extra.get("message", "") for m in table.measurements}
    assert "sixty-four is refused" in said[64]
    assert "power of 2" in said[48]


def test_only_one_of_many_compiles(device: Any, tmp_path: Path) -> None:
    """Twenty that fail and one that works: beyond any share of candidates, it has to be found."""
    listed = [*blocks(*[3 * n for n in range(11, 31)]), *blocks(32)]
    tuner = tuned(double, listed, tmp_path / "store")
    launch(tuner)
    assert tuner.best_config.kwargs["BLOCK"] == 32


def patched(monkeypatch: pytest.MonkeyPatch, block: int, act: Callable[[], object]) -> None:
    """Let the compilation of one BLOCK do something else first."""
    compile_one = KernelCall.compile

    def compile_or_act(self: KernelCall, candidate: Any) -> Any:
        if candidate.config.parameters()["BLOCK"] == block:
            act()
        return compile_one(self, candidate)

    monkeypatch.setattr(KernelCall, "compile", compile_or_act)


@pytest.mark.usefixtures("compiler")
def test_a_compilation_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_TIMEOUT", "3")
    patched(monkeypatch, 32, lambda: time.sleep(20))
    tuner = tuned(double, blocks(32, 128, 256), tmp_path / "store", mode="exhaustive")
    launch(tuner)
    assert outcomes(tmp_path / "store", "BLOCK") == {32: "timeout", 128: "ok", 256: "ok"}
    assert tuner.best_config.kwargs["BLOCK"] in (128, 256)


@pytest.mark.parametrize(
    ("number", "outcome"), [(signal.SIGABRT, "compile_error"), (signal.SIGKILL, "infrastructure")]
)
def test_a_compiler_that_dies_takes_nobody_along(
    device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, outcome: str
) -> None:
    """An abort is the config's fault; a SIGKILL is somebody else's (memory was short, say): no label."""
    here = os.getpid()

    def die() -> None:
        if os.getpid() != here:
            faulthandler.disable()
            os.kill(os.getpid(), number)

    patched(monkeypatch, 32, die)
    tuner = tuned(double, blocks(32, 128), tmp_path / "store", mode="exhaustive")
    launch(tuner)
    assert tuner.best_config.kwargs["BLOCK"] == 128
    (table,) = tables(tmp_path / "store")
    found = {m.candidate.config.parameters()["BLOCK"]: m for m in table.measurements}
    assert found[32].outcome == outcome
    assert "signal" in found[32].extra["message"]


def test_a_mistake_of_the_caller_is_the_callers_to_see(device: Any, tmp_path: Path) -> None:
    """A parameter that the kernel does not have fails for every config: nothing is recorded."""
    listed = [triton.Config({"BLOCK": 32, "BLOK": 1}), triton.Config({"BLOCK": 64, "BLOK": 1})]
    with pytest.raises(KeyError, match="BLOK"):
        launch(tuned(double, listed, tmp_path / "store"))
    assert tables(tmp_path / "store") == []


@pytest.mark.parametrize("error", [RuntimeError, LookupError, TimeoutError])
@pytest.mark.parametrize("when", ["pre_hook", "post_hook", "config"])
def test_what_a_hook_raises_is_the_callers_to_see(
    device: Any, tmp_path: Path, when: str, error: type[Exception]
) -> None:
    """Nothing of it is recorded: with the hook mended, the next decision is as if it had never failed."""
    hooks = [error("busy")]

    def hook(*_: Any, **__: Any) -> None:
        if hooks:
            raise hooks[0]

    options = {"mode": "exhaustive", **({when: hook} if when.endswith("_hook") else {})}
    listed = configs((2, 4, 8), (3,))
    if when == "config":
        listed[1].pre_hook = hook
    with pytest.raises(error, match="busy"):
        launch(tuned(double, listed, tmp_path / "store", **options))
    hooks.clear()
    tuner = tuned(double, listed, tmp_path / "store", **options)
    launch(tuner)
    assert tuner.best_config.num_warps == 4
    assert set(outcomes(tmp_path / "store", "num_warps").values()) == {"ok"}


@pytest.mark.parametrize("error", [TimeoutError, RuntimeError, ValueError])
def test_a_signal_handler_ends_a_decision(
    device: Any, tmp_path: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Harnesses limit the time of what they try so. Whatever runs just then, nothing takes it for a fault."""

    def limit(number: int, frame: object) -> None:
        raise error("out of time")

    monkeypatch.setattr(KernelCall, "compile", lambda *_: time.sleep(20.0))
    before = signal.signal(signal.SIGALRM, limit)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
        with pytest.raises(error, match="out of time"):
            launch(tuned(double, configs((2, 4, 8), (3,)), tmp_path / "store"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert tables(tmp_path / "store") == []


def test_what_no_compiler_took_is_tried_again_in_the_next_process(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk fails all configs alike, and is cleared some day."""

    def full(*_: Any) -> object:
        raise PTXASError("No space left on device")

    listed = configs((2, 4, 8), (3,))
    with monkeypatch.context() as patch:
        patch.setattr(KernelCall, "compile", full)
        with pytest.warns(UserWarning, match="No space left"):
            launch(tuned(double, listed, tmp_path / "store"))  # by Triton's own way, which has room
    tuner = tuned(double, listed, tmp_path / "store")
    launch(tuner)
    assert tuner.best_config.num_warps == 4
    assert outcomes(tmp_path / "store", "num_warps")[4] == "ok"


def test_compiling_alone_decides_nothing(device: Any, tmp_path: Path) -> None:
    """`warmup=True` launches nothing: there is nothing to time, and the key is decided at the first launch."""
    x, listed = torch.empty(4096), configs((8, 2, 4), (3,))
    tuner = tuned(double, listed, tmp_path / "store", mode="exhaustive")
    tuner.run(x, x, 4096, grid=(32,), warmup=True)
    assert tables(tmp_path / "store") == []
    assert tuner.cache == {}
    launch(tuner)
    assert tuner.best_config.num_warps == 4
    again = tuned(double, listed, tmp_path / "store")
    assert again.run(x, x, 4096, grid=(32,), warmup=True).metadata.num_warps == 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["tune", "exhaustive", "skip", "deterministic"])
def test_tensors_of_a_decision_are_let_go(device: Any, tmp_path: Path, mode: str) -> None:
    tuner, x = tuned(double, configs((2, 4, 8), (3,)), tmp_path / "store", mode=mode), torch.empty(4096)
    tuner[lambda meta: (triton.cdiv(4096, meta["BLOCK"]),)](x, x, 4096)
    held = weakref.ref(x)
    del x
    gc.collect()
    assert held() is None


def test_a_fork_in_the_middle_of_a_decision_can_decide(device: Any) -> None:
    """The lock is held by a thread that the child does not have."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(LOCK.acquire).result()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if LOCK.acquire(timeout=5.0) else 1)
        status = os.waitpid(pid, 0)[1]
        pool.submit(LOCK.release).result()
    assert status == 0


def test_a_finished_child_is_not_taken_for_a_hung_one() -> None:
    """Timing the others may take longer than the timeout; their answers wait in the pipe meanwhile."""
    names: list[Any] = [f"candidate {i}" for i in range(4)]
    with closing(ForkPool(lambda candidate: None, 4, timeout_s=0.3)) as pool:
        pool.schedule(names)
        time.sleep(0.8)
        found = [pool.next() for _ in names]
    assert {result.candidate for result in found} == set(names)
    assert [result.outcome for result in found] == [None] * 4


def test_threads_that_cannot_reach_the_device() -> None:
    def no_device() -> None:
        raise RuntimeError("CUDA error: no device")

    names: list[Any] = ["a", "b", "c", "d", "e"]
    with closing(ThreadPool(lambda candidate: None, 2, 5.0, no_device)) as pool:
        pool.schedule(names)
        found = [pool.next() for _ in names]
    assert {(r.candidate, r.outcome) for r in found} == {(name, Outcome.INFRASTRUCTURE) for name in names}


# --- choices that were right once ---


def refuse(device: Any, error: Exception, warps: set[int]) -> None:
    """Let launches of configs with so many warps fail from now on."""

    def clock(metadata: Any) -> float:
        if metadata.num_warps in warps:
            raise error
        return by_launch_options(metadata)

    device.clock = clock


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "error",
    [
        OutOfResources(1024, 512, "threads"),
        PTXASError("no such instruction"),
        RuntimeError("Triton Error [CUDA]: invalid argument"),
    ],
    ids=["resources", "assembler", "launch"],
)
@pytest.mark.parametrize("mode", ["tune", "exhaustive", "frozen", "skip", "background"])
def test_a_stored_choice_that_cannot_be_launched_is_struck(
    device: Any, tmp_path: Path, mode: str, error: Exception
) -> None:
    root, listed = tmp_path / "store", configs((1, 2, 4, 8), (3,))
    launch(tuned(double, listed, root, mode="exhaustive"))
    for warps in ({4}, {4, 2, 8})[: 1 if mode == "background" else 2]:  # whose thread goes on beside
        refuse(device, error, warps)
        tuner = tuned(double, listed, root, mode=mode)
        with pytest.warns(UserWarning, match=r"double: .*cannot be launched .*struck") as said:
            launch(tuner)
        assert tuner.best_config.num_warps not in warps
        assert len(said) == (1 if warps == {4} else 2), "each config that is struck is said once"
        again = tuned(double, listed, root, mode=mode)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            launch(again)
            launch(again)
        assert again.best_config == tuner.best_config or mode == "background"
        assert again.best_config.num_warps not in warps
    refuse(device, error, {1, 2, 4, 8})
    with pytest.raises(type(error)):
        launch(tuned(double, listed, root, mode="skip"))


@pytest.mark.parametrize("mode", ["deterministic", "skip", "background"])
def test_a_forecast_that_cannot_be_launched_gives_way_to_another(
    device: Any, tmp_path: Path, mode: str
) -> None:
    listed = configs((4, 8, 2), (3, 4))
    first = tuned(double, listed, tmp_path / "other", mode="deterministic")
    launch(first)
    refuse(device, OutOfResources(1024, 512, "threads"), {first.best_config.num_warps})
    tuner = tuned(double, listed, tmp_path / "store", mode=mode)
    with pytest.warns(UserWarning, match="cannot be launched"):
        launch(tuner)
    assert tuner.best_config.num_warps != first.best_config.num_warps
    assert tables(tmp_path / "store") == [] or mode != "deterministic"


def test_a_wrong_call_spoils_no_stored_choice_for_good(device: Any, tmp_path: Path) -> None:
    """A grid that no device takes fails with every config: the next call is right, and served as before."""
    root, listed = tmp_path / "store", configs((1, 2, 4), (3,))
    launch(tuned(double, listed, root, mode="exhaustive"))
    refuse(device, RuntimeError("Triton Error [CUDA]: invalid argument"), {1, 2, 4})
    wrong = tuned(double, listed, root, mode="exhaustive")
    with warnings.catch_warnings(action="ignore"), pytest.raises(RuntimeError, match="invalid argument"):
        launch(wrong)
    device.clock = by_launch_options
    tuner = tuned(double, listed, root, mode="exhaustive")
    launch(tuner)
    assert tuner.best_config.num_warps == 4


def test_a_first_config_that_cannot_be_launched_gives_way_too(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is served, untimed, where frozen mode cannot ask the store."""

    def fail(*_: Any) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(Store, "decision", fail)
    refuse(device, OutOfResources(1024, 512, "threads"), {1})
    tuner = tuned(double, configs((1, 4, 2), (3,)), tmp_path / "store", mode="frozen")
    with pytest.warns(UserWarning, match="the store failed"):
        launch(tuner)
    assert tuner.best_config.num_warps == 4
    assert device.launches == 2


def test_threads_that_meet_a_failing_choice_together_all_launch(device: Any, tmp_path: Path) -> None:
    root, listed = tmp_path / "store", configs((1, 2, 4), (3,))
    launch(tuned(double, listed, root, mode="exhaustive"))
    failing = threading.Barrier(4)

    def clock(metadata: Any) -> float:
        if metadata.num_warps == 4:
            failing.wait(60.0)
            raise OutOfResources(1024, 512, "threads")
        return by_launch_options(metadata)

    device.clock = clock
    tuner = tuned(double, listed, root, mode="frozen")
    with ThreadPoolExecutor(4) as pool, pytest.warns(UserWarning, match="struck") as said:
        list(pool.map(lambda _: launch(tuner), range(4)))
    assert len(said) == 1
    assert tuner.best_config.num_warps != 4


def test_what_the_callers_own_function_raises_strikes_nothing(device: Any, tmp_path: Path) -> None:
    root, listed = tmp_path / "store", configs((2, 4), (3,))
    launch(tuned(double, listed, root))

    def grid(meta: dict[str, Any]) -> tuple[int]:
        if decided:
            raise RuntimeError("no grid")
        return (triton.cdiv(4096, meta["BLOCK"]),)

    x, decided = torch.empty(4096), []
    tuner = tuned(double, listed, root)
    decided.append(True)
    with pytest.raises(RuntimeError, match="no grid"):
        tuner[grid](x, x, 4096)
    assert set(outcomes(root, "num_warps").values()) == {"ok"}
    decided.clear()
    tuner[grid](x, x, 4096)
    assert tuner.best_config.num_warps == 4


def test_a_size_outside_the_key_decides_for_itself(device: Any, tmp_path: Path) -> None:
    """A heuristic makes the block out of a size that the key does not name; the stored config suits another one."""
    listed = [triton.Config({}, num_warps=w) for w in (1, 2, 4, 8)]

    def tuner_of(root: Path) -> Any:
        block = triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"])})
        return autotune(configs=listed, key=[], store=Store(root), mode="exhaustive")(block(fresh(total)))

    x = torch.empty(1 << 13)
    first = tuner_of(tmp_path / "store")
    first[(1,)](x, x, 100)
    second = tuner_of(tmp_path / "store")
    second[(1,)](x, x, 5000)
    assert second.decision.measured == 4
    assert second.decision.problem != first.decision.problem


# --- processes that die ---


def test_a_launch_that_takes_the_process_down_is_skipped_from_then_on(device: Any, tmp_path: Path) -> None:
    root = tmp_path / "store"
    listed = configs((1, 2, 4, 8), (3,))

    def deadly(metadata: Any) -> float:
        if metadata.num_warps == 4:
            os._exit(77)
        return by_launch_options(metadata)

    def tune() -> None:
        device.clock = deadly
        launch(tuned(double, listed, root, mode="exhaustive"))

    _, status = os.waitpid(child(tune), 0)
    assert os.waitstatus_to_exitcode(status) == 77
    assert len(list(root.rglob("running-*.json"))) == 1
    before = [m.candidate for table in tables(root) for m in table.measurements]
    device.clock = deadly  # it would take this process down too
    tuner = tuned(double, listed, root, mode="exhaustive")
    launch(tuner)
    assert outcomes(root, "num_warps") == {1: "ok", 2: "ok", 4: "runtime_error", 8: "ok"}
    assert list(root.rglob("running-*.json")) == []
    (table,) = tables(root)
    assert set(counts(table).values()) == {1}, "and nothing was measured twice"
    assert tuner.decision.known == len(before) + 1


@triton.jit
def accumulate(x, out, n, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    """A pipelined loop keeps STAGES - 1 blocks of each load in shared memory."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, n, BLOCK, num_stages=STAGES):
        total += tl.load(x + start + i, mask=start + i < n)
    tl.store(out + i, total)


class Heard:
    """Hooks of a user's, and what they were told."""

    def __init__(self) -> None:
        self.open = 0
        self.failures: dict[int, str] = {}
        """Name of the exception, by the value of the parameter that tells the configs apart."""
        self.runs: set[int] = set()

    def before(self, kwargs: dict[str, Any], reset_only: bool = False) -> None:
        """Tuner-level `pre_hook`."""
        self.open += not reset_only

    def after(self, kwargs: dict[str, Any], exception: BaseException | None) -> None:
        """Tuner-level `post_hook`."""
        self.open -= 1
        value = kwargs.get("STAGES", kwargs["BLOCK"])
        if exception is None:
            self.runs.add(value)
        else:
            self.failures[value] = type(exception).__name__


def hearing(**options: Any) -> Any:
    listed = [triton.Config({"STAGES": stages, "BLOCK": 4096}) for stages in (2, 3, 64)]
    return autotune(configs=listed, key=["n"], store=False, **options)(fresh(accumulate))


def start(tuner: Any) -> Any:
    x = torch.empty(1 << 16)
    tuner[(1,)](x, x, 1 << 16)
    return tuner.decision


def test_what_is_refused_is_tried_once_where_hooks_hear_of_it(device: Any) -> None:
    assert start(hearing()).refused == 1
    heard = Heard()
    tuner = hearing(pre_hook=heard.before, post_hook=heard.after)
    decision = start(tuner)
    assert heard.failures == {64: OutOfResources.__name__}
    assert heard.runs
    assert heard.open == 0, "every try ends with the hook that follows it"
    assert decision.refused == 0
    assert dict(decision.chosen.config.kwargs)["STAGES"] != 64
    heard.failures.clear()
    start(tuner)
    assert heard.failures == {}


@pytest.mark.usefixtures("compiler")
def test_hooks_hear_what_does_not_compile() -> None:
    heard = Heard()
    options = {"pre_hook": heard.before, "post_hook": heard.after, "mode": "exhaustive"}
    launch(autotune(configs=blocks(64, 128), key=["n"], store=False, **options)(fresh(double)))
    assert heard.failures == {64: "CompileTimeAssertionFailure"}
    assert heard.runs == {128}
    assert heard.open == 0


def test_a_benchmark_function_hears_what_does_not_compile(device: Any) -> None:
    """Triton's `_bench` forgives what the function lets through; the function has seen it before."""
    seen: list[str] = []

    def do_bench(kernel_call: Any, quantiles: Any) -> list[float]:
        try:
            kernel_call()
        except Exception as error:
            seen.append(type(error).__name__)
            raise
        return [1.0, 1.0, 1.0]

    tuner = autotune(configs=blocks(64, 128), key=["n"], store=False, mode="exhaustive", do_bench=do_bench)(
        fresh(double)
    )
    launch(tuner)
    assert seen == ["CompileTimeAssertionFailure"]
    assert tuner.best_config.kwargs == {"BLOCK": 128}
