"""Timing: paired comparison, racing, promotion that survives repeated looks, plausibility."""
