"""A variant is compiled for a device that is not there, in a cell, and Triton finds what came of it in another one."""

from __future__ import annotations

import base64
import json
from contextlib import nullcontext
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from forecast_harness.sandbox.api import (
    CellAnswer,
    JobContext,
    JobResult,
    ResourceLimits,
    SandboxJob,
    SandboxLane,
)
from forecast_harness.sandbox.jobs import TensorBytes
from forecast_harness.trials.variants.compilation import compile_beside
from forecast_harness.trials.variants.compilation.base_binaries import architecture_of, binaries_as_arrays
from forecast_harness.trials.variants.compilation.compile_beside import VariantCompiler
from forecast_harness.trials.variants.launch_file import launcher_files
from tests.harness.compiling_judge import MARK
from tests.harness.variant_kernels import DOUBLE

HOPPER = json.dumps({"hash": "a", "target": {"backend": "cuda", "arch": 90, "warp_size": 32}}).encode()
BINARIES = {"key/double.json": base64.b64encode(HOPPER).decode()}
BROKEN = "raise RuntimeError('it needs its device')\n" + DOUBLE


def call(n: int, block: int) -> dict[str, Any]:
    given = {"_views": {"x": [[n], [1]], "out": [[n], [1]]}, "_grid": [1], "_meta": {"BLOCK": block}}
    kwargs: dict[str, Any] = {name: {"v": value} for name, value in {**given, "_options": {}, "n": n}.items()}
    kwargs |= {name: {"t": name} for name in ("x", "out")}
    return {
        "tensors": {name: ["float32", n, 0] for name in ("x", "out")},
        "call": {"args": [], "kwargs": kwargs},
    }


def compiled(compiling: SandboxLane, source: str, binaries: dict[str, str]) -> JobResult:
    payload = {"calls": [call(64, 32), call(60, 32), call(64, 64)], "binaries": binaries}
    job = SandboxJob(
        "tests.harness.compiling_judge:compile_twice", payload, launcher_files("kernel", source, source)
    )
    return compiling.run(job, ResourceLimits(wall_s=120, cpu_s=120, trusted_s=240))


def test_what_one_cell_compiled_the_other_one_only_reads(compiling: SandboxLane) -> None:
    result = compiled(compiling, DOUBLE, BINARIES)
    assert {PurePath(name).suffix for name in result.value} == {".json", ".cubin"}, result.detail
    assert [bytes(a.data) for a in result.arrays.values()] == [MARK] * 3, "one of each form and config"


@pytest.mark.parametrize("source", [BROKEN, "import os\nos._exit(3)\n"])
def test_a_variant_that_cannot_be_compiled_so_is_left_to_the_cell_that_launches(
    compiling: SandboxLane, source: str
) -> None:
    result = compiled(compiling, source, BINARIES)
    assert (result.value, result.arrays) == ([], {}), result.detail


def test_binaries_tell_what_they_were_compiled_for() -> None:
    other = b'{"child_paths": {}}'
    files = {"key/__grp__double.json": other, "key/odd.json": b"none", "key/double.json": HOPPER}
    assert architecture_of({n: TensorBytes("uint8", (len(d),), d) for n, d in files.items()}) == 90
    assert architecture_of({}) is None


class Cell:
    """Answers whatever it is asked with which calls are late."""

    def __init__(self, late: Any) -> None:
        self._late = late

    def ask(self, entry: str, payload: Any, arrays: Any = None) -> CellAnswer:
        return CellAnswer({"late": self._late}, {"key/double.cubin": TensorBytes("uint8", (1,), b"1")})


def late_of(told: Any) -> Any:
    """What the judge believes of what a variant's cell says of four calls."""
    work = SimpleNamespace(cell=lambda: nullcontext(Cell(told)))
    compiler = VariantCompiler(cast("JobContext", work), binaries_as_arrays(BINARIES))
    found = compiler.compiled([call(64, 32)] * 4)
    assert found.files
    return list(found.late)


def test_what_a_variant_calls_late_is_believed_of_few_calls_and_after_a_long_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert late_of([1]) == [], "nothing took long"
    monkeypatch.setattr(compile_beside, "LEAST_WAIT_S", 0.0)
    assert late_of([1]) == [1]
    assert late_of([3, 1, 3, 17, "2", None]) == [1, 3]
    assert late_of([0, 1, 2]) == []
    assert late_of("0") == late_of(None) == late_of([]) == []
