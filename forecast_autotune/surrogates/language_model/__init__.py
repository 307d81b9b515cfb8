"""A language model as a surrogate: what it is asked, what it answers, and how far it is followed."""
