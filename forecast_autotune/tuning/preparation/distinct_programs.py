"""Which candidates of a task need no measurement of their own, as another compiles to the same program."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from forecast_autotune.features.candidate_list import CandidateList, Codes
from forecast_autotune.features.equal_programs import program_numbers
from forecast_autotune.numerics import fast_unique
from forecast_autotune.records import Candidate, Problem
from forecast_autotune.tuning.preparation.tracing import LazyTraces


class DistinctPrograms:
    """Numbers of programs per candidate; asked again whenever IR has come in."""

    def __init__(self, problem: Problem, candidates: CandidateList, traces: LazyTraces) -> None:
        self._candidates, self._traces = candidates, traces
        self._applies = problem.kernel.language == "triton" and problem.device.backend == "cuda"
        self._texts = -1
        self._numbers: Codes | None = None

    def numbers(self) -> Codes | None:
        """As `program_numbers`; None where nothing is known of what is equal."""
        if self._applies and self._texts != len(self._traces.texts):
            self._texts = len(self._traces.texts)
            self._numbers = program_numbers(self._candidates, self._traces.facts)
        return self._numbers

    def count(self) -> int:
        """How many different programs the candidates compile to, as far as is known."""
        numbers = self.numbers()
        return len(self._candidates) if numbers is None else len(fast_unique(numbers))

    def count_equal(self, labels: Collection[Candidate]) -> int:
        """How many candidates without a label share their program with one that has one."""
        if (numbers := self.numbers()) is None:
            return 0
        labelled = self._candidates.mask_of(labels)
        return int(np.isin(numbers, numbers[labelled]).sum() - labelled.sum())
