"""The process that launches machine code, and the handle on it."""
