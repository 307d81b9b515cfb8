"""Backends: one file per way to reach a language model; each imports its library when it is opened."""
