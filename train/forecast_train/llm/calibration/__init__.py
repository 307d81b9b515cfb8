"""Calibration of a language model's answers: collected on recorded problems, and fitted."""
