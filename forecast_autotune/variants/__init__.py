"""Other sources of a kernel: what they are, where they come from, and for what they were verified."""
