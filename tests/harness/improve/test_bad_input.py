"""Programs that are hard to improve: one line each says why, and the rest goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forecast_autotune.commands.output import CommandError
from forecast_autotune.records import Argument, Config, Device, Kernel
from forecast_autotune.records.captured_call import CapturedCall
from forecast_autotune.records.program import (
    PLAN_FILE,
    RANK_FOLDER,
    RECORDING_FILE,
    FunctionCall,
    ProgramRecording,
    RecordingPlan,
    TorchFunction,
    TurnBlock,
)
from forecast_autotune.store import Store
from forecast_autotune.variants import Origin, Provenance, Variant
from forecast_harness.improve import proof as proofs
from forecast_harness.improve import session as sessions
from forecast_harness.improve.child import UserProgram, run_command
from forecast_harness.improve.page import page
from forecast_harness.improve.parts import Part, chosen_parts, parts_of
from forecast_harness.improve.patch import patch_text
from forecast_harness.improve.proof import ProofRequest
from forecast_harness.improve.session import Improvement, ImproveSession, ImproveSettings, SearchEnd
from forecast_harness.improve.steps import steps_of
from forecast_integrations.triton import program_recording
from forecast_integrations.triton.program_recording import ProgramRecorder, record_first_rank
from tests.waiting import wait_until

PROGRAM = UserProgram(("program.py",))
EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "improve"
ODD = """
import torch

CACHE = {}
NOISE = torch.ones(3)

def writes(x):
    return x.add_(1)

def learns(w):
    return (w * w).sum()

def tells(x):
    return {"sum": x.sum()}

def needs(x):
    return x + NOISE

def strided(x):
    return x + 1

def takes(x, module):
    return module(x)

def limits(x, most=float("inf")):
    return x.clamp(max=most)

def good(x):
    return torch.stack([row * 2 for row in x])

x = torch.ones(3)
for _ in range(6):
    writes(x), tells(x), needs(x), strided(torch.ones(4, 3).t()), takes(x, torch.nn.Identity()), limits(x)
    learns(torch.ones(3, requires_grad=True)), good(torch.ones(4, 3))
"""


REASONS = {
    "writes": "writes to its argument x",
    "learns": "w needs gradients",
    "tells": "returns something else|result: y0 is a dict",
    "needs": "needs NOISE, which is computed when program.py runs",
    "strided": "x is not contiguous",
    "takes": "module is a Identity",
    "limits": "most is inf",
    "good": "^$",
}


def look(folder: Path, source: str, seconds: float = 60.0) -> Improvement:
    (folder / "program.py").write_text(source)
    settings = ImproveSettings("cpu", seconds)
    words = (str(folder / "program.py"),)
    return ImproveSession(words, settings, folder / "out", lambda line: None).look()


def test_functions_that_cannot_be_taken_out_say_why_and_others_are_searched(tmp_path: Path) -> None:
    found = look(tmp_path, ODD)
    told = {p.name.rpartition(":")[2]: p.reason for p in found.parts}
    assert [name for name, said in REASONS.items() if not re.search(said, told[name])] == []
    assert [p.name for p in chosen_parts(found.parts, None)] == ["__main__:good"]
    told_again: list[str] = []
    later = ImproveSession(found.words, ImproveSettings("cpu", 60.0), tmp_path / "later", told_again.append)
    assert [p.name for p in later.look(tmp_path / "out").parts] == [p.name for p in found.parts]
    # The recording is used, and its calls.
    assert (told_again, later.store) == ([], tmp_path / "out" / "store")
    resumed = ImproveSession(found.words, ImproveSettings("cpu", 60.0), tmp_path / "later", told_again.append)
    resumed.adopt(found)
    assert (resumed.store, resumed.run_s > 0.0, resumed.run_limit_s) == (later.store, True, found.run_limit_s)


def test_a_program_that_never_ends_counts_as_far_as_it_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_LEAST_LOOK_S", 12.0)
    endless = (
        "import torch\n\ndef good(x):\n    return x * 2\n\nx = torch.ones(9)\nwhile True:\n    good(x)\n"
    )
    found = look(tmp_path, endless, seconds=1.0)
    assert [p.name for p in found.parts] == ["__main__:good"]
    assert found.step_how.endswith(", one launch that repeats")


def test_ctrl_c_ends_with_what_is_known_and_leaves_no_process(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "work")
    child = subprocess.Popen(
        f"{sys.executable} -m forecast_autotune improve --device cpu --out out program.py".split(),
        cwd=tmp_path / "work",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stderr is not None
    while "searching" not in (line := child.stderr.readline()):
        assert line, "it ended before its search"
    os.kill(child.pid, signal.SIGINT)
    output, errors = child.communicate(timeout=120)
    assert child.returncode == 130, errors
    assert "--resume --out out" in errors
    assert "norms" in output
    assert "interrupted" in output
    assert (tmp_path / "work" / "out" / "improve.json").exists()

    def is_gone() -> bool:  # a killed process may need a moment
        processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        return str(tmp_path) not in processes

    wait_until(is_gone, "the end of what it started")


def recording(*launches: str) -> ProgramRecording:
    names = tuple(dict.fromkeys(launches))
    listed = tuple((names.index(n), 1e-3 * i, 5e-4) for i, n in enumerate(launches))
    return ProgramRecording(Device("NVIDIA H200", "cuda", "90"), 1.0, names, listed)


def captured(name: str, source: str) -> CapturedCall:
    x = Argument("x", "tensor", "float32", (1 << 20,), (1,))
    kernel = Kernel(name, extra={"module": "package.module", "qualname": name})
    return CapturedCall(
        name, kernel, (x,), (8,), Config.of({}), Device("NVIDIA H200", "cuda", "90"), source=source
    )


def test_every_kind_of_a_devices_kernels_is_told_apart(tmp_path: Path) -> None:
    """A kernel in a CUDA graph is among the launches, whoever launched it; without a captured call it is left."""
    step = ("mine", "mine", "whole", "triton_poi_fused_0", "gemm")
    found = recording(*(n for _ in range(9) for n in step))
    calls = [captured("mine", "import triton\n"), captured("whole", "")]
    parts = {p.name: p for p in parts_of(found, steps_of(found), calls, tmp_path, PROGRAM)}
    assert {n: p.kind for n, p in parts.items()} == {
        "mine": "triton",
        "whole": "triton",
        "triton_poi_fused_0": "torch.compile",
        "gemm": "library",
    }
    assert [p.name for p in chosen_parts(parts.values(), None)] == ["mine"]
    assert (parts["mine"].calls, round(parts["mine"].share, 2)) == (2.0, 0.4)
    assert 5e-7 < parts["mine"].roofline_s < 5e-6
    assert (tmp_path / "kernel-mine.py").read_text() == "import triton\n"
    assert "no module of its own" in parts["whole"].reason
    ends = {"mine": SearchEnd(1.2, True, source="import triton as t\n")}
    assert "\n-import triton\n+import triton as t" in page(
        Improvement(("x.py",), parts=tuple(parts.values()), searches=ends)
    )


def test_a_file_of_the_current_directory_is_no_module_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("signal.py", "queue.py"):
        (tmp_path / name).write_text("raise RuntimeError\n")
    assert run_command(["--version"]).status == 0


def test_functions_of_one_name_are_parts_of_their_own(tmp_path: Path) -> None:
    x = Argument("x", "tensor", "float32", (64,), (1,))
    y = Argument("y0", "tensor", "float32", (64,), (1,))
    functions = []
    for name, sign in (("__main__", "+"), ("one", "-"), ("other", "*")):
        path = tmp_path / f"{name}.py"
        path.write_text(f"import torch\n\n\ndef f(x):\n    return x {sign} 1.0\n")
        functions.append(TorchFunction(f"{name}:f", str(path), forms=(FunctionCall((x,), (y,)),)))
    found = replace(recording(*([f.name for f in functions] * 9)), functions=tuple(functions), device=None)
    parts = parts_of(found, steps_of(found), [], tmp_path, PROGRAM)
    assert sorted(p.stem for p in parts) == ["f", "one.f", "other.f"]
    texts = [(Path(p.target) / "reference.py").read_text() for p in parts]
    assert sorted(sign for text in texts for sign in "+-*" if f"x {sign} 1.0" in text) == ["*", "+", "-"]
    diff = patch_text({f.name: (f, f"# {f.name}\n") for f in functions}, {}, tmp_path)
    assert all(f"+# {f.name}\n" in diff for f in functions)


@pytest.mark.parametrize(
    ("wrong", "graph", "differs"), [(0.0, False, False), (0.5, False, True), (0.5, True, None)]
)
def test_live_launches_of_a_variant_are_compared_with_the_originals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: float, graph: bool, differs: bool | None
) -> None:
    monkeypatch.setattr(program_recording, "_records_graph", lambda: graph)
    (tmp_path / PLAN_FILE).write_text(json.dumps(RecordingPlan(compare=True).to_json()))
    recorder = ProgramRecorder(tmp_path)
    base = SimpleNamespace(all_kwargs=dict, pre_hook=None)
    function = SimpleNamespace(covers=lambda args, kwargs: True)
    own = SimpleNamespace(__name__="add", run=lambda x, out: out.add_(x))
    tuner = SimpleNamespace(fn=own, configs=[base], arg_names=["x", "out"])
    launch = recorder.compared(lambda tuner, config, args, kwargs: args[1].add_(args[0] + wrong))
    x, out = torch.ones(64), torch.ones(64)
    launch(tuner, SimpleNamespace(function=function, fallback=None), (x, out), {})
    recorder._write(os.getpid())
    ran = ProgramRecording.from_json(json.loads((tmp_path / RECORDING_FILE).read_text()))
    assert (ran.replaced_calls, {n: d > 1.0 for n, d in ran.differences.items()}, out[0].item()) == (
        {"add": 1},
        {} if differs is None else {"add": differs},
        2.5 if graph else 2.0,
    )


@pytest.mark.parametrize(
    ("steps", "unturned", "how"),
    [
        (99, (), r"3 processes, in turns of 5 steps within each"),
        (99, ("good",), r"3 processes each, not .*good is also launched past its tuner"),
        (99, None, r"3 processes each, not .*too few of its launches pass its tuner"),
        (5, (), r"3 processes each, not .*no step repeats"),
        (99, "fails", None),
        (99, "busy", None),
    ],
)
def test_what_is_refused_is_not_served_while_the_program_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, unturned: object, how: str | None
) -> None:
    for name in ("good", "wrong", "unproved"):
        Store(tmp_path).put_variant(
            Variant.of(name, f"{name}-base", f"def {name}(): 0", Provenance(Origin.HAND))
        )
    timed: list[set[str]] = []

    def ran(program: UserProgram, plan: RecordingPlan, *rest: object, variants: bool, **_: object) -> object:
        served = {v.kernel for v in Store(tmp_path).variants()}
        if not plan.compare and variants:
            timed.append(served)
            if unturned == "fails":
                raise CommandError("it fails")
        drift = 1 + 1e-3 * len(timed)
        seconds = 1e-3 if variants else 2e-3
        apart = 3e-2 if unturned == "busy" and variants and len(timed) > 2 else 1e-2
        calls = tuple((0, apart * i, seconds * (drift + 1e-3 * (i % 2))) for i in range(12))
        turned = isinstance(unturned, tuple)
        blocks = tuple(
            TurnBlock(on, s := drift * (4e-3 if on else 6e-3), 100, {"good": s})
            for on in (True, False, False, True) * 5
        )
        assert not plan.block or (plan.marker, plan.block, plan.settling) == ("good", 12, 2)
        return ProgramRecording(
            None,
            1.0,
            ("good",),
            calls,
            differences={"wrong": 9.0},
            replaced_calls=dict.fromkeys(served, 1),
            blocks=blocks if plan.block and turned else (),
            unturned=unturned if turned else (),
        )

    monkeypatch.setattr(proofs, "record", ran)
    names, gains = ["good", "wrong"], {"good": 2.0, "wrong": 1.0}
    request = ProofRequest(
        PROGRAM, RecordingPlan(), {}, names, tmp_path, tmp_path, 4e-3, steps, gains, 1.0, 0.0
    )
    proof = proofs.prove(request, lambda line: None)
    assert set(map(frozenset, timed)) == {frozenset({"good"})}
    assert "differs by 9" in proof.refused["wrong"]
    reason = {"fails": "it fails", "busy": "step was no faster"}.get(str(unturned), "")
    assert (reason in proof.refused.get("good", reason), "good" in proof.parts) == (True, bool(how))
    if how is not None:
        assert re.search(how, proof.how), proof.how
        assert proof.step is not None
        assert (round(proof.step.ratio, 2), proof.step.is_faster) == (
            (0.67, True) if how.startswith("3 processes,") else (1.0, False)
        )


def test_a_kernel_of_another_process_is_named(tmp_path: Path) -> None:
    (part,) = parts_of(
        recording(), steps_of(recording()), [captured("mine", "import triton\n")], tmp_path, PROGRAM
    )
    assert "a process that the program starts" in part.reason


def test_the_next_kernels_get_a_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tuple(
        Part(n, "function", s, 1.0, 1e-3, target="x") for n, s in zip("abc", (0.9, 0.06, 0.04), strict=True)
    )
    given: list[float] = []
    monkeypatch.setattr(
        ImproveSession, "_search", lambda self, part, s, limits: given.append(s) or SearchEnd()
    )
    session = ImproveSession(("x.py",), ImproveSettings("cpu", 400.0, 3), tmp_path, lambda line: None)
    session.search(Improvement(("x.py",), parts=parts))
    assert [round(s, -1) for s in given] == [350, 240, 400]


def test_rank_0_is_recorded_in_place_of_its_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / PLAN_FILE).write_text(json.dumps(RecordingPlan(profile=False).to_json()))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(RANK_FOLDER, "")
    launcher = ProgramRecorder(tmp_path)
    launcher.start()
    started: list[ProgramRecorder] = []
    monkeypatch.setattr(ProgramRecorder, "start", lambda self: started.append(self))
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        record_first_rank()
    (first,) = started
    assert RANK_FOLDER not in os.environ
    first.add_launch("kernel", 0.0, 1.0)
    first._write(os.getpid())
    launcher._write(os.getpid())
    assert json.loads((tmp_path / RECORDING_FILE).read_text())["names"] == ["kernel"]


def test_limits_hold_for_all_searches_together(tmp_path: Path) -> None:
    parts = tuple(Part(n, "function", 0.5, 1.0, 1e-3, target="nowhere") for n in ("a", "b"))
    found = Improvement(("x.py",), parts=parts, searches={"a": SearchEnd(spent={"tokens": 90.0})})
    settings = ImproveSettings("cpu", 900.0, limits={"tokens": 90.0})
    ImproveSession(("x.py",), settings, tmp_path, lambda line: None).search(found)
    assert found.searches["b"].problem == "no tokens are left for it"
