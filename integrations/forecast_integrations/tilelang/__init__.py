"""TileLang kernels, tuned by forecasts."""
