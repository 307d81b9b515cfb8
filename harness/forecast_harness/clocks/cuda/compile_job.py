"""The job of a compile worker for CUDA C++: one cell without a device, in which nvcc reads the source.

No code of the source runs; a source that takes over the compiler has a cell and nothing more.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forecast_harness.sandbox.cell_process import FILES_FOLDER
from forecast_harness.sandbox.jobs import CellAnswer, TensorBytes
from forecast_harness.sandbox.judge_process import JobContext

SOURCE_NAME = "solution.cu"
COMPILE_S = 40.0
_MOST_MESSAGE_BYTES = 1 << 16
_PROGRAMS = "/usr/local/bin:/usr/bin:/bin"


def main(work: JobContext) -> CellAnswer:
    """The payload is what `run_nvcc` takes; the answer is its own."""
    with work.cell() as cell:
        answer = cell.ask(f"{__name__}:run_nvcc", work.payload)
    return CellAnswer(answer.value, answer.arrays)


def run_nvcc(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Compile for `arch` (such as `sm_90a`) by `nvcc`, with `macros` defined.

    The value has `said`, what the compiler wrote, and `ended`: its exit status, or None where it was still at it
    after `COMPILE_S` seconds. The array `cubin` is there where it succeeded.
    """
    cubin, messages = Path("solution.cubin").absolute(), Path("messages.txt").absolute()
    macros = [f"-D{name}={value}" for name, value in payload["macros"].items()]
    command = [payload["nvcc"], "-cubin", f"-arch={payload['arch']}", "-std=c++17", "-O3", "-w", *macros]
    command += ["-o", str(cubin), SOURCE_NAME]
    environment = {"PATH": f"{Path(payload['nvcc']).parent}:{_PROGRAMS}", "LC_ALL": "C"}
    environment |= {"TMPDIR": os.environ["TMPDIR"], "HOME": os.environ["HOME"]}
    ended: int | None = None
    with messages.open("wb") as stream:
        child = subprocess.Popen(
            command, cwd=FILES_FOLDER, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
        )
        try:
            ended = child.wait(COMPILE_S)
        except subprocess.TimeoutExpired:  # what is left of it ends with the cell
            child.kill()
    with messages.open("rb") as stream:
        said = stream.read(_MOST_MESSAGE_BYTES).decode(errors="replace")
    if ended != 0 or not cubin.is_file():
        return CellAnswer({"said": said, "ended": ended})
    image = cubin.read_bytes()
    return CellAnswer({"said": "", "ended": 0}, {"cubin": TensorBytes("uint8", (len(image),), image)})
