"""What every measurer must obey."""

from __future__ import annotations

from collections.abc import Sequence

from forecast_autotune.records import (
    Candidate,
)
from forecast_autotune.tuning.measurer import Measurer


class MeasurerContract:
    """What every measurer must obey. Subclass it and implement `make`."""

    def make(self) -> tuple[Measurer, Sequence[Candidate]]:
        """A fresh measurer with at least two workers, and four or more candidates that run."""
        raise AssertionError("a contract test class must implement make()")

    def test_measures_what_is_asked_for_once(self) -> None:
        measurer, names = self.make()
        try:
            found = list(measurer.measure(names[:2], prefetch=names[2:3]))
            found += measurer.measure(names[2:4])
            spent = measurer.spent()
        finally:
            measurer.close()
        assert {m.candidate for m in found[:2]} == set(names[:2])
        assert {m.candidate for m in found[2:]} == set(names[2:4])
        assert all(m.ok for m in found)
        assert spent.timing_s > 0

    def test_what_is_prefetched_is_not_timed_unless_asked_for(self) -> None:
        measurer, names = self.make()
        try:
            measurer.prefetch([])
            measurer.prefetch(names[:1])
            measurer.prefetch(names[:2])
            assert measurer.spent().timing_s == 0
            others = list(measurer.measure(names[2:4]))
            later = list(measurer.measure(names[:1]))
            spent = measurer.spent()
        finally:
            measurer.close()
        assert {m.candidate for m in others} == set(names[2:4])
        assert [m.candidate for m in later] == list(names[:1])
        assert spent.compiled <= 4, "something was compiled twice"

    def test_what_does_not_come_in_time_comes_when_asked_for_again(self) -> None:
        measurer, names = self.make()
        try:
            found = list(measurer.measure(names[:3], within_s=0.0))
            assert set(measurer.compiling()) <= set(names[:3])
            assert all(seconds >= 0.0 for seconds in measurer.compiling().values())
            found += measurer.measure([c for c in names[:3] if c not in {m.candidate for m in found}])
            assert not measurer.compiling()
            spent = measurer.spent()
        finally:
            measurer.close()
        assert sorted(m.candidate.id for m in found) == sorted(c.id for c in names[:3])
        assert spent.compiled <= 3, "something was compiled twice"

    def test_what_is_timed_is_not_ready_and_what_was_not_listened_to_is(self) -> None:
        measurer, names = self.make()
        try:
            first = next(iter(measurer.measure(names[:2])))
            rest = [c for c in names[:2] if c != first.candidate]
            assert first.candidate not in measurer.ready()
            (second,) = measurer.measure(rest)
            assert not set(measurer.ready()) & set(names[:2])
        finally:
            measurer.close()
        assert [second.candidate] == rest
