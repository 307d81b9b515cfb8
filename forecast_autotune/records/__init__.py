"""The nouns of the project: frozen, typed, and JSON both ways.

Every record becomes one JSON object (`to_json`) and is read back (`from_json`) by one mechanism, `codec`.
Fields that a newer version wrote and this one does not know are kept in `extra` and written out
again, so a table survives a round trip through an older release. Nothing here imports numpy, torch
or triton: the records must be cheap to load and safe to read on any machine.
"""

from forecast_autotune.records.candidate import (
    HOOK_VARIANT_PREFIX,
    LAUNCH_OPTIONS,
    OVERRIDE_DIGEST,
    Candidate,
    Config,
    Evidence,
    Measurement,
    Outcome,
    is_base_variant,
)
from forecast_autotune.records.decision import (
    Cost,
    Decision,
    LLMConsultation,
    MeasuringCost,
    Plan,
    RiskVerdict,
)
from forecast_autotune.records.json_fields import SCHEMA, Extra, Scalar, check_line, digest, to_scalar
from forecast_autotune.records.problem import Argument, Device, Kernel, Problem

__all__ = [
    "HOOK_VARIANT_PREFIX",
    "LAUNCH_OPTIONS",
    "OVERRIDE_DIGEST",
    "SCHEMA",
    "Argument",
    "Candidate",
    "Config",
    "Cost",
    "Decision",
    "Device",
    "Evidence",
    "Extra",
    "Kernel",
    "LLMConsultation",
    "Measurement",
    "MeasuringCost",
    "Outcome",
    "Plan",
    "Problem",
    "RiskVerdict",
    "Scalar",
    "check_line",
    "digest",
    "is_base_variant",
    "to_scalar",
]
