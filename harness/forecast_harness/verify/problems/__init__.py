"""A pack as launches: drawn inputs, the reference's answer, and how far a right answer may be from it."""
