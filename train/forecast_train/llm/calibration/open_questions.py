"""The questions of a calibration, for answers that are given offline: `llm ask --export --kind calibration`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from forecast_autotune.commands.recorded_tables import load_tables
from forecast_autotune.llm.open_question import OpenQuestion
from forecast_train.llm.calibration.answer_collection import cross_fitted, question_about
from forecast_train.surrogate.fit import fit


def calibration_questions(options: argparse.Namespace) -> Iterator[OpenQuestion]:
    """What `train calibrate-llm` asks about these tables: with guesses of a surrogate that has not seen the family.

    Raises `SplitError` for a single family.
    """
    for table, surrogate in cross_fitted(load_tables(options), fit):
        posed = question_about(table, surrogate.prior)
        label = str(table.problem.extra.get("label") or table.problem.id)
        kernel = table.problem.kernel.name
        yield OpenQuestion.of_prompt("calibration", posed.question.prompt, kernel, label)
