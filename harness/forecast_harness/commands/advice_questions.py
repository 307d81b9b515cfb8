"""The questions for advice, for answers that are given offline: `llm ask --export FILE --kind advice`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from forecast_autotune.commands.output import UsageError
from forecast_autotune.commands.recorded_tables import load_tables
from forecast_autotune.commands.store_access import open_store
from forecast_autotune.llm.advice.question import ADVICE_VERSION, advice_prompt
from forecast_autotune.llm.open_question import OpenQuestion
from forecast_autotune.records.table import Table
from forecast_harness.targets.kernels.advised_kernels import AdvisedKernel


def advice_questions(options: argparse.Namespace) -> Iterator[OpenQuestion]:
    """The questions of `advise --stored` about a store or tables; no measurement is in them."""
    if options.store is not None and options.tables:
        raise UsageError("--store and TABLE files exclude each other: give one")
    tables: Iterable[Table] = load_tables(options) if options.store is None else open_store(options).tables()
    for kernel in AdvisedKernel.of_tables(tables):
        prompt = advice_prompt(kernel.samples, kernel.source)
        yield OpenQuestion("advice", ADVICE_VERSION, kernel.kernel.name, prompt, kernel.kernel.name)
