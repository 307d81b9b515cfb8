"""The nouns of the project: frozen, typed, and JSON both ways.

Every record knows how to become one JSON object (`to_json`) and how to be read back (`from_json`).
Fields that a newer version wrote and this one does not know are kept in `extra` and written out
again, so a table survives a round trip through an older release. Nothing here imports numpy, torch
or triton: the records must be cheap to load and safe to read on any machine.
"""

from forecast_autotune.records.base import SCHEMA, Extra, Scalar, check_line, digest, plain
from forecast_autotune.records.candidate import HOOKED, Candidate, Config, Evidence, Outcome, of_base
from forecast_autotune.records.decision import Consulted, Cost, Decision, Plan, Spent, Verdict
from forecast_autotune.records.measurement import Measurement
from forecast_autotune.records.problem import Argument, Device, Kernel, Problem

__all__ = [
    "HOOKED",
    "SCHEMA",
    "Argument",
    "Candidate",
    "Config",
    "Consulted",
    "Cost",
    "Decision",
    "Device",
    "Evidence",
    "Extra",
    "Kernel",
    "Measurement",
    "Outcome",
    "Plan",
    "Problem",
    "Scalar",
    "Spent",
    "Verdict",
    "check_line",
    "digest",
    "of_base",
    "plain",
]
