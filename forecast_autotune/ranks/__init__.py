"""The ranks of a job measure a problem together and end with one decision; see `ranks.tuning`."""
