"""`train`: turn measurements into better surrogates."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

from forecast_autotune.commands.output import Output, UsageError, require_packages
from forecast_autotune.commands.recorded_tables import load_tables


def surrogate(options: argparse.Namespace, output: Output) -> int:
    """Fit the learned surrogate to tables, and write it as one npz file."""
    from forecast_autotune.report.table import shown_text
    from forecast_train.surrogate import fit_model
    from forecast_train.surrogate.fit import FitSettings

    require_packages("fitting", "sklearn", "lightgbm")
    out = Path(options.out)
    if out.suffix != ".npz" or not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: the name must end in .npz, in a directory that exists")
    tables = load_tables(options)
    begin = time.perf_counter()
    recipe = FitSettings(trees=options.trees, leaf=options.leaf)
    with output.progress("fitting"):
        if options.hyper:
            from forecast_train.surrogate.hyperparameters import fit_all

            hyper, _ = fit_all(tables, seed=options.seed, recipe=recipe)
            recipe = replace(recipe, hyper=hyper)
        model = fit_model(tables, seed=options.seed, recipe=recipe)
    model.save(out)
    seconds = time.perf_counter() - begin
    about = dict(model.about or {})
    found = {**about, "path": str(out), "bytes": out.stat().st_size, "seconds": round(seconds, 2)}
    output.emit(
        found,
        shown_text(
            f"fitted to {about['rows']} rows of {about['problems']} problems of {about['kernels']} kernels "
            f"in {seconds:.1f} s: {out} ({out.stat().st_size / 1e6:.2f} MB)\n"
            f"use it with FORECAST_AUTOTUNE_MODEL={out}",
            lines=True,
        ),
    )
    return 0
