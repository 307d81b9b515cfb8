"""What every surrogate must obey."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from forecast_autotune.records import (
    Candidate,
    Config,
    Device,
    Kernel,
    Measurement,
    Outcome,
    Problem,
)
from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate
from forecast_autotune.testing.tables import example_table, query_of
from forecast_autotune.tuning.loop import validate_forecasts


class SurrogateContract:
    """What every surrogate must obey. Subclass it and implement `make`."""

    def make(self) -> Surrogate:
        """A fresh surrogate."""
        raise AssertionError("a contract test class must implement make()")

    def ask(self, query: Query) -> Forecasts:
        """Forecasts of a fresh surrogate, refused unless the tuner would accept them."""
        return validate_forecasts(self.make().forecast(query), query.candidates)

    def test_answers_every_candidate_with_finite_numbers(self) -> None:
        assert self.make().name
        assert self.make().version
        for known in (0, 1, 5, 15):
            forecasts = self.ask(query_of(example_table(), known))
            assert (forecasts.sd > 0).all()

    def test_is_a_pure_function_of_the_query(self) -> None:
        query, again = query_of(example_table(), 5), query_of(example_table(), 5)
        surrogate = self.make()
        one, two, other = self.ask(query), surrogate.forecast(query), surrogate.forecast(query)
        rows = np.arange(len(query.candidates))
        for answer in (two, other):
            np.testing.assert_array_equal(one.mean, answer.mean)
            np.testing.assert_array_equal(one.p_fail, answer.p_fail)
            np.testing.assert_array_equal(one.samples(rows, 8, 3), answer.samples(rows, 8, 3))
        assert query == again, "the query was changed"

    def test_the_order_of_the_candidates_does_not_matter(self) -> None:
        query = query_of(example_table(), 4)
        turned = replace(query, candidates=list(reversed(query.candidates)))
        one, two = self.ask(query), self.ask(turned)
        np.testing.assert_allclose(one.mean, two.mean[::-1], atol=1e-6)
        np.testing.assert_allclose(one.sd, two.sd[::-1], atol=1e-6)

    def test_samples_follow_mean_and_sd(self) -> None:
        forecasts = self.ask(query_of(example_table(), 4))
        drawn = forecasts.samples(np.arange(len(forecasts)), 4096, 1)
        # Quartiles, as a `Forecast` defines point and spread: the draws need not be symmetric. With 4096
        # of them, a standard error of the median is 2 % of sd; five are far outside of chance.
        low, middle, high = np.quantile(drawn, (0.25, 0.5, 0.75), axis=0)
        assert (np.abs(middle - forecasts.mean) < 0.1 * forecasts.sd + 1e-3).all()
        np.testing.assert_allclose((high - low) / 1.349, forecasts.sd, rtol=0.25, atol=1e-3)

    def test_survives_a_problem_it_knows_nothing_of(self) -> None:
        bare = Problem("x", Kernel("?"), (), Device("?"))
        odd: list[dict[str, object]] = [
            {"MODE": "fast", "A": 0},
            {"MODE": "slow", "A": None},
            {"A": -3, "B": True},
            {},
        ]
        candidates = [Candidate(Config.of(kwargs)) for kwargs in odd]
        self.ask(Query(bare, candidates))
        self.ask(Query(bare, candidates[:1]))

    def test_survives_extreme_and_failed_measurements(self) -> None:
        table = example_table()
        names = list(table.by_candidate())
        rows = [
            Measurement(table.problem.id, c, o) for c, o in zip(names, Outcome, strict=False) if o != "ok"
        ]
        rows += [
            Measurement(table.problem.id, c, Outcome.OK, ms)
            for c, ms in zip(names[8:], (1e-6, 1e6), strict=False)
        ]
        self.ask(replace(query_of(table), measured=rows))
        self.ask(replace(query_of(table), measured=rows[:1] * 3))

    def test_a_fault_of_the_harness_teaches_nothing(self) -> None:
        query = query_of(example_table())
        fault = Measurement(query.problem.id, query.candidates[0], Outcome.INFRASTRUCTURE)
        np.testing.assert_array_equal(
            self.ask(query).p_fail, self.ask(replace(query, measured=[fault])).p_fail
        )

    def test_a_measured_candidate_is_known_better_than_before(self) -> None:
        table = example_table()
        before, after = self.ask(query_of(table, 0)), self.ask(query_of(table, 3))
        assert (after.sd[:3] < before.sd[:3]).all()
        truth = np.array([math.log2(m.ms) for m in table.measurements[:3]])
        assert (np.abs(after.mean[:3] - truth) <= np.abs(before.mean[:3] - truth) + 0.05).all()
