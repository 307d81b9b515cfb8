"""The zoo: what it fetches, how it counts, and that both arms of a run see the same tests."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.zoo.packages import Package, fetch, unpack
from benchmarks.zoo.own_tests import Zoo, summarize

KERNEL = """
import pytest, torch, triton
import triton.language as tl

@triton.autotune([triton.Config({"BLOCK": b}) for b in (64, 128)], key=["n"])
@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)

@pytest.mark.parametrize("n", [100, 200])
def test_double(n):
    x = torch.ones(n, device="cuda")
    assert x.is_cuda and x.device.type == "cuda" and torch.cuda.is_available()
    double[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, torch.empty_like(x), n)

def test_wrong():
    double[(1,)](torch.ones(1, device="cuda"), 5)

def test_rich():
    for n in (300, 400, 500, 600, 700):
        test_double(n)
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A package of a repository that is a folder here."""
    folder = tmp_path / "host" / "owner" / "name"
    (folder / "tests" / "data").mkdir(parents=True)
    (folder / "tests" / "test_double.py").write_text(KERNEL, encoding="utf-8")
    (folder / "tests" / "data" / "large").write_text("left out", encoding="utf-8")
    (folder / "readme").write_text("left out", encoding="utf-8")
    git = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    for name in ("allowAnySHA1InWant", "allowFilter"):
        subprocess.run([*git, "config", f"uploadpack.{name}", "true"], check=True)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{tmp_path}/host/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")
    return Package(
        "scattermoe",
        "owner/name",
        commit.strip(),
        ("tests/**", "-tests/data/**"),
        (".",),
        ("tests/test_*.py",),
    )


@pytest.mark.slow
def test_both_arms_run_the_same_tests_and_make_the_same_calls(
    source: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack(fetch(tmp_path / "to", [source]), tmp_path / "top")
    arguments = argparse.Namespace(seed=0, seconds=60.0, limit=600.0, null=True, logs=tmp_path / "logs")
    put: dict[str, Any] = {}
    zoo = Zoo(arguments, tmp_path / "top", argparse.Namespace(put=put.__setitem__))  # type: ignore[arg-type]
    zoo.run([source])
    summary = summarize(zoo.lines["scattermoe"])
    logs = "\n".join(p.read_text(encoding="utf-8") for p in (tmp_path / "logs").iterdir())
    assert (summary["tests"], summary["passed_plain"], summary["passed_ours"]) == (4, 3, 3), logs
    assert put["scattermoe"][0]["test"].endswith("test_rich")
    assert summary["tests_of_5_keys"] == 1
    assert summary["lost"] == summary["unlike"] == []
    assert (summary["calls"], summary["keys"]) == (8, 8)
    wrong = next(row for row in put["scattermoe"] if row["test"].endswith("test_wrong"))
    assert wrong["plain"]["exception"] == wrong["ours"]["exception"]
    assert "TypeError" in wrong["ours"]["exception"]


def line(outcome: str, **more: Any) -> dict[str, Any]:
    """One line of a test."""
    return {
        "outcome": outcome,
        "seconds": 1.0,
        "keys": 5,
        "calls": 1,
        "calls_sha256": "a",
        "exception": None,
        **more,
    }


def test_a_test_is_lost_if_it_fails_again() -> None:
    rows = {
        "lost": {"plain": line("passed", again=line("passed")), "ours": line("failed", again=line("failed"))},
        "died": {
            "plain": line("passed", again=line("passed")),
            "ours": line("died", again=line("died"), seconds=0.0),
        },
        "flaky": {
            "plain": line("passed", again=line("passed")),
            "ours": line("failed", again=line("passed")),
        },
        "flaky without us": {
            "plain": line("passed", again=line("failed")),
            "ours": line("failed", again=line("failed")),
        },
        "gained": {"plain": line("failed"), "ours": line("passed")},
        "not reached": {"plain": line("passed"), "ours": None},
        "unlike": {"plain": line("passed"), "ours": line("passed", calls_sha256="b")},
        "random": {
            "plain": line("passed", again=line("passed", calls_sha256="c")),
            "ours": line("passed", calls_sha256="b", again=line("passed", calls_sha256="b")),
        },
        "other error": {"plain": line("failed", exception="A: x"), "ours": line("failed", exception="B: x")},
    }
    summary = summarize(rows)
    assert (summary["lost"], summary["gained"]) == (["lost", "died"], ["gained"])
    assert summary["unlike"] == ["unlike", "other error"]
    assert (summary["tests"], summary["unfinished"], summary["tests_of_5_keys"]) == (9, 2, 9)
    assert (summary["seconds_plain"], summary["seconds_ours"]) == (7.0, 7.0)
