"""Binaries of the base kernel that one cell compiled are found by Triton in another one's cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import cast

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl

from forecast_harness.sandbox.api import ContainmentLevel, ResourceLimits, SandboxJob, SandboxLane
from forecast_harness.sandbox.jobs import Fault, JobResult, JobStatus, TensorBytes
from forecast_harness.targets.kernels.base_kernel import KernelSurvey
from forecast_harness.trials.variants.compilation.base_binaries import (
    BaseBinaries,
    binaries_as_arrays,
    launchers_among,
    read_cache,
    write_cache,
)
from forecast_harness.trials.variants.verify import verify_variant
from tests.harness.variant_kernels import CONFIGS, DOUBLE, subject, variant, vector_call


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


def compiled(monkeypatch: pytest.MonkeyPatch, cache: Path) -> object:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    forms = {"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    return triton.compile(ASTSource(double, forms, {"BLOCK": 64}), target=GPUTarget("cuda", 90, 32))


def test_what_one_cell_compiled_another_one_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    made = compiled(monkeypatch, first)
    known = BaseBinaries()
    known.take(read_cache({}, {}, {}).arrays)
    assert {Path(name).suffix for name in known.files} == {".json", ".cubin"}, "what a launch needs"
    shutil.rmtree(first)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(second))
    told = json.loads(json.dumps(known.to_payload()))
    write_cache({}, binaries_as_arrays(told), {})
    before = {p: p.stat().st_mtime_ns for p in second.rglob("*")}
    found = compiled(monkeypatch, second)
    assert found.asm["cubin"] == made.asm["cubin"]  # type: ignore[attr-defined]
    assert {p: p.stat().st_mtime_ns for p in second.rglob("*")} == before, "nothing was compiled"


def test_a_cache_without_binaries_gives_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / "__grp__bad.json").write_text("not json")
    (tmp_path / "key" / "__grp__far.json").write_text(json.dumps({"child_paths": {"../far.cubin": "x"}}))
    assert read_cache({}, {}, {}).arrays == {}


def test_launchers_are_kept_and_are_all_that_a_variant_may_see(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled(monkeypatch, tmp_path)
    for folder, name in (("ab", "__triton_launcher.so"), ("cd", "cuda_utils.so")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(b"module")
    known = BaseBinaries()
    known.take(read_cache({}, {}, {}).arrays)
    kept = binaries_as_arrays(known.to_payload())
    assert {Path(name).suffix for name in kept} == {".json", ".cubin", ".so"}
    assert {name: bytes(a.data) for name, a in launchers_among(kept).items()} == {
        "ab/__triton_launcher.so": b"module"
    }


def test_later_verifications_are_given_what_earlier_ones_compiled() -> None:
    class Lane:
        level = ContainmentLevel.PROCESS

        def __init__(self) -> None:
            self.given: list[dict[str, str]] = []

        def run(self, job: SandboxJob, limits: ResourceLimits) -> JobResult:
            self.given.append(dict(job.payload["binaries"]))
            value = {"reasons": [], "trials": 1, "unable": [], "facts": {}}
            name = f"key{len(self.given)}/double.cubin"
            arrays = {name: TensorBytes("uint8", (2,), b"ab")}
            return JobResult(JobStatus.OK, Fault.NONE, value, arrays, 0.0, "", "", "", "")

    asked, lane, known = subject(DOUBLE, vector_call()), Lane(), BaseBinaries({"key0/double.cubin": b"ab"})
    found = KernelSurvey(("out",), (), CONFIGS[0], True, signature="{}")
    for _ in range(2):
        verify_variant(variant(DOUBLE), asked, found, cast("SandboxLane", lane), device="cpu", binaries=known)
    assert [sorted(given) for given in lane.given] == [
        ["key0/double.cubin"],
        ["key0/double.cubin", "key1/double.cubin"],
    ]


def test_more_than_a_verification_should_be_told_is_not_kept() -> None:
    known = BaseBinaries()
    data = bytes(20 << 20)
    for name in ("key1/double.cubin", "key2/double.cubin"):
        known.take({name: TensorBytes("uint8", (len(data),), data)})
    assert list(known.files) == ["key1/double.cubin"]
