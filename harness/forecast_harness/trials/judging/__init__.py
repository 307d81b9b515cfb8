"""Judging a node: verified, tuned by a race of its configs, timed beside the incumbent."""
