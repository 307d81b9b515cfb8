"""TileLang's own compiler and its kernels on the host's cores, tuned as a language of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang", reason="needs the package tilelang")
import tilelang.language as T

from forecast_autotune import Config, Evidence, Settings, Space, Store
from forecast_autotune.languages import LanguageKernel, tune_language
from forecast_autotune.records import Outcome
from forecast_autotune.testing import LanguageContract
from forecast_integrations.device import host_device
from forecast_integrations.tilelang.kernel import TileLangKernel

N = 4096
SPACE = Space({"BLOCK": [16, 64, 256, 1024]})


def scale(BLOCK: int) -> Any:
    """out = 2 x + 1, and 3 x in blocks of 32; 48 does not divide."""
    if N % BLOCK:
        raise ValueError(f"blocks of {BLOCK} do not divide {N}")
    factor = 3.0 if BLOCK == 32 else 2.0

    @T.prim_func
    def kernel(X: T.Tensor((N,), "float32"), OUT: T.Tensor((N,), "float32")):
        with T.Kernel(N // BLOCK) as block:
            for i in T.serial(BLOCK):
                OUT[block * BLOCK + i] = X[block * BLOCK + i] * factor + 1.0

    return kernel


def plain(BLOCK: int) -> Any:
    """Another source."""
    return scale(BLOCK)


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every test compiles for itself, and leaves nothing in the user's cache."""
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "tilelang"))


def scaling(build: Any = scale, **options: Any) -> TileLangKernel:
    x = torch.linspace(-1.0, 1.0, N)
    return TileLangKernel(build, {"x": x, "out": torch.empty(N)}, {"out": 2 * x + 1}, **options)


class TestTileLang(LanguageContract):
    def make(self) -> tuple[LanguageKernel, list[Config]]:
        return scaling(), list(SPACE)

    def failing(self) -> dict[Config, Outcome]:
        return {
            Config.of({"BLOCK": 48}): Outcome.COMPILE_ERROR,
            Config.of({"BLOCK": 32}): Outcome.INCORRECT,
            Config.of({"TILE": 16}): Outcome.COMPILE_ERROR,
        }


def test_a_kernel_is_measured_on_this_processor_and_the_code_of_its_config_handed_out() -> None:
    store, kernel = Store(None), scaling()
    tuned = tune_language(kernel, SPACE, store=store, settings=Settings(mode="exhaustive"))
    assert tuned.decision.evidence is Evidence.MEASURED
    assert tuned.decision.measured == 4
    block = dict(tuned.decision.chosen.config.kwargs)["BLOCK"]
    assert f"* {block}) + i" in tuned.compiled.get_kernel_source(), "how its C code finds an element"
    x, out = torch.randn(N), torch.empty(N)
    tuned.compiled(x, out)
    torch.testing.assert_close(out, 2 * x + 1)
    first = [m for m in store.measurements(kernel.problem) if not m.in_turns]
    assert len(first) == 4
    assert all(m.ok and m.compile_s for m in first)
    # One that cannot win is launched once or twice: on a busy machine that may be any but the fastest.
    assert min(first, key=lambda m: m.ms).repeats >= 3
    assert {m.protocol for m in first} == {"host-clock-1"}
    assert kernel.problem.device.name == host_device().name
    assert kernel.problem.device.backend == "cpu"
    assert [(a.name, a.dtype, a.shape) for a in kernel.problem.arguments] == [
        ("x", "float32", (N,)),
        ("out", "float32", (N,)),
    ]


@pytest.mark.parametrize(
    "other", [{"build": plain}, {"flags": ("-O1",)}, {"target": "cuda"}, {"helpers": (plain,)}]
)
def test_source_helpers_flags_and_target_make_another_problem(other: dict[str, Any]) -> None:
    assert scaling(**other).problem.id != scaling().problem.id


def test_a_launch_that_writes_nothing_is_wrong_whatever_was_there_before() -> None:
    kernel = scaling()
    assert kernel.check(kernel.compile(Config.of({"BLOCK": 64}))) == ""
    assert kernel.check(lambda *tensors: None) == "out is nan off"


def test_what_a_target_is_timed_by_goes_with_its_times() -> None:
    assert scaling().protocol == "host-clock-1"
    cuda = scaling(target="cuda")
    assert cuda.protocol == "events-l2read-3"
    assert (scaling().quiet, cuda.quiet) == (False, True), "only the host is disturbed by compiling"
    own = scaling(timer=lambda launch: [1.0, 2.0, 3.0], protocol="made-up")
    assert (own.protocol, own.time(own.compile(Config.of({"BLOCK": 64})))) == ("made-up", [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="the name of its protocol"):
        scaling(timer=lambda launch: [1.0])
