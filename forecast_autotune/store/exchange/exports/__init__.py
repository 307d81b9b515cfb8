"""Measurements and decisions in the formats of other tools: one module each, found by `EXPORT_FORMATS`."""

from forecast_autotune.store.exchange.exports.formats import EXPORT_FORMATS, write_export
from forecast_autotune.store.exchange.exports.tuned_problem import ExportReport, TunedProblem

__all__ = ["EXPORT_FORMATS", "ExportReport", "TunedProblem", "write_export"]
