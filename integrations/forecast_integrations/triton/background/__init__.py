"""Tuning while a program runs: timing in slices on later launches of a key, or whole where the program waits for it."""
