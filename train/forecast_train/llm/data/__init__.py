"""From recorded tables to a data set for language models."""
