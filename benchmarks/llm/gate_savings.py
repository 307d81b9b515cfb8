"""Claim: asking a language model never makes a decision worse, and a good one saves measurements.

    python -m benchmarks.llm.gate_savings --out benchmarks/results/llm_gate_cpu.json \
        [--answers NAME=FILE.jsonl ...] [--seeds 3]

Replays of the shipped tables with the default surrogate, fitted without the family at hand, alone and with a
model beside it; calibrations are fitted to the other families as well. The models:

- `NAME`: what a real model said, as `zero_shot_models.py` kept it, with the gate as it ships;
- `oracle E`: knows the truth with errors of E (log2), and says how sure it is. `always_ask` asks it everywhere,
  to see what its answers are worth; `gate` goes by what `calibrate-llm` would have found out of that;
- `liar`: an oracle of error 0.1 when it was calibrated, which says the opposite ever since;
- `blind`: likewise, which says the same of every candidate ever since.

Reported per arm and per family: regret with the model less that without (also of what exceeds the accepted
tolerance alone), measurements, wall seconds
(simulated compilation on 16 cores, the model's own seconds on top, as if nothing went on beside it), and
standard errors over families; within a family over its problems and seeds. Models are taken for loaded, and
read `--tokens-per-s`, unless they are real.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.result_files import ResultFile, say
from forecast_autotune.llm.calibration import LLMCalibration
from forecast_autotune.llm.gate import decide_asking
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.learned import LearnedSurrogate
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.evaluation.oracle_backend import OracleBackend
from forecast_train.llm.calibration.answer_collection import ModelAnswers, collect_answers
from forecast_train.llm.calibration.calibrate import fit_calibration
from forecast_train.llm.calibration.saving_estimate import (
    PairedReplay,
    SavingEstimate,
    always_ask,
    estimate_saving,
    replay_pairs,
)
from forecast_train.surrogate.fit import fit

ERRORS = (0.05, 0.2, 0.5, 1.0)
"""Of the oracles, log2: 3.5 %, 15 %, 41 % and a factor of two."""


def options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--answers", action="append", default=[], metavar="NAME=FILE")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--tokens-per-s", type=float, default=2e5)
    return made.parse_args()


def read_answers(path: Path) -> list[ModelAnswers]:
    """What `zero_shot_models.py` kept."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [ModelAnswers.from_json({k: v for k, v in row.items() if k != "asked"}) for row in rows]


def differences_by_family(played: Sequence[PairedReplay]) -> dict[str, dict[str, float]]:
    """Mean differences of each family, with the standard error over its problems and seeds."""
    found = {}
    for name in sorted({p.family for p in played}):
        rows = [p for p in played if p.family == name]
        regret = np.array([math.log1p(p.regret) - math.log1p(p.plain_regret) for p in rows])
        # What is within the accepted tolerance was accepted.
        beyond = np.array(
            [math.log1p(max(p.regret, TOLERANCE)) - math.log1p(max(p.plain_regret, TOLERANCE)) for p in rows]
        )
        wall = np.array([p.wall_s - p.plain_wall_s for p in rows])
        found[name] = {
            "regret": float(regret.mean()),
            "regret_beyond_tolerance": float(beyond.mean()),
            "regret_beyond_tolerance_error": float(beyond.std(ddof=1) / math.sqrt(len(rows))),
            "regret_error": float(regret.std(ddof=1) / math.sqrt(len(rows))),
            "wall_s": float(wall.mean()),
            "wall_s_error": float(wall.std(ddof=1) / math.sqrt(len(rows))),
            "measured": float(np.mean([p.measured - p.plain_measured for p in rows])),
            "asked": float(np.mean([p.asked for p in rows])),
        }
    return found


def arm_figures(played: Sequence[PairedReplay]) -> dict[str, Any]:
    """The figures of one arm."""
    wall, plain = (float(np.mean([getattr(p, n) for p in played])) for n in ("wall_s", "plain_wall_s"))
    families = differences_by_family(played)
    worse = [
        name
        for name, f in families.items()
        if f["regret_beyond_tolerance"] > 2 * f["regret_beyond_tolerance_error"] + 1e-9
        or f["wall_s"] > 2 * f["wall_s_error"] + OVERHEAD_S
    ]
    return {
        **estimate_saving(played).to_json(),
        "asked": float(np.mean([p.asked for p in played])),
        "wall_s": wall,
        "plain_wall_s": plain,
        "families": families,
        "families_worse_beyond_two_standard_errors": worse,
    }


@lru_cache(maxsize=64)
def _fit_cached(ids: frozenset[str]) -> LearnedSurrogate:
    return fit([t for t in TABLES if t.problem.id in ids])


def fit_surrogate(train: Sequence[Table]) -> LearnedSurrogate:
    """`fit`, once per training side."""
    return _fit_cached(frozenset(t.problem.id for t in train))


TABLES = load(shipped_tables())
TOLERANCE = Settings().tolerance
OVERHEAD_S = 0.1
"""Wall seconds of our own arithmetic that a busy machine may take longer from one run to the next."""


def main() -> None:
    given = options()
    named = argparse.Namespace(**{**vars(given), "answers": [t.split("=", 1)[0] for t in given.answers]})
    report = ResultFile(named, "llm_gate")
    seeds = range(given.seeds)
    summary: dict[str, Any] = {"problems": len(TABLES), "seeds": given.seeds}

    def arm(name: str, heard: Sequence[ModelAnswers], **how: Any) -> SavingEstimate:
        played = replay_pairs(TABLES, heard, learn=fit_surrogate, seeds=seeds, **how)
        summary[name] = arm_figures(played)
        report.add(name, [asdict(p) for p in played])
        say(f"{name}: {estimate_saving(played).to_json()}")
        return estimate_saving(played)

    def oracle(error: float, character: Any = "honest") -> list[ModelAnswers]:
        made = OracleBackend(TABLES, error=error, character=character, token_s=1.0 / given.tokens_per_s)
        return collect_answers(TABLES, made, learn=fit_surrogate)

    for text in given.answers:
        name, path = text.split("=", 1)
        heard = read_answers(Path(path))
        arm(f"{name}, gate", heard, gate=decide_asking)
    for error in ERRORS:
        heard = oracle(error)
        worth = arm(f"oracle {error:g}, always", heard, gate=always_ask)
        arm(
            f"oracle {error:g}, gate",
            heard,
            gate=decide_asking,
            calibrated=_calibrate_with_saving(worth.lower_bound),
        )
    good = oracle(0.1)
    for character in ("liar", "blind"):
        arm(f"{character} since it was calibrated", oracle(0.1, character), calibrated=_vouched(good))
    report.finish(summary)


def _calibrate_with_saving(saved: float) -> Callable[[Sequence[ModelAnswers]], LLMCalibration]:
    return lambda heard: replace(fit_calibration(heard), saved=saved)


def _vouched(good: Sequence[ModelAnswers]) -> Callable[[Sequence[ModelAnswers]], LLMCalibration]:
    """What was found out of the same model when it was honest, on the same other families."""
    return lambda heard: fit_calibration([h for h in good if h.family in {o.family for o in heard}])


if __name__ == "__main__":
    main()
