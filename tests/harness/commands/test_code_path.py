"""`--path`: machine code where it proves to work, host code with a line that says why where it does not."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import re
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.lib.machine_code.opened import FAKE_FLUSH_BYTES
from forecast_autotune.commands import count_line, main
from forecast_autotune.commands.count_line import CountLine
from forecast_autotune.commands.output import CommandError, Output
from forecast_autotune.records import Outcome
from forecast_harness.clocks.runner import client
from forecast_harness.clocks.runner.client import RunnerClient, clock_problem, runner_problem
from forecast_harness.commands.search import open_machine_code
from forecast_harness.records import Node, NodeJob, SearchTarget
from forecast_harness.targets.novelty import node_identity
from forecast_harness.targets.packs.load import load_pack
from forecast_harness.targets.search_target import open_target
from forecast_harness.trials import devices
from forecast_harness.trials import machine_lanes as opening
from forecast_harness.verify.plan import VerificationPlan
from tests.core.captured_output import Capture
from tests.waiting import wait_until

SOLUTION = """import torch, triton, triton.language as tl

@triton.jit
def _add_nothing(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(y + at, tl.load(y + at, mask=at < n) + (value - value), mask=at < n)

def run(x):
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    _add_nothing[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), 64)
    return y
"""


@pytest.fixture(scope="module")
def library(fake_driver: Path) -> str:
    """A driver on which code for a device does nothing: right is a kernel that has nothing to do."""
    return str(fake_driver)


@pytest.fixture(scope="module")
def zeros(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pack whose right results are zeros."""
    folder = tmp_path_factory.mktemp("packs") / "nothing"
    (folder / "solutions").mkdir(parents=True)
    definition = load_pack("softmax").definition.to_json()
    definition |= {"name": "nothing", "description": "Zeros.", "source": "this test"}
    (folder / "definition.json").write_text(json.dumps(definition))
    (folder / "workloads.json").write_text(json.dumps([{"name": "small", "axes": {"M": 4, "N": 32}}]))
    (folder / "reference.py").write_text("def reference(x):\n    return x - x\n")
    (folder / "solutions" / "adds.py").write_text(SOLUTION)
    return str(folder)


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command believes in one device, which is the host for whatever runs in a sandbox."""
    monkeypatch.setattr(devices, "verification_plan", lambda device, index=None: VerificationPlan())


def opened(
    target: SearchTarget, seed: Node, folder: Path, path: str = "auto"
) -> opening.MachineCodeLanes | None:
    options = argparse.Namespace(path=path, quiet=False)
    return open_machine_code(options, Output(False), target, seed, device="cuda", lanes=[0], folder=folder)


def test_a_pack_is_judged_through_machine_code_where_its_seed_proves_it(
    library: str, zeros: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(client, "LIBRARY", library)
    monkeypatch.setattr(client, "FLUSH_BYTES", FAKE_FLUSH_BYTES)
    target, (seed,) = open_target(zeros, device="cuda")
    lanes = opened(target, seed, tmp_path)
    assert lanes is not None
    stages = capsys.readouterr().err.splitlines()
    assert [s.split()[0] for s in stages] == ["starting", "launching"]

    def judged(source: str) -> object:
        made = Node(node_identity(target.id, "triton", source), source, "triton", (), seed.provenance)
        return lanes.submit(NodeJob(made.id, made, seed, {}, target, 1, 4))

    try:
        wrong = judged(SOLUTION.replace("torch.zeros", "torch.ones"))
        broken = judged(SOLUTION.replace("tl.store", "tl.no_store"))
        found = [f.result(300) for f in (wrong, broken)]  # type: ignore[attr-defined]
    finally:
        lanes.close()
    assert [f.outcome for f in found] == [Outcome.INCORRECT, Outcome.COMPILE_ERROR]
    assert {f.facts["path"] for f in found} == {"machine code"}


def test_without_a_driver_sources_are_judged_as_host_code_and_a_line_says_why(
    zeros: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(client, "LIBRARY", str(tmp_path / "libnothing.so"))
    target, (seed,) = open_target(zeros, device="cuda")
    assert opened(target, seed, tmp_path) is None
    said = capsys.readouterr().err
    assert "judged as host code, in a sandbox: the runner cannot use the device" in said.replace("\n", " ")
    with pytest.raises(CommandError, match="--path machine-code does not work here"):
        opened(target, seed, tmp_path, "machine-code")
    assert opened(target, seed, tmp_path, "host-code") is None


def test_a_seed_in_another_language_is_host_code(zeros: str, tmp_path: Path) -> None:
    target, (seed,) = open_target("cumsum", device="cpu")
    with pytest.raises(client.NoMachineCodePath, match="written in torch"):
        opening.open_machine_code_lanes(target, seed, [VerificationPlan()], folder=tmp_path)


def test_machine_code_is_refused_where_there_is_no_device_for_it(capsys: Capture) -> None:
    assert main(["search", "swiglu", "--path", "machine-code", "--device", "cpu"]) == 2
    assert "--path machine-code is for CUDA devices" in capsys.readouterr().err


def test_a_runner_proves_its_health(library: str) -> None:
    with RunnerClient(library, flush_bytes=FAKE_FLUSH_BYTES) as runner:
        assert runner_problem(runner) == ""
        for short, long in runner.timed_pauses((4_000_000, 8_000_000)):
            assert 0 < short <= long


@pytest.mark.parametrize(
    ("pauses", "said"),
    [
        ([(1e-3, 1e-3), (8e-3, 8.2e-3)], ""),
        ([(1e-3, 1e-3), (1e-3, 8e-3)], "the second should take 8 times"),
        ([(0.0, 1e-3), (8e-3, 8e-3)], "the second should take 8 times"),
        ([(1e-6, 1e-3), (8e-6, 8e-3)], "no device's clock"),
        ([(1e-3, 1e-3), (8e-3, 2e-3)], "of the 0.002 s that passed"),
    ],
)
def test_a_clock_that_tells_no_time_is_found_out(pauses: list[tuple[float, float]], said: str) -> None:
    found = clock_problem(pauses)
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize("terminal", [True, False])
def test_counts_are_shown_at_once_and_at_the_end(terminal: bool) -> None:
    file = io.StringIO()
    told = ["none of 2 judged"]
    with CountLine(Console(file=file, force_terminal=terminal, width=60), lambda: told[-1]):
        assert "none of 2 judged" in file.getvalue()
        told.append("2 of 2 \x1b[31mjudged")
    shown = file.getvalue()
    assert "2 of 2" in shown
    assert "\x1b[31m" not in shown
    assert ("\r" in shown) is terminal
    assert shown.endswith("\n")
    assert all(t.name != "count-line" for t in threading.enumerate())


@pytest.mark.parametrize("terminal", [True, False])
def test_a_command_that_waits_says_where_it_stands(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place on a terminal; elsewhere once a minute, though nothing happens."""
    monkeypatch.setattr(count_line, "_INTERVAL_S", 0.001)
    output, printed = Output(False), io.StringIO()
    output.errors = Console(file=printed, force_terminal=terminal, width=60)
    with output.at_work:
        output.remark("opening softmax")
        if not terminal:
            time.sleep(0.05)
            assert printed.getvalue() == "opening softmax\n"
            monkeypatch.setattr(count_line, "SILENCE_S", 0.0)
        output.stage = "batch 1"
        wait_until(lambda: "batch 1 (0 s)" in printed.getvalue())
    shown = printed.getvalue()
    assert shown.split("\n")[0].endswith("opening softmax")
    assert "batch 1 (0 s)" in shown
    assert shown.endswith("\r\x1b[K" if terminal else ")\n")


def test_a_log_has_no_line_for_each_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_line, "_INTERVAL_S", 0.001)
    file, count = io.StringIO(), itertools.count()
    with CountLine(Console(file=file), lambda: f"{next(count)} of 9 judged"):
        wait_until(lambda: next(count) > 10)
    first, last = file.getvalue().splitlines()
    assert first == "0 of 9 judged"
    assert re.fullmatch(r"\d+ of 9 judged \(\d+ s( in all)?\)", last)
