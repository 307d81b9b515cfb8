"""Programs of a user who has no GPU: each in a process of its own, as Triton reads its variables when imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from forecast_autotune.commands import main

PROGRAM = """
import contextlib, torch, triton, triton.language as tl
from forecast_autotune import autotune
from forecast_integrations.triton.null_device import null_device

@autotune(configs=[triton.Config({{"BLOCK": block}}) for block in {blocks}], key=["n"])
@triton.jit
def fill(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, i, mask=i < n)

with {device}:
    fill[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](torch.empty(100), 100)
print(fill.decision.reason)
"""


def said_by(
    folder: Path,
    code: str,
    *,
    device: str = "contextlib.nullcontext()",
    blocks: object = (64, 128),
    **variables: str,
) -> str:
    """What a program prints, errors included."""
    bare = {k: v for k, v in os.environ.items() if not k.startswith(("FORECAST_AUTOTUNE", "TRITON"))}
    bare |= {"FORECAST_AUTOTUNE_CACHE_DIR": str(folder / "store"), "TRITON_CACHE_DIR": str(folder / "triton")}
    bare["CUDA_VISIBLE_DEVICES"] = ""
    file = folder / "program.py"
    file.write_text(code.format(device=device, blocks=blocks))
    done = subprocess.run(
        [sys.executable, str(file)],
        env=bare | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout + done.stderr


def test_nothing_is_timed_in_the_interpreter_and_every_place_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = said_by(tmp_path, PROGRAM, TRITON_INTERPRET="1")
    assert (
        "not timed: kernels run in Triton's interpreter (TRITON_INTERPRET=1), whose times say nothing" in said
    )
    assert "skip mode" not in said
    assert main(["explain", "fill", "--store", str(tmp_path / "store")]) == 1
    assert "fill ran in Triton's interpreter alone: nothing of it was timed" in capsys.readouterr().err


@pytest.mark.parametrize("blocks", [(64,), (64, 128)])
def test_a_launch_names_what_runs_without_a_gpu(tmp_path: Path, blocks: tuple[int, ...]) -> None:
    *_, error, note = said_by(tmp_path, PROGRAM, blocks=blocks).strip().splitlines()
    assert "0 active drivers" in error
    assert "TRITON_INTERPRET=1" in note
    assert "null_device()" in note


def test_a_wrong_mode_is_warned_of_once(tmp_path: Path) -> None:
    variables = {"FORECAST_AUTOTUNE": "1", "FORECAST_AUTOTUNE_MODE": "tuen"}
    said = said_by(tmp_path, "import torch, triton, forecast_autotune", **variables)
    assert said.count("FORECAST_AUTOTUNE_MODE='tuen'") == 1


def test_tritons_warning_of_its_default_comes_once(tmp_path: Path) -> None:
    """Not once more from each child that compiles or traces."""
    said = said_by(tmp_path, PROGRAM, device="null_device()")
    warned = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
    assert said.count("TRITON_DEFAULT_FP_FUSION is unset") == int(warned)
    assert "measured" in said


def test_a_cache_of_tritons_that_cannot_be_written_has_a_remedy(tmp_path: Path) -> None:
    said = said_by(tmp_path, PROGRAM, device="null_device()", TRITON_CACHE_DIR="/dev/null/cache")
    assert said.strip().splitlines()[-1].startswith("Triton compiles into TRITON_CACHE_DIR, else ~/.triton")
