"""Every figure of README and docs is one that a claim displays, and every claim is computed from a result."""

from __future__ import annotations

from pathlib import Path

from benchmarks.claims.check import check_all

ROOT = Path(__file__).parents[2]


def test_claims_results_and_pages_agree() -> None:
    problems = check_all(ROOT)
    assert not problems, "\n".join([*problems, "see the head of benchmarks/claims.toml"])
