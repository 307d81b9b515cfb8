"""Answers on a user's own sources are kept, and no others; whatever lies in the folder, at worst nothing is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from forecast_harness.clocks.compilation import kept_answers
from forecast_harness.clocks.compilation.kept_answers import KeptAnswers, imports_tools_only
from forecast_harness.sandbox.jobs import Fault, JobResult, JobStatus, SandboxJob, TensorBytes

OWN, OTHER = "import triton\n", "import triton\nx = 1\n"
RESULT = JobResult(
    JobStatus.OK, value=[{"a": 1}], arrays={"code": TensorBytes("uint8", (3,), b"abc")}, seconds=1.5
)


def job(source: str, **payload: object) -> SandboxJob:
    return SandboxJob("some.module:main", payload, {"solution.py": source})


def test_the_same_question_has_the_same_answer_in_another_process(tmp_path: Path) -> None:
    KeptAnswers(tmp_path / "new", [OWN]).put(job(OWN, n=1), RESULT)
    found = KeptAnswers(tmp_path / "new", [OWN]).get(job(OWN, n=1))
    assert found is not None
    assert (found.value, bytes(found.arrays["code"].data)) == ([{"a": 1}], b"abc")
    assert KeptAnswers(tmp_path / "new", [OWN]).get(job(OWN, n=2)) is None


def test_nothing_is_kept_of_other_sources_and_of_failures(tmp_path: Path) -> None:
    kept = KeptAnswers(tmp_path, [OWN])
    kept.put(job(OTHER), RESULT)
    kept.put(job(OWN), JobResult(JobStatus.CANDIDATE_ERROR, Fault.EXCEPTION))
    kept.put(SandboxJob("some.module:main"), RESULT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "own"),
    [
        ("import triton, math\nimport triton.language as tl\nfrom torch import nn\n", True),
        ("def f():\n    import helpers\n", False),
        ("from . import helpers\n", False),
        ("from triton_helpers import f\n", False),
        ("import (\n", False),
    ],
)
def test_what_imports_a_users_module_is_not_kept_as_that_may_change(
    tmp_path: Path, source: str, own: bool
) -> None:
    assert imports_tools_only(source) == own
    kept = KeptAnswers(tmp_path, [source])
    kept.put(job(source), RESULT)
    assert (kept.get(job(source)) is not None) == own


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"value": 1}',
        b'{"value": 1, "arrays": 3}',
        b'{"value": 1, "arrays": {"code": {"dtype": "uint8", "shape": [4], "data": "YWJj"}}}',
        b'{"value": 1, "arrays": {"code": {"dtype": "uint8", "shape": [3], "data": "!"}}}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_answer_is_none_and_is_replaced(tmp_path: Path, damage: bytes) -> None:
    kept = KeptAnswers(tmp_path, [OWN])
    kept.put(job(OWN), RESULT)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    assert kept.get(job(OWN)) is None
    kept.put(job(OWN), RESULT)
    assert kept.get(job(OWN)) is not None


def test_another_toolchain_has_other_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KeptAnswers(tmp_path, [OWN]).put(job(OWN), RESULT)
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    assert KeptAnswers(tmp_path, [OWN]).get(job(OWN)) is None


def test_the_oldest_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "_MOST_FILES", 3)
    kept = KeptAnswers(tmp_path, [OWN])
    for n in range(5):
        kept.put(job(OWN, n=n), RESULT)
    assert len(list(tmp_path.iterdir())) == 3
    assert kept.get(job(OWN, n=4)) is not None


def test_a_folder_that_cannot_be_written_to_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = KeptAnswers(tmp_path / "file" / "folder", [OWN])
    kept.put(job(OWN), RESULT)
    assert kept.get(job(OWN)) is None
