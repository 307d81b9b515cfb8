"""One decision for all ranks of a job; see `ranks.tuning`."""
