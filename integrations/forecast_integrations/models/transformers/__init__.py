"""A language model in this process, by transformers."""
