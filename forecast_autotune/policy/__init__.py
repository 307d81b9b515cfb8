"""Forecasts -> Plan: what to measure next, and when to stop. Sees no clock, no store, no model."""

from forecast_autotune.policy.baselines import Exhaustive, Fixed, IncludingRefused
from forecast_autotune.policy.risk_bounded import RiskBounded
from forecast_autotune.policy.state import REFUSED, Policy, TuningState, stated_risk, time_exhausted
from forecast_autotune.policy.wall_time import WallTime

__all__ = [
    "REFUSED",
    "Exhaustive",
    "Fixed",
    "IncludingRefused",
    "Policy",
    "RiskBounded",
    "TuningState",
    "WallTime",
    "stated_risk",
    "time_exhausted",
]
