"""Decisions on recorded tables instead of a device: what plays one, and what it would have cost."""
