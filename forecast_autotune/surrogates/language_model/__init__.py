"""A language model as a surrogate: its questions, its answers, and their weight."""
