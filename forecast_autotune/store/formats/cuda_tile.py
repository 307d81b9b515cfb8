"""Results of cuda-tile's tuner, which it keeps in memory alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forecast_autotune.records import Candidate, Config, Device, Kernel, Measurement, Outcome, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.store.formats.protocol import IMPORTED_FROM, flat_parameters

_PROTOCOL = "cuda-tile"


def cuda_tile_table(result: Any, kernel: str, device: Device, key: Sequence[str] = ()) -> Table:
    """The measurements in a result of cuda-tile's exhaustive search, for `Store.import_tables`.

    `key` tells problems of one kernel apart: shapes and dtypes as texts. Times are means; a config that was given up
    early has five samples.
    """
    about = {IMPORTED_FROM: _PROTOCOL}
    problem = Problem.of(Kernel(kernel, "cuda-tile"), (), device, key=key, extra=about)
    rows = [
        Measurement(
            problem.id,
            _candidate(m.config),
            Outcome.OK,
            m.mean_us / 1000.0,
            repeats=m.num_samples,
            protocol=_PROTOCOL,
            extra={"error_margin_us": m.error_margin_us},
        )
        for m in result.successes
    ]
    for config, kind, message in result.failures:
        name = kind.__name__.lower()
        outcomes = [Outcome.TIMEOUT] * ("timeout" in name) + [Outcome.COMPILE_ERROR] * ("compil" in name)
        outcome = [*outcomes, Outcome.RUNTIME_ERROR][0]
        about = {"message": f"{kind.__name__}: {message}"[:400]}
        rows.append(Measurement(problem.id, _candidate(config), outcome, protocol=_PROTOCOL, extra=about))
    return Table(problem, rows)


def _candidate(config: Any) -> Candidate:
    """Named fields become parameters, whatever class holds them."""
    if not isinstance(config, Mapping):
        fields = getattr(config, "_asdict", None)
        config = fields() if fields else getattr(config, "__dict__", None) or {"config": config}
    return Candidate(Config.of(dict(flat_parameters(config))))
