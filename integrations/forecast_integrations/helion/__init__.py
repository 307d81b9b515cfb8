"""Helion's autotuner with our surrogate as its ranker. See `search.enable_helion`."""
