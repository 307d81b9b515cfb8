"""Inductor's choices in our words: their records, features, and forecasts."""
