"""Judges at work side by side, on this machine or on a Ray cluster."""
