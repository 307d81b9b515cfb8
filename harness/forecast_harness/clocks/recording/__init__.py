"""Code that runs in a cell, next to the candidate, whose launches are recorded; none happens."""
