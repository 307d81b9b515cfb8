"""Commands of the trainer: `train` and `eval`."""
