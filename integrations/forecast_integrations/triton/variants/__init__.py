"""Other sources of a kernel in a user's process: loading, launching, and staying within what was verified."""
