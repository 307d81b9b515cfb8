"""`improve` as a user meets it: one command from a program to a source that holds in it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forecast_autotune.commands import main
from forecast_autotune.errors import RecordError
from forecast_autotune.records import Argument, Outcome
from forecast_autotune.records.program import (
    PLAN_FILE,
    FunctionCall,
    ProgramRecording,
    RecordingPlan,
    TorchFunction,
)
from forecast_harness.improve.page import rows
from forecast_harness.improve.parts import Part
from forecast_harness.improve.patch import patch_text
from forecast_harness.improve.session import Improvement
from forecast_harness.improve.steps import launch_period, steps_of
from forecast_harness.records import NodeResult
from forecast_harness.targets.program_functions import faster_module, function_pack
from forecast_harness.trials.verdict import call_facts
from forecast_integrations.triton.program_recording import ProgramRecorder
from tests.core.captured_output import Capture

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "improve"
PAGE = ROOT / "docs" / "tutorials" / "improve_a_program.md"


def improve(folder: Path, *words: str) -> tuple[int, str, str]:
    """Status, stdout and stderr."""
    command = [sys.executable, "-m", "forecast_autotune", "improve", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=folder)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_the_tutorial_ends_with_a_faster_source_that_holds_in_the_program(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "work")
    folder = tmp_path / "work"
    match = re.search(r"forecast-autotune improve (.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert match is not None
    status, output, errors = improve(folder, "--json", *shlex.split(match[1].replace("\\\n", " ")))
    assert status == 0, errors
    told = json.loads(output)
    parts = {p["name"]: p for p in told["parts"]}
    assert parts["double"]["reason"].startswith("it is not timed")
    assert told["held"] == ["__main__:norms"], (told, errors)
    assert told["proof"]["step"]["ratio"] < 1.0
    assert (folder / "program.py").read_text() == (EXAMPLE / "program.py").read_text()
    assert "norms" in (folder / "improve-program" / "improve.html").read_text()
    subprocess.run(["patch", "-p1", "-i", "faster.diff"], cwd=folder, check=True, capture_output=True)
    assert "_norms_original" in (folder / "program.py").read_text()
    ran = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    # What is proved is not proved again, and what is known needs no run.
    words = ["--json", "--device", "cpu", "--resume", "--out", "improve-program", "program.py"]
    status, output, errors = improve(folder, *words)
    assert (status, json.loads(output)["held"], "recording" in errors) == (0, told["held"], False)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("# --check\ndef fn(): 0\n", "--check __main__:fn: the program calls no such function"),
        ("import torch\nprint(torch.ones(2).sum())\n", "no function of its own"),
        ("raise SystemExit('no data')\n", "the program fails, with exit status 1: no data"),
        ("import os\nos.kill(os.getpid(), 9)\n", "the program fails, by signal 9: it says nothing"),
        ("import os\nos._exit(0)\n", "left no recording: it ends by os._exit"),
    ],
)
def test_a_program_with_nothing_to_improve_is_one_line(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(source)
    options = ["--check", "__main__:fn"] if "--check" in source else []
    status = main(["improve", "--device", "cpu", *options, "program.py"])
    assert said in " ".join("".join(capsys.readouterr()).split())
    # What never began is not in the way of the next run.
    assert (tmp_path / "improve-program").exists() == (status == 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "improve needs a program"),
        (("nowhere.py",), "can't open file 'nowhere.py'"),
        (("--from-run", "nowhere"), "no folder of `improve`"),
        (("--patch", "nowhere/x.diff", os.__file__), "there is no directory nowhere"),
        (("--proposer", "recorded:nowhere", os.__file__), "recorded nowhere: there is no such folder"),
        (("--proposer", "mine", os.__file__), "a proposer is given as mechanical, recorded:FOLDER"),
        (("RANK", os.__file__), "cannot be a rank of a job: give it the launcher"),
    ],
)
def test_mistakes_are_named(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if "RANK" in words:
        monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["improve", *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("numbers", "period"),
    [
        ([9, 8, *[0, 1, 1, 2] * 6], 4),
        ([0] * 30, 1),
        ([*[0, 1, 2, 3, 4, 5, 6, 7] * 4, *[8] * 4], 0),  # a loop at the end is no step
        (list(range(20)), 0),
        ([], 0),
    ],
)
def test_a_step_is_the_period_of_the_launches(numbers: list[int], period: int) -> None:
    assert launch_period(numbers)[0] == period


def test_a_long_step_in_between_is_not_their_time() -> None:
    starts = [0.0, 1.0, 2.0, 13.0, *(float(n) for n in range(14, 20))]
    recording = ProgramRecording(names=("k",), launches=tuple((0, s, 0.1) for s in starts))
    assert steps_of(recording).seconds == 1.0


def tensor(name: str, *shape: int) -> Argument:
    return Argument(name, "tensor", "float32", shape, extra={"least": -1.0, "most": 1.0})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch\nSCALE = torch.rand(1).item()\ndef f(x):\n    return x * SCALE\n", "computed when"),
        ("import torch\nimport helpers\ndef f(x):\n    return helpers.g(x)\n", "only the program can import"),
        ("import functools\n@functools.cache\ndef f(x):\n    return x\n", "has decorators"),
        ("def f(x):\n    return missing(x)\n", "needs missing"),
    ],
)
def test_a_function_that_cannot_be_isolated_says_why(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "helpers.py").write_text("def g(x):\n    return x\n")
    path = tmp_path / "module.py"
    path.write_text(text)
    call = FunctionCall((tensor("x", 4),), (tensor("y0", 4),))
    with pytest.raises(RecordError, match=said):
        function_pack(TorchFunction("module:f", str(path), forms=(call,)))


def test_sizes_that_vary_between_calls_become_axes(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("import torch\nHALF = 0.5\ndef f(x, w):\n    return (x * w * HALF).sum(-1)\n")
    calls = [FunctionCall((tensor("x", n, 64), tensor("w", 64)), (tensor("y0", n),)) for n in (32, 48)]
    pack = function_pack(TorchFunction("module:f", str(path), forms=tuple(calls)))
    (axis,) = pack.definition.axes.values()
    assert (axis.low, axis.high, axis.multiple) == (32, 48, 16)
    assert [dict(w.axes) for w in pack.workloads] == [{"N0": 32}, {"N0": 48}]
    assert "HALF = 0.5" in pack.solutions[0].source


def test_a_source_is_served_at_the_calls_alone_at_which_it_is_faster(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("def f(x, most=9.0):\n    return x + 1\n")
    most = Argument("most", "scalar", "float", value=9.0)
    forms = tuple(FunctionCall((tensor("x", n), most), (tensor("y0", n),)) for n in (32, 40, 48))
    function = TorchFunction("module:f", str(tmp_path / "module.py"), forms=forms)
    each = {"call-1": (-0.5, 0.01), "call-2": (0.3, 0.01), "call-3": (0.025, 0.01)}
    judged = NodeResult(Outcome.OK, log2_ratio=-0.2, facts=call_facts(each))
    assert judged.other_calls_text == "slower at some calls, use it at the others alone: call-2 (0.81 times)"
    assert call_facts({**each, "call-2": (0.0, 0.0)})["slower_at"] == []
    source = (
        "import torch\ndef f(x):\n    return x + 2\n\n@torch.inference_mode()\ndef run(x):\n    return f(x)\n"
    )
    replacement = faster_module(function, source, judged.faster_at)
    (tmp_path / PLAN_FILE).write_text(json.dumps(RecordingPlan().to_json()))
    recorder = ProgramRecorder(tmp_path)
    served = recorder._replacement_wrapper("module:f", lambda x, most=9.0: x + 1, replacement)
    text = patch_text({"module:f": (function, replacement)}, {}, tmp_path)
    module = text.partition("+++ b/f_faster.py\n")[2].partition("\n--- ")[0]
    assert (
        "\n".join(line[1:] for line in module.splitlines()[1:]) + "\n" == replacement
    )  # what is proved is left
    assert "return f_faster.run(x=x)\n" in text
    for size, added in ((32, 2), (40, 1), (44, 1), (48, 2)):
        assert int(served(torch.zeros(size))[0]) == added
    assert not served(torch.zeros(32)).is_inference()
    assert int(served(torch.zeros(32), 1.0)[0]) == int(served(torch.zeros(32), torch.zeros(2))[0]) == 1


def test_many_small_kernels_of_libraries_take_one_row_with_short_names() -> None:
    reason = "no source can be had for it"
    long = (
        "void at::native::reduce_kernel<512, at::native::(anonymous namespace)::Op<float> >(at::native::Op)"
    )
    parts = [
        Part(long, "library", 0.5, 1.0, 1e-3, reason=reason),
        Part("fn", "triton", 0.3, 1.0, 1e-3, target="x"),
    ]
    parts += [Part(f"k{n}", "library", 0.01, 1.0, 1e-5, reason=reason) for n in range(20)]
    first, second, last = rows(Improvement(("x.py",), parts=tuple(parts)))
    assert (first[0], second[0]) == ("reduce_kernel", "fn")
    assert last[:3] == ("20 others", "library", "20.0%")


TUNED = """'''Kernels.'''
import triton
import triton.language as tl


@triton.autotune(
    [triton.Config({"BLOCK": 64})],
    key=["n"],
)
@triton.jit
def fn(x, n, BLOCK: tl.constexpr):
    pass


@triton.jit
def plain(x):
    pass
"""


def test_the_patch_has_a_kernels_tuner_take_verified_variants(tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(TUNED)
    text = patch_text({}, {"fn": str(path), "plain": str(path)}, tmp_path)
    changed = [line for line in text.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert changed == [
        "+from forecast_autotune import forecast_autotune",
        "-@triton.autotune(",
        "+@forecast_autotune(",
        '-    key=["n"],',
        '+    key=["n"], variants="store",',
    ]
