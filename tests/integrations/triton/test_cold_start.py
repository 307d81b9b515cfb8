"""Two programs on the null device: recorded, warmed from the record alone, and compiling nothing then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from forecast_integrations.triton.problem.compilations import CompilationRecorder

_KERNELS = """
import triton
import triton.language as tl
"""
_PLAIN = """
@triton.jit
def plain{number}(x, out, n, m, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + at, tl.load(x + at, mask=at < n) * m + {number}.0, mask=at < n)
"""
_TUNED = """
@triton.autotune(configs=[triton.Config({{"B": 64}}, num_warps=w) for w in (1, 2)], key=["n"])
@triton.jit
def tuned{number}(x, out, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + at, tl.load(x + at, mask=at < n) + {number}.0, mask=at < n)
"""
_PROGRAM = """
import json
import sys

import torch

from forecast_autotune import patch_triton, ready
from forecast_integrations.triton.null_device import null_device
from forecast_integrations.triton.problem.compilations import RECORDER

compiled = []
with null_device():
    patch_triton()
    from triton import knobs

    ours = knobs.compilation.listener

    def listen(**told):
        compiled.append((told["src"].name, told["cache_hit"]))
        ours(**told)

    knobs.compilation.listener = listen
    import {kernels} as kernels

    for n in {sizes}:
        if n == 0:
            ready()
            continue
        x = torch.zeros(256)
        for number in range({plain}):
            getattr(kernels, f"plain{{number}}")[(1,)](x, x, n, 3, B=64)
        for number in range({tuned}):
            getattr(kernels, f"tuned{{number}}")[(1,)](x, x, n)
late = [[one.name, one.cause, one.caller] for one in RECORDER.late]
print(json.dumps({{"fresh": [name for name, hit in compiled if not hit], "all": len(compiled), "late": late}}))
"""


COMMAND = ("-m", "forecast_autotune")


class Programs:
    """Programs in a folder, with a store and a cache of Triton's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, plain: int, tuned: int, sizes: tuple[int, ...]) -> None:
        """Write a program and its kernels; 0 among the sizes is where it is ready."""
        texts = [_PLAIN.format(number=n) for n in range(plain)] + [
            _TUNED.format(number=n) for n in range(tuned)
        ]
        (self.folder / f"{name}_kernels.py").write_text(_KERNELS + "\n".join(texts))
        text = _PROGRAM.format(kernels=f"{name}_kernels", sizes=sizes, plain=plain, tuned=tuned)
        (self.folder / f"{name}.py").write_text(text)

    def run(self, *command: str, code: int = 0, output: bool = False, **variables: str) -> str:
        """Run Python; what it prints, or its errors where it fails."""
        env = {
            **os.environ,
            "FORECAST_AUTOTUNE_CACHE_DIR": str(self.folder / "store"),
            "TRITON_CACHE_DIR": str(self.folder / "cache"),
            "TRITON_DEFAULT_FP_FUSION": "1",
            **variables,
        }
        done = subprocess.run(
            [sys.executable, *command], cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if output or code == 0 else done.stderr

    def result(self, name: str, **variables: str) -> dict[str, Any]:
        """Run a program; what it compiled."""
        result: dict[str, Any] = json.loads(self.run(f"{name}.py", **variables).splitlines()[-1])
        return result

    def warm(self, *options: str) -> dict[str, Any]:
        """Run the command; its report."""
        text = self.run(*COMMAND, "warm", "--json", *options)
        result: dict[str, Any] = json.loads(text)
        return result

    def forget_binaries(self) -> None:
        """Leave Triton's cache behind."""
        (self.folder / "cache").rename(self.folder / f"cache{len(list(self.folder.iterdir()))}")


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


def test_a_warmed_program_compiles_nothing(programs: Programs) -> None:
    programs.write("varying", 4, 2, (64, 65))
    assert len(programs.result("varying")["fresh"]) >= 6
    programs.forget_binaries()
    report = programs.warm()
    assert not any("trouble" in one for one in report["compilations"])
    assert programs.result("varying")["fresh"] == []
    # Each a second time: they are there.
    assert all(one["cached"] for one in programs.warm()["compilations"])


def test_specializations_that_are_still_to_come_are_forecast_and_compiled(programs: Programs) -> None:
    programs.write("varying", 2, 1, (64, 65))
    programs.result("varying")
    programs.forget_binaries()
    planned = programs.warm("--plan")["compilations"]
    forecast = [one for one in planned if one["probability"] < 1]
    assert {(one["kernel"], one["states"]["n"]) for one in forecast} == {
        ("varying_kernels:plain0", "1"),
        ("varying_kernels:plain1", "1"),
        ("varying_kernels:tuned0", "1"),
    }
    assert all(one["states"].get("m", "neither") == "neither" for one in forecast), "it never changed"
    programs.warm()
    programs.write("varying", 2, 0, (64, 1, 65))
    assert programs.result("varying")["fresh"] == []


def test_a_compilation_of_a_ready_program_is_recorded_with_its_cause(programs: Programs) -> None:
    programs.write("late", 1, 0, (64, 0, 1))
    late = programs.result("late")["late"]
    assert [(name, cause) for name, cause, _ in late] == [
        ("late_kernels:plain0", "n was 1 for the first time")
    ]
    assert late[0][2].startswith(str(programs.folder / "late.py"))
    shown = programs.run(*COMMAND, "show", "--compilations")
    assert "2 binaries, 1 of them compiled after a program was ready" in shown
    programs.forget_binaries()
    programs.warm()
    assert programs.result("late", FORECAST_AUTOTUNE_ON_COMPILE="error")["late"] == []
    programs.forget_binaries()
    text = programs.run("late.py", code=1, FORECAST_AUTOTUNE_ON_COMPILE="error")
    assert "UnexpectedCompilationError: late_kernels:plain0 was compiled" in text


def test_a_compilation_that_cannot_be_described_reaches_whoever_listened_before() -> None:
    told: list[dict[str, Any]] = []
    recorder = CompilationRecorder()
    recorder._previous = lambda **compilation: told.append(compilation)
    recorder._hear(src=object(), metadata={}, cache_hit=False)
    assert len(told) == 1


def test_what_cannot_be_compiled_again_is_named(programs: Programs) -> None:
    programs.write("gone", 2, 0, (64,))
    programs.result("gone")
    file = programs.folder / "store" / "compilations.jsonl"
    file.write_text(file.read_text() + '{"type": "compilation", "torn\n')
    kernels = programs.folder / "gone_kernels.py"
    kernels.write_text(kernels.read_text().replace("+ 1.0", "+ 2.0"))
    report = json.loads(programs.run(*COMMAND, "warm", "--json", code=1, output=True))
    troubles = {one["kernel"]: one.get("trouble", "") for one in report["compilations"]}
    assert troubles == {"gone_kernels:plain0": "", "gone_kernels:plain1": "its source has changed"}
