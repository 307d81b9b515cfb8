"""Measurements of other tools, read into the store; tables for other tools, written."""
