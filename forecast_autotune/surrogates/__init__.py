"""Surrogates: anything that forecasts without running the candidate."""
