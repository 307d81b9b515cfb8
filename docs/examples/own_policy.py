"""Write a policy of your own: from the forecasts and what is measured so far, plan what to measure next.

Output (numbers may differ):

    contract: 8 tests passed
    own policy:     15 of 80 configs measured, regret 0.0%, stated risk 11%
    default policy: 24 of 80 configs measured, regret 0.3%, stated risk 10%
"""

import numpy as np

from forecast_autotune import (
    AnalyticSurrogate,
    Plan,
    Policy,
    Settings,
    TuningState,
    WallTime,
    read_tables,
    replay,
    shipped_tables,
    stated_risk,
)
from forecast_autotune.testing import PolicyContract


class StopWithoutGain:
    """Measures the three best forecasts at a time, until a round improves nothing."""

    name = "stop-without-gain"

    def plan(self, state: TuningState) -> Plan:
        """The next round; a plan without candidates ends the decision."""
        rows = state.pending()
        samples = state.forecasts.samples(rows, 512, state.seed)
        risk = stated_risk(state, rows, samples)
        order = rows[np.argsort(state.forecasts.optimistic()[rows], kind="stable")]
        chosen = [state.forecasts.candidates[i] for i in order[: min(3, state.remaining_measurements())]]
        times = [m.ms for m in state.measured.values() if m.ok]
        improved = len(times) <= 3 or min(times[-3:]) < min(times[:-3])
        if not improved and not state.lacks_working_config():
            return Plan((), "the last round improved nothing", risk)
        return Plan(tuple(chosen), "the three best forecasts" if chosen else "nothing left to measure", risk)


class TestStopWithoutGain(PolicyContract):
    """In your test suite, pytest runs the tests that this class inherits."""

    def make(self) -> Policy:
        """The policy under test."""
        return StopWithoutGain()


def main() -> None:
    """Run the contract without pytest, then compare the policies on a recorded problem."""
    contract = TestStopWithoutGain()
    tests = [name for name in dir(contract) if name.startswith("test_")]
    for name in tests:
        getattr(contract, name)()
    print(f"contract: {len(tests)} tests passed")

    table = read_tables(shipped_tables()[0])[0]
    own, default = StopWithoutGain(), WallTime()
    for label, choose in (("own policy:", lambda table: own), ("default policy:", lambda table: default)):
        report = replay([table], surrogate=AnalyticSurrogate(), policy=choose, settings=Settings())
        (row,) = report.rows
        print(
            f"{label:15} {row.measured} of {row.candidates} configs measured, regret {row.regret:.1%}, "
            f"stated risk {row.stated_risk:.0%}"
        )


if __name__ == "__main__":
    main()
