"""Forecasts of whole sources before they run: learnt in the search, from Triton's IR, by language models."""

from forecast_harness.search.forecasters.factory import open_forecaster

__all__ = ["open_forecaster"]
