"""Write a surrogate of your own: forecast the time of every candidate, and say how sure you are.

A surrogate is any object with a name, a version and `forecast(query)`. The tuner checks what it answers,
so a wrong surrogate costs measurements, never a wrong result.

Output (numbers may differ):

    contract: 8 tests passed
    own surrogate: 24 of 80 configs measured, regret 0.0%
"""

import numpy as np

from forecast_autotune import (
    Candidate,
    Forecasts,
    Query,
    Settings,
    Surrogate,
    read_tables,
    replay,
    shipped_tables,
)
from forecast_autotune.testing import SurrogateContract


class NearestNeighbour:
    """Expects every candidate to be as fast as the most similar one that was measured."""

    name = "nearest-neighbour"
    version = "1"

    def forecast(self, query: Query) -> Forecasts:
        """Mean and standard deviation of log2(milliseconds), and the probability of failing."""
        places = [self._place(c) for c in query.candidates]
        known = [(self._place(m.candidate), np.log2(m.ms)) for m in query.measured if m.ok]
        mean, sd = np.zeros(len(places)), np.full(len(places), 2.0)
        for row, place in enumerate(places):
            if known:
                distance, time = min((self._distance(place, other), time) for other, time in known)
                mean[row], sd[row] = time, 0.01 + 0.3 * distance
        return Forecasts(query.candidates, mean, sd, np.full(len(places), 0.02), reason="nearest neighbour")

    def _place(self, candidate: Candidate) -> dict[str, float]:
        """Numeric parameters on a logarithmic scale."""
        config = candidate.config
        numbers = {k: v for k, v in config.kwargs if isinstance(v, int) and v > 0}
        numbers |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
        return {name: float(np.log2(value)) for name, value in numbers.items()}

    def _distance(self, one: dict[str, float], other: dict[str, float]) -> float:
        return sum(abs(one.get(name, 0.0) - other.get(name, 0.0)) for name in {*one, *other})


class TestNearestNeighbour(SurrogateContract):
    """In your test suite, pytest runs the tests that this class inherits."""

    def make(self) -> Surrogate:
        """The surrogate under test."""
        return NearestNeighbour()


def main() -> None:
    """Run the contract without pytest, then replay a recorded problem with the surrogate."""
    contract = TestNearestNeighbour()
    tests = [name for name in dir(contract) if name.startswith("test_")]
    for name in tests:
        getattr(contract, name)()
    print(f"contract: {len(tests)} tests passed")

    table = read_tables(shipped_tables()[0])[0]
    report = replay([table], surrogate=NearestNeighbour(), policy=lambda table: None, settings=Settings())
    (row,) = report.rows
    print(f"own surrogate: {row.measured} of {row.candidates} configs measured, regret {row.regret:.1%}")


if __name__ == "__main__":
    main()
