"""Decisions and tables, shown: one line, a table, JSON, a picture."""
