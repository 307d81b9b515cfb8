"""Decisions on recorded tables instead of a device, and their simulated cost."""
