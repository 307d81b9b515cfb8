"""One rank of a job on the null device: decides one key, and says what it chose.

    torchrun ... rank_worker.py FOLDER VICTIM

In the job's first attempt rank VICTIM kills itself at the third launch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def offered() -> list[Any]:
    """The configs of the key."""
    from tests.integrations.null import configs

    return configs(stages=(2, 3, 4))


def decide(folder: Path, store: Path, on_launch: Callable[[int], None], mode: str = "exhaustive") -> None:
    """Decide one key on a null device, and write what was decided into `folder`."""
    from forecast_autotune import autotune
    from forecast_integrations.triton.null_device import null_device
    from tests.integrations.null import by_launch_options, double, fresh, launch

    launches = 0

    def clock(metadata: Any) -> float:
        nonlocal launches
        launches += 1
        on_launch(launches)
        # So close that most are finalists, which are timed side by side.
        return 1.0 + 0.04 * (by_launch_options(metadata) - 1.0)

    tuner = autotune(configs=offered(), key=["n"], mode=mode, store=store)(fresh(double))
    with warnings.catch_warnings(record=True) as seen, null_device(clock):
        warnings.simplefilter("always")
        launch(tuner)
    decision = tuner.decision
    assert decision is not None
    found = {
        "rank": int(os.environ["RANK"]),
        "chosen": str(decision.chosen),
        "measured": decision.measured,
        "evidence": str(decision.evidence),
        "warnings": [str(w.message) for w in seen if "rank" in str(w.message)],
    }
    (folder / f"decision-{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")


def die(launches: int) -> None:
    """Kill this process in the midst of timing."""
    if launches == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """What torchrun starts."""
    folder, victim = Path(sys.argv[1]), sys.argv[2]
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    dies = first and os.environ["RANK"] == victim
    decide(folder, folder / "store", die if dies else lambda launches: None)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
