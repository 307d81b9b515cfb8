"""Tune once, serve everywhere: misses of a program are tuned without it, bundled, and used on another machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forecast_autotune.commands import main
from forecast_autotune.commands.output import UsageError
from forecast_autotune.errors import FrozenMissError
from forecast_autotune.records import Argument, Device, Evidence
from forecast_autotune.store import Store
from forecast_autotune.testing import example_table
from forecast_integrations.commands.warm import parse_shapes
from forecast_integrations.triton.patch import patch_triton, unpatch_triton
from forecast_integrations.triton.problem.rebuilt_call import (
    rebuilt_arguments,
)
from tests.integrations import warmed_kernels
from tests.integrations.null import binaries, tables


@pytest.fixture
def patched(device: Any) -> Iterator[Any]:
    patch_triton()
    warmed_kernels.forget()
    yield device
    unpatch_triton()


def use_machine(folder: Path, monkeypatch: pytest.MonkeyPatch, **variables: str) -> Path:
    """Go on as a new process on a machine whose caches are in this folder."""
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(folder / "store"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
    monkeypatch.delenv("FORECAST_AUTOTUNE_MODE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"FORECAST_AUTOTUNE_{name}", value)
    warmed_kernels.forget()
    return folder


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command with `--json`; returns what it says, and fails where it leaves with another status."""

    def run(*arguments: str, status: int = 0) -> Any:
        capfd.readouterr()
        assert main([*arguments, "--json"]) == status
        return json.loads(capfd.readouterr().out)

    return run


@pytest.mark.slow
def test_a_bundle_of_warmed_misses_serves_a_fresh_machine_without_measuring_or_compiling(
    patched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]
) -> None:
    production = use_machine(tmp_path / "production", monkeypatch, MODE="skip")
    warmed_kernels.run_program()
    warmed_kernels.run_program()
    misses = Store(production / "store").misses.all()
    assert len(misses) == 4, "each once"
    assert {m.problem.kernel.extra["qualname"] for m in misses} == {"scale", "gather"}
    assert not any(m.problem.kernel.source for m in misses)

    build = use_machine(tmp_path / "build", monkeypatch)
    given = ["warm", "--misses", str(production / "store")]
    plan = run(*given, "--plan")
    assert (len(plan["misses"]), plan["tuned"]) == (4, 0)
    assert plan["expected_s"] > 0
    assert not (build / "store" / "v1").exists(), "a plan changes nothing"
    done = run(*given)
    assert (done["tuned"], done["failed"]) == (4, 0)
    assert all(entry["measured"] > 0 for entry in done["misses"])
    assert Store(production / "store").misses.all() == []

    # The winners' binaries alone: what a first pass over the decisions compiles.
    shutil.rmtree(build / "triton")
    use_machine(build, monkeypatch, MODE="frozen")
    expected = [(k.metadata.num_warps, k.metadata.name) for k in warmed_kernels.run_program()]
    bundle = tmp_path / "bundle"
    made = run("store", "bundle", str(bundle), "--compiled", str(build / "triton"))
    assert made["carries"] == ["compiled"]

    fresh = use_machine(tmp_path / "fresh", monkeypatch, MODE="frozen", STORES=str(bundle))
    assert main(["store", "install", str(bundle), "--digest", "0" * 64]) == 1
    assert not (fresh / "triton").exists()
    run("store", "install", str(bundle), "--digest", made["digest"])
    shutil.rmtree(build)  # nothing of the machine that made it is needed
    installed = {p: p.stat().st_mtime_ns for p in (fresh / "triton").rglob("*.cubin")}
    assert binaries() == len(installed) > 0
    launches = patched.launches
    found = warmed_kernels.run_program()
    assert [(k.metadata.num_warps, k.metadata.name) for k in found] == expected
    assert {p: p.stat().st_mtime_ns for p in (fresh / "triton").rglob("*.cubin")} == installed, (
        "0 compilations"
    )
    assert patched.launches == launches + 4, "0 measurements: every launch is the program's"
    assert not tables(fresh / "store")
    assert warmed_kernels.scale.decision.evidence is Evidence.STORED
    assert not Store(fresh / "store").misses.all()


def test_a_kernel_of_tuples_is_warmed_and_its_values_stand_nowhere(
    patched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]
) -> None:
    def launch(dtype: torch.dtype) -> None:
        x = torch.full((1000,), 123.0)
        pair = warmed_kernels.Pair(x, (x.to(dtype), x))
        warmed_kernels.add_all[lambda meta: (1000 // meta["BLOCK"] + 1,)](pair, x, 1000)

    machine = use_machine(tmp_path, monkeypatch, MODE="skip")
    launch(torch.float16)
    use_machine(tmp_path, monkeypatch)
    assert run("warm")["tuned"] == 1
    written = [path.read_text() for path in (machine / "store").rglob("*.json*")]
    assert written
    assert not any("tensor(" in text or "123." in text for text in written)
    use_machine(tmp_path, monkeypatch, MODE="frozen")
    launch(torch.float16)
    assert warmed_kernels.add_all.decision.evidence is Evidence.STORED
    use_machine(tmp_path, monkeypatch, MODE="frozen")
    with pytest.raises(FrozenMissError):
        launch(torch.bfloat16)


def test_a_miss_is_tuned_with_the_launch_options_and_the_benchmark_of_its_call(
    patched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]
) -> None:
    machine = use_machine(tmp_path, monkeypatch, MODE="skip")
    x = torch.ones(64, dtype=torch.float16)
    monkeypatch.setitem(vars(warmed_kernels.scale), "do_bench", lambda kernel_call, quantiles: [1.0] * 3)
    warmed_kernels.scale[(1,)](x, x, 64, 0.5, maxnreg=32)
    (miss,) = Store(machine / "store").misses.all()
    use_machine(tmp_path, monkeypatch)
    assert run("warm")["tuned"] == 1
    assert Store(machine / "store").decision(miss.problem) is not None
    problem = replace(miss.problem, id="other", extra={"options": {"extern_libs": ["dict", "{}"]}})
    Store(machine / "store").misses.add(replace(miss, problem=problem))
    (entry,) = run("warm", status=1)["misses"]
    assert "launch option extern_libs is no number or text" in entry["trouble"]


def test_a_frozen_miss_is_recorded_and_then_raised(
    patched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = use_machine(tmp_path, monkeypatch, MODE="frozen")
    with pytest.raises(FrozenMissError):
        warmed_kernels.run_program()
    (miss,) = Store(machine / "store").misses.all()
    assert (miss.mode, miss.candidates, miss.problem.kernel.name) == ("frozen", 4, "scale")
    assert sorted((p["BLOCK"], g) for p, g in miss.grids) == [(64, (16,)), (128, (8,))]


def test_what_cannot_be_called_again_is_said_one_by_one(
    patched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]
) -> None:
    machine = use_machine(tmp_path, monkeypatch, MODE="skip")
    warmed_kernels.run_program()
    misses = Store(machine / "store").misses
    first, second, third, _ = misses.all()
    misses.remove(m.problem.id for m in misses.all())
    elsewhere = replace(first.problem, device=Device("another"))
    gone = replace(
        second.problem, kernel=replace(second.problem.kernel, extra={"module": "no.such", "qualname": "k"})
    )
    changed = replace(third.problem, id="other")
    for problem in (elsewhere, gone, changed):
        misses.add(replace(first, problem=problem, grids=third.grids))
    said = [entry["trouble"] for entry in run("warm", status=1)["misses"]]
    assert "met on another" in said[0]
    assert "no.such:k cannot be imported" in said[1]
    assert "another problem" in said[2]
    assert len(misses.all()) == 3, "they stay"


@pytest.mark.slow
def test_sizes_that_nobody_has_met_are_tuned_beforehand(
    patched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]
) -> None:
    machine = use_machine(tmp_path, monkeypatch, MODE="skip")
    warmed_kernels.run_program()
    use_machine(tmp_path, monkeypatch)
    given = ["warm", "--kernel", "scale", "--shapes", "n=64..256:pow2"]
    plan = run(*given, "--plan")
    sizes = [None, None, {"n": 64}, {"n": 128}, {"n": 256}]
    assert [entry.get("sizes") for entry in plan["misses"]] == sizes
    assert all(entry["expected_s"] > 0 for entry in plan["misses"])
    done = run(*given)
    assert (done["tuned"], done["known"], done["failed"]) == (5, 0, 0)
    again = run(*given, "--plan")
    assert [entry["known"] for entry in again["misses"]] == [True] * 3, "from what is stored, without a miss"
    assert again["expected_s"] == 0
    use_machine(tmp_path, monkeypatch, RISK="0.1")
    sure = run(*given, "--certify", "0.0")
    assert sum(sure["certified"][name] for name in ("untimed", "timed", "above")) == sure["tuned"]
    assert all(entry["measured"] or entry["risk"] == 0 for entry in sure["misses"] if "risk" in entry)

    use_machine(tmp_path, monkeypatch, MODE="frozen")
    launches = patched.launches
    x = torch.ones(128, dtype=torch.float16)
    warmed_kernels.scale[lambda meta, n=128: (-(-n // meta["BLOCK"]),)](x, x, 128, 0.5)
    assert patched.launches == launches + 1
    assert warmed_kernels.scale.decision.evidence is Evidence.STORED
    stored = {
        t.problem.key[0]: t for t in Store(machine / "store").tables() if t.problem.kernel.name == "scale"
    }
    blocks = {m.candidate.config.parameters()["BLOCK"]: m.grid for m in stored["256"].measurements}
    assert all(grid == (256 // block,) for block, grid in blocks.items() if isinstance(block, int))


def test_sizes_that_cannot_be_made_are_said(
    patched: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    machine = use_machine(tmp_path, monkeypatch, MODE="skip")
    assert main(["warm", "--shapes", "n=64"]) == 1
    assert "run the program once" in capfd.readouterr().err
    warmed_kernels.run_program()
    misses = Store(machine / "store").misses
    first = misses.all()[0]
    misses.remove(m.problem.id for m in misses.all())
    misses.add(replace(first, grids=(({"BLOCK": 64}, (7,)), ({"BLOCK": 128}, (5,)))))
    plan = run("warm", "--shapes", "n=64,128", "--plan", status=1)
    said = [entry.get("trouble", "") for entry in plan["misses"]]
    assert [bool(text) for text in said] == [False, True, True]
    assert "no formula of the call's sizes gives its launch grids" in said[1]


@pytest.mark.parametrize(
    "text", ["M", "M=", "=4", "M=0..4", "M=4..1", "M=a", "M=1..8:x", "M=-1", "M=9..15:pow2"]
)
def test_what_are_no_shapes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="are no shapes"):
        parse_shapes(text)


def test_arguments_are_made_as_they_were() -> None:
    given = (
        Argument("a", "tensor", "float16", (4, 3), (6, 2), aligned=True),
        Argument("i", "tensor", "int32", (5,), (1,), aligned=False),
        Argument("n", "scalar", "i32", value=7),
        Argument("s", "scalar", "fp32", value=2),
        Argument("none", "none"),
        Argument("C", "constexpr", value="relu"),
    )
    table = replace(example_table().problem, arguments=given)
    args, kwargs = rebuilt_arguments(table, ["a", "i", "n", "BLOCK", "s", "none", "C"])
    a, i, n = args
    assert isinstance(a, torch.Tensor)
    assert (a.dtype, tuple(a.shape), a.stride(), a.data_ptr() % 16) == (torch.float16, (4, 3), (6, 2), 0)
    assert isinstance(i, torch.Tensor)
    assert i.data_ptr() % 16 != 0
    assert not i.any(), "what may be an index stays inside"
    assert n == 7
    assert kwargs == {"s": 2.0, "none": None, "C": "relu"}


def test_a_plan_for_a_device_that_is_not_here_counts_what_can_launch_there(
    patched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]
) -> None:
    use_machine(tmp_path / "here", monkeypatch, MODE="skip")
    warmed_kernels.run_program()
    known = {entry["kernel"]: entry for entry in run("warm", "--plan", "--device", "gfx942")["misses"]}
    assert known
    for entry in known.values():
        assert "trouble" not in entry
        assert sum(entry["launches"].values()) == entry["candidates"]
    assert not run("warm", "--plan", "--device", "no such device")["misses"]
