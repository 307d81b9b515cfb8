"""Stores as sets of rows: what makes two rows one, union, differences, compaction."""
