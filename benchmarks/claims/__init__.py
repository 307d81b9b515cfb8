"""The manifest of measured claims: its contents, whether README and docs agree with it, and stale entries."""
