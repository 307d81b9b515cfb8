"""Timing candidates on a live device."""
