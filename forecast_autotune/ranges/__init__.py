"""One decision for a range of problems that differ in one size."""
