"""A store as one page: its problems, what was decided of them and why, and how well that was known."""
