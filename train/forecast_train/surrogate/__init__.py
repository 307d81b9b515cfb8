"""Fit the learned surrogate to recorded tables."""

from forecast_train.surrogate.fit import fit, fit_model

__all__ = ["fit", "fit_model"]
