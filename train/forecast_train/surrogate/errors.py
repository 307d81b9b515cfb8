"""What can go wrong when a surrogate is fitted."""

from __future__ import annotations

from forecast_autotune.errors import ForecastAutotuneError


class FitError(ForecastAutotuneError, ValueError):
    """Nothing can be fitted to these tables; the message says why."""
