"""Whether a family is worse with advice: found where it is, and not made up where it is not."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.forecasting.advice_families import compare_families


def kernel(family: str, pairs: list[tuple[float, float]], extra: float = 0.0) -> dict[str, Any]:
    """A kernel whose problems have regrets (without advice, with it), and `extra` measurements with it."""
    rows = []
    for n, (without, given) in enumerate(pairs):
        rows.append({"problem": f"{family}/{n}", "arm": "learned", "regret": without, "measured": 8})
        rows.append({"problem": f"{family}/{n}", "arm": "advice", "regret": given, "measured": 8 + extra})
        rows.append({"problem": f"{family}/{n}", "arm": "advice-1", "regret": 9.0, "measured": 99})
    return {"rows": rows, "steps": [{"family": family}]}


def noise(count: int, seed: int) -> list[tuple[float, float]]:
    drawn = np.random.default_rng(seed).uniform(0.0, 0.05, size=(count, 2))
    return [(float(a), float(b)) for a, b in drawn]


def test_a_family_that_is_worse_everywhere_is_named() -> None:
    kernels = [kernel(f"fine{n}", noise(30, n)) for n in range(20)]
    kernels.append(kernel("spoilt", [(a, a + 0.02) for a, _ in noise(30, 99)], extra=3))
    found = compare_families(kernels)
    assert found["worse"] == {"regret": ["spoilt"], "measured": ["spoilt"]}
    assert found["families"]["spoilt"]["measured"]["difference"] == 3


def test_equal_and_better_decisions_are_not_worse() -> None:
    kernels = [
        kernel("equal", [(0.01, 0.01)] * 30),
        kernel("better", [(0.03, 0.0)] * 30, extra=-2),
        kernel("one", [(0.0, 0.5)]),  # a single problem proves nothing
    ]
    found = compare_families(kernels)
    assert found["worse"] == {"regret": [], "measured": []}
    assert found["families"]["equal"]["regret"] == {"difference": 0.0, "chance": 1.0}
    assert found["families"]["one"]["regret"]["chance"] > 0.3
