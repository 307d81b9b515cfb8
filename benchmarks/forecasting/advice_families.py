"""Claim: no family of kernels is decided worse with a language model's advice, beyond noise.

    python -m benchmarks.forecasting.advice_families --out benchmarks/results/advice_families.json

Reads the decisions of `benchmarks/results/advice.json`: of every problem, what the default policy chose and measured
with advice and without it. By family: the mean difference of regret (geometric) and of configs measured, and the
probability of one as bad where advice changes nothing, by random signs of the problems' differences. With as many
families, some look worse by chance: Holm's procedure (1979) keeps the chance of any false alarm at 5 %. Needs no
device.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib.environment import ROOT
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser

DECISIONS = ROOT / "benchmarks" / "results" / "advice.json"
SIGNS = 20_000
LEVEL = 0.05

Floats = npt.NDArray[np.float64]


def family_differences(kernels: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Floats]]:
    """By family: `regret` (natural logarithms of slowdowns) and `measured`, with advice less without, [problems]."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"regret": [], "measured": []})
    for one in kernels:
        family = str(one["steps"][0]["family"])
        without = {r["problem"]: r for r in one["rows"] if r["arm"] == "learned"}
        for row in one["rows"]:
            if row["arm"] != "advice":
                continue
            other = without[row["problem"]]
            regrets = math.log1p(row["regret"]) - math.log1p(other["regret"])
            found[family]["regret"].append(regrets)
            found[family]["measured"].append(row["measured"] - other["measured"])
    return {f: {name: np.array(values) for name, values in given.items()} for f, given in found.items()}


def chance_of_worse(differences: Floats, seed: int = 0) -> float:
    """P(a mean as high or higher), were the sign of every difference as likely to be the other one."""
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), size=(SIGNS, len(differences)))
    means = (signs * differences).mean(axis=1)
    return float((np.sum(means >= differences.mean() - 1e-15) + 1) / (SIGNS + 1))


def rejected(chances: Mapping[str, float]) -> list[str]:
    """Names that Holm's procedure calls worse at `LEVEL`."""
    found: list[str] = []
    for rank, name in enumerate(sorted(chances, key=lambda n: chances[n])):
        if chances[name] > LEVEL / (len(chances) - rank):
            break
        found.append(name)
    return found


def compare_families(kernels: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of every family, and which are worse beyond noise."""
    differences = family_differences(kernels)
    families: dict[str, Any] = {}
    worse: dict[str, list[str]] = {}
    for name in ("regret", "measured"):
        chances = {f: chance_of_worse(given[name]) for f, given in differences.items()}
        worse[name] = rejected(chances)
        for family, given in differences.items():
            shown = families.setdefault(family, {"problems": len(given[name])})
            shown[name] = {
                "difference": round(float(given[name].mean()), 5),
                "chance": round(chances[family], 5),
            }
    unlikely = {n: sum(f[n]["chance"] < LEVEL for f in families.values()) for n in ("regret", "measured")}
    return {"families": families, "worse": worse, "below_level_alone": unlikely}


def run(a: Namespace) -> dict[str, Any]:
    """Compare; returns the summary, after writing it."""
    kernels = json.loads(DECISIONS.read_text(encoding="utf-8"))["raw"]["kernels"]
    summary = compare_families(kernels)
    ResultFile(a, "advice_families", 0).finish(summary)
    return summary


def main() -> int:
    run(parse_arguments(parser(__doc__), on_host=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
